"""Masks against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_causal_mask_function

from eyas.masks import additive, tree_visibility, within_window
from tests.helpers import few


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_is_zero_where_visible_and_lowest_elsewhere(dtype: torch.dtype) -> None:
    """−inf in place of the lowest number gives NaN in rows without any key; another dtype is refused by attention."""
    visible = torch.tensor([[[True, False], [True, True]], [[False, True], [False, False]]])
    mask = additive(visible, dtype)
    assert mask.shape == (2, 1, 2, 2) and mask.dtype == dtype
    assert torch.equal(mask[:, 0] == 0, visible)
    assert (mask[:, 0][~visible] == torch.finfo(dtype).min).all()
    assert mask.float().softmax(-1).isfinite().all()


def test_a_node_sees_its_prefix_and_its_ancestors() -> None:
    """Nothing of a longer row's prefix, and nothing of another branch."""
    prefix = torch.tensor([[True, True, True], [True, False, False]])
    relation = torch.tensor([[[True, False], [True, True]], [[True, False], [False, True]]])
    assert tree_visibility(prefix, relation).tolist() == [
        [[True, True, True, True, False], [True, True, True, True, True]],
        [[True, False, False, True, False], [True, False, False, False, True]],
    ]


def test_an_empty_prefix_leaves_the_tree_alone() -> None:
    """The first forward of a draft has nothing before it."""
    relation = torch.eye(3, dtype=torch.bool).expand(2, 3, 3)
    assert torch.equal(tree_visibility(torch.zeros(2, 0, dtype=torch.bool), relation), relation)


@few
@given(st.integers(0, 9), st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), min_size=1), st.integers(1, 12))
def test_the_window_counts_positions_not_places(length: int, positions: list[list[int]], window: int) -> None:
    """Siblings share a position though they are stored one after the other: a window over places would be too narrow.
    The token itself counts, as in transformers' sliding windows."""
    found = within_window(length, torch.tensor(positions), window)
    assert found.shape == (len(positions), 3, length + 3)
    for row, own in enumerate(positions):
        keys = [*range(length), *own]
        for node, query in enumerate(own):
            assert found[row, node].tolist() == [query - key < window for key in keys]


def test_the_window_equals_transformers_own() -> None:
    """For a chain the window is the one transformers' masks draw."""
    function = sliding_window_causal_mask_function(4)
    causal = torch.ones(10, 10).tril().bool()
    ours = within_window(0, torch.arange(10)[None], 4)[0] & causal
    for query in range(10):
        for key in range(10):
            assert bool(ours[query, key]) == bool(function(0, 0, torch.tensor(query), torch.tensor(key)))
