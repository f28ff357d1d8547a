"""The published policies' settings, and the ranking they rest on; how their trees grow is in test_tree."""

from __future__ import annotations

import pytest
import torch

from eyas.errors import EyasError
from eyas.policies import EAGLE1_TREE, DynamicTree, StaticTree, best, chain
from tests.helpers import Path


def test_limited_cuts_depth_and_nothing_else() -> None:
    """Near the end of a request no level may be drafted that could not be delivered."""
    dynamic = DynamicTree(tokens=7, depth=5, top_k=3, rank_by="confidence", rerank=False)
    assert dynamic.limited(2) == DynamicTree(tokens=7, depth=2, top_k=3, rank_by="confidence", rerank=False)
    assert dynamic.limited(9) == dynamic
    assert EAGLE1_TREE.limited(9) == EAGLE1_TREE
    assert EAGLE1_TREE.limited(2).nodes == EAGLE1_TREE.nodes[:12]
    assert chain(6).limited(1) == chain(1)


def test_best_breaks_ties_by_order() -> None:
    """The stable order is what connectedness rests on; long rows take other sorting paths than short ones."""
    scores = torch.zeros(2, 5000)
    scores[1, 4000:] = 1.0
    assert best(scores, 3).tolist() == [[0, 1, 2], [4000, 4001, 4002]]
    assert best(scores, 9999).shape == (2, 5000)
    assert torch.equal(best(scores, 9999)[0], torch.arange(5000))


@pytest.mark.parametrize(
    "options",
    [{"tokens": 0}, {"tokens": -3}, {"depth": 0}, {"top_k": 0}, {"rank_by": "luck"}],
)
def test_bad_dynamic_settings_are_refused(options: dict[str, object]) -> None:
    """Otherwise they crash deep inside, or draft nothing in silence."""
    with pytest.raises(EyasError) as caught:
        DynamicTree(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("nodes", [(), ((),), ((0,), (1, 0)), ((0, 0),), ((0,), (-1,)), ((0,), (0, -2))])
def test_bad_static_shapes_are_refused(nodes: tuple[Path, ...]) -> None:
    """A node without its parent, or a rank below the best, is no tree."""
    with pytest.raises(EyasError):
        StaticTree(nodes)


def test_bad_chain_is_refused() -> None:
    """No depth, no chain."""
    with pytest.raises(EyasError, match="depth is 0"):
        chain(0)
