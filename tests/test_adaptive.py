"""The adaptive tree: the best of its candidates by brute force, calibration, rest and recovery, and any outcome lossless."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.adaptive import DEPTH, HABIT, PATIENCE, PROBE, REST, AdaptiveTree, Experience
from eyas.budget import NARROW, ONE_LEVEL, WIDE, StepCosts
from eyas.drafters.eagle import EagleDraft
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.options import check_options
from eyas.tree import DraftTree, DynamicTree, grow, root_tree
from tests.drafts import engine, random_draft, trained_draft
from tests.families import VOCABULARY
from tests.helpers import TableDraft, properties


def costs(slope: float = 0.03, level: float = 0.05, first: float = 0.08) -> StepCosts:
    """Plain decoding takes 1 second, a further node ``slope``."""
    drafting = {ONE_LEVEL: first, NARROW: first + 3 * level, WIDE: first + 5 * level}
    return StepCosts({1: 1.0, 2: 1.0 + slope, 61: 1.0 + 60 * slope}, drafting)


def adaptive(tree_costs: StepCosts | None = None, **limits: int) -> AdaptiveTree:
    return AdaptiveTree(tree_costs or costs(), Experience(), **limits)


def grown(policy: AdaptiveTree, *confidences: float, depth: int = DEPTH) -> DraftTree:
    """A step's tree of a draft that gives every node children of these confidences, best first."""
    growing = policy.limited(depth)
    if growing is None:
        return root_tree(torch.zeros(1, dtype=torch.int64))
    draft = TableDraft([lambda path: [math.log(share) for share in confidences]])
    return grow(growing, torch.zeros(1, dtype=torch.int64), draft.first, draft.draft)


def test_costs_are_straight_lines_between_and_beyond_what_was_measured() -> None:
    found = StepCosts({1: 1.0, 5: 2.0, 9: 4.0}, {ONE_LEVEL: 1.0, NARROW: 4.0, WIDE: 11.0}, commit=0.5)
    assert [found.target(nodes) for nodes in (1, 3, 5, 6, 9, 11)] == [1.0, 1.5, 2.0, 2.5, 4.0, 5.0]
    assert found.beyond(2, 3).tolist() == [0.5, 1.25, 2.25]  # T(4), T(6), T(8) less T(2)
    assert found.first == 1.5
    assert [found.level(rows) for rows in (4, 7, 10)] == pytest.approx([1.0, 1.5, 2.0])


def test_noise_makes_no_node_free_of_charge_twice() -> None:
    """A larger tree timed faster by chance must not look cheaper than a smaller one."""
    found = StepCosts({1: 1.0, 2: 1.4, 3: 1.2, 61: 2.0}, {})
    assert (found.beyond(1, 60).diff() >= 0).all()


@properties
@given(st.lists(st.floats(0.001, 0.999), min_size=3, max_size=3), st.floats(0.001, 0.5), st.integers(1, 3))
def test_as_many_nodes_as_pay(confidences: list[float], slope: float, depth: int) -> None:
    """Of all numbers of best nodes, the one with the largest Σ v − ρ · seconds (ρ is plain decoding's before any step)."""
    policy = adaptive(costs(slope, level=0.0), depth=depth, top_k=3)
    total = max(sum(confidences), 1.0)
    tree = grown(policy, *(share / total for share in sorted(confidences, reverse=True)))
    values = sorted(torch.cat(policy.experience.values, dim=1)[0].tolist(), reverse=True)
    worth = [sum(values[:n]) - n * slope for n in range(len(values) + 1)]
    assert worth[tree.size - 1] == pytest.approx(max(worth), abs=1e-5)
    assert tree.log_values[0, 1:].exp().sum() == pytest.approx(sum(values[: tree.size - 1]), rel=1e-4)


def test_a_level_is_drafted_only_if_it_pays() -> None:
    sure, unsure = (0.9, 0.05, 0.03), (0.1, 0.1, 0.1)
    for confidences, price, deepest in ((sure, 0.01, DEPTH), (sure, 2.0, 1), (unsure, 0.2, 1)):
        policy = adaptive(costs(level=price), top_k=3)
        grown(policy, *confidences)
        assert len(policy.experience.values) == deepest


def test_limited_cuts_depth() -> None:
    policy = adaptive(costs(level=0.0), top_k=3)
    limited = policy.limited(2)
    assert limited is not None and limited.depth == 2 and limited.experience is policy.experience


def node(confidence: float, accepted: bool) -> tuple[DraftTree, list[list[int]], torch.Tensor]:
    """A tree of one draft node, what became of it, and the draft's log-probability of it."""
    tree = DraftTree(
        torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), torch.tensor([[0.0, math.log(confidence)]]), torch.tensor([[0, 1]]), 1
    )
    return tree, [[0, 1] if accepted else [0]], torch.tensor([[math.log(confidence)]])


def test_promises_are_believed_as_far_as_they_were_kept() -> None:
    experience, seen = Experience(), torch.tensor([[[math.log(0.85), math.log(0.03)]]])
    assert torch.equal(experience.calibrated(1, seen), seen), "an unknown draft is taken at its word"
    for step in range(200):
        tree, paths, raw = node(0.85, accepted=step % 2 == 0)
        experience.raw = [raw]
        experience.learn(tree, paths)
    likely, unlikely = experience.calibrated(1, seen)[0, 0].exp().tolist()
    promised, kept = experience.promised[1].sum(), experience.kept[1].sum()
    assert likely == pytest.approx(0.85 * float((kept + HABIT) / (promised + HABIT))) and 0.48 < likely < 0.56
    assert unlikely == pytest.approx(0.03), "another height has its own record"
    assert torch.equal(experience.calibrated(2, seen), seen), "so has another depth"


def test_nodes_below_a_rejected_one_say_nothing() -> None:
    """A chain whose first node was rejected: the second was never offered."""
    experience = Experience()
    tree = DraftTree(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 0, 1]]), torch.zeros(1, 3), torch.tensor([[0, 1, 2]]), 2)
    experience.raw = [torch.tensor([[0.5, 0.5]]).log()]
    experience.learn(tree, [[0]])
    assert experience.promised[1].sum() == 0.5 and experience.kept.sum() == 0 and experience.promised[2].sum() == 0


def follow(policy: AdaptiveTree, steps: int, lucky: bool) -> list[int]:
    """Sizes of the trees of some steps, in which the best first token is right or nothing is."""
    sizes = []
    for _ in range(steps):
        tree, path = grown(policy, 0.6, 0.2, 0.1), [0]
        while lucky and (children := [child for child in range(1, tree.size) if int(tree.parents[0, child]) == path[-1]]):
            path.append(children[0])
        policy.learn(tree, [path], 1.0)
        sizes.append(tree.size)
    return sizes


def test_a_useless_draft_is_given_a_rest_and_another_chance() -> None:
    """Never right: almost all steps are plain decoding, with a small probe after each rest. Right again: used again."""
    policy = adaptive()
    assert min(follow(policy, 30, lucky=True)) > 1
    follow(policy, 100, lucky=False)
    sizes = follow(policy, 3 * (REST + 1), lucky=False)
    assert sizes.count(1) == 3 * REST and sizes.count(PROBE + 1) == 3
    recovered = follow(policy, 20, lucky=True)
    assert min(recovered[REST + 1 :]) > 1 and max(recovered[REST + 1 :]) > PROBE
    assert PATIENCE + REST < 20


def test_nothing_is_drafted_while_it_rests() -> None:
    policy = adaptive()
    policy.experience.rest = 1
    assert policy.limited(3) is None


@pytest.mark.parametrize("draft", ["random", "trained"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": [3, 4, 5]}], ids=["greedy", "sampled"])
def test_lossless_alone_and_in_a_batch(draft: str, sampling: dict[str, object]) -> None:
    """Rests, probes and trees of any size: the tokens are plain decoding's."""
    target = engine("llama").target
    chosen = Engine(target, random_draft(target) if draft == "random" else trained_draft(target, "llama"))
    prompts = [[7], [1, 5, 9, 2], [30, 31]]
    plain = [result.token_ids for result in chosen.generate(prompts, method="autoregressive", max_new_tokens=50, **sampling)]
    for price in (0.001, 0.1):
        policy = AdaptiveTree(costs(slope=price), Experience())
        results = chosen.generate(prompts, tree=policy, max_new_tokens=50, **sampling)
        assert [result.token_ids for result in results] == plain
        assert policy.experience.seconds > 0


def test_it_is_the_default_and_fixed_is_as_published() -> None:
    assert check_options({}).adaptive and check_options({"tree": "adaptive"}).adaptive
    for given_options, expected in (
        ({"tree": "fixed"}, DynamicTree()), ({"tokens": 12}, DynamicTree(12)),
        ({"tree": "fixed", "width": 3}, DynamicTree(top_k=3)),
    ):  # fmt: skip
        call = check_options(given_options)
        assert not call.adaptive and call.policy == expected
    for wrong, word in (
        ({"tree": "large"}, "unknown"), ({"tree": "adaptive", "depth": 3}, "depth is a setting of the fixed tree"),
        ({"tree": "fixed", "method": "chain"}, "has a tree of its own"),
    ):  # fmt: skip
        with pytest.raises(EyasError, match=word):
            check_options(wrong)


def test_an_engine_measures_once() -> None:
    chosen = engine("llama")
    first = Engine(chosen.target, chosen.draft)
    assert first.adaptive is first.adaptive and set(first.adaptive.costs.draft) == {ONE_LEVEL, NARROW, WIDE}
    assert replace(first.adaptive).experience is first.adaptive.experience
    with pytest.raises(EyasError, match="needs a draft"):
        Engine(chosen.target, None).adaptive  # noqa: B018
    assert isinstance(first.draft, EagleDraft) and first.target.vocab_size == VOCABULARY
