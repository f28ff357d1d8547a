"""The adaptive tree: the best of its candidates by brute force, calibration, rest and recovery, and any outcome lossless."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas import budget, decode
from eyas import engine as engine_room
from eyas.adaptive import DEPTH, HABIT, PROBE, REST, AdaptiveTree, Experience, Growth
from eyas.budget import CONTEXT, FAR, NARROW, ONE_LEVEL, WIDE, StepCosts, measure_context, measure_costs
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.options import check_options
from eyas.policies import DynamicTree
from eyas.target import Target
from eyas.tree import DraftTree, grow, root_tree
from tests.drafts import engine, random_draft, trained_draft
from tests.helpers import TableDraft, properties


def costs(slope: float = 0.03, level: float = 0.05, first: float = 0.08) -> StepCosts:
    """Plain decoding takes 1 second, a further node ``slope``."""
    drafting = {ONE_LEVEL: first, NARROW: first + 3 * level, WIDE: first + 5 * level}
    return StepCosts({1: 1.0, 2: 1.0 + slope, 61: 1.0 + 60 * slope}, drafting)


def adaptive(tree_costs: StepCosts | None = None, **limits: int) -> AdaptiveTree:
    return AdaptiveTree(tree_costs or costs(), Experience(), **limits)


def grown(
    policy: AdaptiveTree, *confidences: float, depth: int = DEPTH, context: int = 0, batch: int = 1
) -> tuple[Growth | None, DraftTree]:
    """A step's tree of a draft that gives every node children of these confidences, best first."""
    growing, roots = policy.limited(depth, context), torch.zeros(batch, dtype=torch.int64)
    if growing is None:
        return None, root_tree(roots)
    draft = TableDraft([lambda path: [math.log(share) for share in confidences]] * batch)
    return growing, grow(growing, roots, draft.first, draft.draft)


def test_costs_are_straight_lines_between_and_beyond_what_was_measured() -> None:
    found = StepCosts({1: 1.0, 5: 2.0, 9: 4.0}, {ONE_LEVEL: 1.0, NARROW: 4.0, WIDE: 11.0}, commit=0.5)
    assert [found.target(nodes) for nodes in (1, 3, 5, 6, 9, 11)] == [1.0, 1.5, 2.0, 2.5, 4.0, 5.0]
    assert found.beyond(2, 3).tolist() == [0.5, 1.25, 2.25]  # T(4), T(6), T(8) less T(2)
    assert found.first == 1.5
    assert [found.level(rows) for rows in (4, 7, 10)] == pytest.approx([1.0, 1.5, 2.0])


def test_context_costs_by_row_and_by_node() -> None:
    found = StepCosts({1: 1.0, 61: 61.0}, {}, reach=0.5, attention=0.25)
    assert found.target(1, context=CONTEXT) == 1.0 and found.target(1, context=CONTEXT + 4) == 1.0 + 4 * (0.5 + 0.25)
    assert found.target(6, batch=2, context=CONTEXT + 4) == pytest.approx(6.0 + 4 * (2 * 0.5 + 6 * 0.25))
    short, long = found.beyond(2, 3), found.beyond(2, 3, CONTEXT + 4)
    assert (long - short).tolist() == [2.0, 4.0, 6.0]  # a node a row: two nodes more, each 4 · 0.25


def test_a_long_context_makes_smaller_trees() -> None:
    policy = AdaptiveTree(replace(costs(), attention=0.001), Experience(), top_k=3)
    sizes = []
    for context in (CONTEXT, 300, 3000):
        sizes.append(grown(policy, 0.7, 0.2, 0.05, context=context)[1].size)
    assert sizes[0] > sizes[1] > sizes[2] == 1


def test_context_is_measured_on_a_target_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a forward takes a millisecond a node and a microsecond a token of context for each."""
    chosen, nodes = engine("llama"), []
    assert chosen.draft is not None
    made = measure_costs(chosen.draft, (), (), rounds=1)
    assert measure_context(chosen.draft, made) == made, "a context of a few tokens: nothing to measure"
    monkeypatch.setattr(chosen.target, "context_limit", 4096)
    monkeypatch.setattr(chosen.target, "prefill", lambda cache, prompts, with_features=True: nodes.append(len(prompts[0])))
    monkeypatch.setattr(budget, "_verify", lambda target, cache, size: nodes.append(size))

    def seconds(call: Any, device: torch.device) -> float:
        call()
        return float(1e-3 * nodes[-1] + 1e-6 * nodes[-1] * FAR)

    monkeypatch.setattr(budget, "_seconds", seconds)
    found = measure_context(chosen.draft, StepCosts({size: 1e-3 * size + 1e-6 * size * CONTEXT for size in (1, 61)}, {}))
    assert nodes[0] == FAR and found.attention == pytest.approx(1e-6) and found.reach == pytest.approx(0, abs=1e-9)


def test_noise_makes_no_node_free_of_charge_twice() -> None:
    """A larger tree timed faster by chance must not look cheaper than a smaller one."""
    found = StepCosts({1: 1.0, 2: 1.4, 3: 1.2, 61: 2.0}, {})
    assert (np.diff(found.beyond(1, 60)) >= 0).all()


@properties
@given(st.lists(st.floats(0.001, 0.999), min_size=3, max_size=3), st.floats(0.001, 0.5), st.integers(1, 3))
def test_as_many_nodes_as_pay(confidences: list[float], slope: float, depth: int) -> None:
    """Of all numbers of best nodes, the one with the largest Σ v − ρ · seconds (ρ is plain decoding's before any step)."""
    total = max(sum(confidences), 1.0)
    ranked = [share / total for share in sorted(confidences, reverse=True)]
    growing, tree = grown(adaptive(costs(slope, level=0.0), depth=depth, top_k=3), *ranked)
    assert growing is not None
    values = sorted(np.exp(np.concatenate(growing.log_values, 1))[0].tolist(), reverse=True)
    worth = [sum(values[:n]) - n * slope for n in range(len(values) + 1)]
    assert worth[tree.size - 1] == pytest.approx(max(worth), abs=1e-5)
    assert tree.log_values[0, 1:].exp().sum() == pytest.approx(sum(values[: tree.size - 1]), rel=1e-4)
    assert tree.max_depth == int(tree.depths.max()), "no level counts as offered of which nothing was chosen"


def test_a_level_is_drafted_only_if_it_pays() -> None:
    sure, unsure = (0.9, 0.05, 0.03), (0.1, 0.1, 0.1)
    for confidences, price, deepest in ((sure, 0.01, DEPTH), (sure, 2.0, 1), (unsure, 0.2, 1)):
        growing, _ = grown(adaptive(costs(level=price), top_k=3), *confidences)
        assert growing is not None and len(growing.log_values) == deepest


def test_limits_are_kept() -> None:
    policy = adaptive(costs(level=0.0), depth=100, top_k=3)
    assert [growing.depth for growing in (policy.limited(2), policy.limited(50)) if growing] == [2, DEPTH]
    _, tree = grown(adaptive(costs(slope=0.0, level=0.0), tokens=7, top_k=3), 0.8, 0.1, 0.1)
    assert tree.size == 8


def tree_of(parents: list[list[int]], depths: list[list[int]]) -> tuple[Any, Any]:
    return np.array(parents), np.array(depths)


def test_promises_are_believed_as_far_as_they_were_kept() -> None:
    experience, seen = Experience(), np.log(np.array([[[0.85, 0.03]]], np.float32))
    assert np.array_equal(experience.calibrated(1, seen), seen), "an unknown draft is taken at its word"
    for step in range(400):
        experience.judge(seen[0, :, :1], *tree_of([[0, 0]], [[0, 1]]), [[0, 1] if step % 2 else [0]])
    likely, unlikely = np.exp(experience.calibrated(1, seen))[0, 0].tolist()
    promised, kept = experience.promised[1].sum(), experience.kept[1].sum()
    assert likely == pytest.approx(
        0.85 * float((kept + HABIT * (kept + HABIT) / (promised + HABIT)) / (promised + HABIT)), rel=1e-4
    )
    assert 0.48 < likely < 0.56
    overall = (kept + HABIT) / (promised + HABIT)
    assert unlikely == pytest.approx(0.03 * overall, rel=1e-5), "what is unseen is taken to be as the rest"
    assert np.exp(experience.calibrated(2, seen))[0, 0, 0] == pytest.approx(0.85 * overall, rel=1e-5)


def test_only_children_of_accepted_nodes_are_judged() -> None:
    """Two rows with chains of two: one rejected at once, so that its second node was never offered; one accepted whole."""
    experience, promises = Experience(), np.log(np.array([[0.5, 0.6], [0.7, 0.8]], np.float32))
    experience.judge(promises, *tree_of([[0, 0, 1]] * 2, [[0, 1, 2]] * 2), [[0], [0, 1, 2]])
    assert experience.promised.sum(1)[:4].tolist() == pytest.approx([0.0, 0.5 + 0.7, 0.8, 0.0])
    assert experience.kept.sum(1)[:4].tolist() == [0.0, 1.0, 1.0, 0.0]


def follow(policy: AdaptiveTree, steps: int, lucky: bool, batch: int = 1) -> list[int]:
    """Sizes of the trees of some steps, in which the best tokens are right or nothing is; on time, by the costs."""
    sizes = []
    for _ in range(steps):
        growing, tree = grown(policy, 0.6, 0.2, 0.1, batch=batch)
        path = [0]
        while lucky and (children := [child for child in range(1, tree.size) if int(tree.parents[0, child]) == path[-1]]):
            path.append(children[0])
        if growing is not None:
            seconds = policy.costs.target(batch * tree.size, batch) + growing.spent
            growing.learn(tree, [path] * batch, [[0] * len(path)] * batch, seconds)
        sizes.append(tree.size)
    return sizes


def test_a_useless_draft_is_given_a_rest_and_another_chance() -> None:
    """Never right: almost all steps are plain decoding, with a small probe after each rest. Right again: used again."""
    policy = adaptive()
    assert min(follow(policy, 30, lucky=True)) > 1
    follow(policy, 150, lucky=False)
    sizes = follow(policy, 3 * (REST + 1), lucky=False)
    assert sizes.count(1) == 3 * REST and sizes.count(PROBE + 1) == 3
    recovered = follow(policy, 20, lucky=True)
    assert min(recovered[REST + 1 :]) > 1 and max(recovered[REST + 1 :]) > PROBE


def test_a_sure_and_wrong_draft_is_found_out_soon() -> None:
    """Confidences of every height, at every depth, never right: what is learnt of some must count for the others."""
    policy, rng, drafted = adaptive(), np.random.default_rng(1), 0
    for step in range(160):
        high = float(rng.uniform(0.3, 0.99))
        growing, tree = grown(policy, high, (1 - high) / 2, (1 - high) / 3)
        if growing is not None:
            growing.learn(tree, [[0]], [[0]], policy.costs.target(tree.size) + growing.spent)
        if step >= 30:
            drafted += tree.size > 1
    assert drafted < 130 / REST


def test_the_rate_is_that_of_the_last_steps_whatever_the_batch() -> None:
    """Eight rows bring eight times the tokens; a request alone after them must not be measured by that."""
    policy = adaptive()
    follow(policy, 50, lucky=True)
    alone = policy.experience.rate(1.0)
    follow(policy, 200, lucky=True, batch=8)
    assert 1.0 < policy.experience.rate(1.0) < 1.5 * alone


def test_a_batch_goes_by_what_its_steps_really_take() -> None:
    """Trees of eight rows take three times what is foretold, plain decoding what is foretold: it is taken to, but for a try."""
    policy = adaptive()
    for dearness, expected in ((1.0, (0.9, 1.0)), (3.0, (0.0, 0.15))):
        drafted = []
        for _ in range(300):
            growing, tree = grown(policy, 0.6, 0.2, 0.1, batch=8)
            if growing is None:
                continue
            seconds = (policy.costs.target(8 * tree.size, 8) + growing.spent) * (dearness if tree.size > 1 else 1.0)
            path = list(range(2)) if tree.size > 1 else [0]
            growing.learn(tree, [path] * 8, [[0] * len(path)] * 8, seconds)
            drafted.append(tree.size > 1)
        assert expected[0] <= sum(drafted[100:]) / len(drafted[100:]) <= expected[1]
        policy = adaptive()
    assert not policy.experience.paces, "one row is what was measured"


def test_a_step_that_hung_is_not_believed() -> None:
    experience = Experience()
    for _ in range(100):
        experience.account(1.0, 1.0, 2.0)
    before = experience.rate(1.0)
    experience.account(10_000.0, 1.0, 2.0)
    assert experience.rate(1.0) > 0.95 * before


@pytest.mark.parametrize("draft", ["random", "trained"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": [6, 7, 8]}], ids=["greedy", "sampled"])
def test_lossless_alone_and_in_a_batch(draft: str, sampling: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests, probes and trees of any size: the tokens are plain decoding's. Every reading of the clock is a second on."""
    monkeypatch.setattr(decode.time, "perf_counter", count().__next__)
    target = engine("llama").target
    chosen = Engine(target, random_draft(target) if draft == "random" else trained_draft(target, "llama"))
    prompts = [[7], [1, 5, 9, 2], [30, 31]]
    plain = [result.token_ids for result in chosen.generate(prompts, method="autoregressive", max_new_tokens=50, **sampling)]
    deepest = []
    for price in (0.0, 0.02, 0.2):
        policy = AdaptiveTree(costs(slope=price, level=price, first=price), Experience())
        results = chosen.generate(prompts, tree=policy, max_new_tokens=50, **sampling)
        assert [result.token_ids for result in results] == plain
        deepest.append(max(depth for result in results for depth in result.stats.depths))
        if price == 0.2 and draft == "random":
            assert sum(depth == 0 for result in results for depth in result.stats.depths) > 30
    assert deepest[0] > DEPTH, "what the text suggests goes deeper than the draft"


def test_lossless_over_turns_and_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    target = engine("llama").target
    chosen = Engine(target, trained_draft(target, "llama"))
    policy = AdaptiveTree(costs(slope=0.0, level=0.0, first=0.0), Experience())
    session, text = chosen.session(), [3, 1, 4]
    for turn in range(4):
        expected = chosen.generate(text, method="autoregressive", max_new_tokens=12).token_ids
        with monkeypatch.context() as patch:
            if turn == 1:
                patch.setattr(Target, "verify", interrupted(Target.verify, 3))
            said = chosen.generate(text, session=session, tree=policy, max_new_tokens=12).token_ids
        assert said == expected[: len(said)] and (len(said) == 12 or turn == 1)
        text = [*text, *said, 5]


def interrupted(call: Any, number: int) -> Any:
    """The callable, interrupted at its ``number``-th call."""
    calls = count(1)

    def replacement(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return call(*args, **options)

    return replacement


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
        ({"tree": "fixed", "method": "chain"}, "takes no tree"), ({"lookup": -1}, "lookup is -1; it must be a whole number"),
        ({"lookup": True}, "lookup is True"), ({"lookup": 3, "tree": "fixed"}, "lookup is a setting of the adaptive tree"),
        ({"lookup": 3, "method": "chain"}, "lookup is a setting of the adaptive tree"),
        ({"coupled": 1}, "coupled is 1"), ({"coupled": True, "method": "ngram"}, "for a method with a draft model"),
    ):  # fmt: skip
        with pytest.raises(EyasError, match=word):
            check_options(wrong)


def test_an_engine_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, measured = engine("llama"), []
    monkeypatch.setattr(engine_room, "step_costs", lambda draft: measured.append(draft) or costs())
    first = Engine(chosen.target, chosen.draft)
    assert first.adaptive is first.adaptive and measured == [chosen.draft]
    with pytest.raises(EyasError, match="needs a draft"):
        Engine(chosen.target, None).adaptive  # noqa: B018


def test_what_the_text_suggests_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of tokens has a tree of its own, so that none goes by what another has seen."""
    chosen = engine("llama")
    monkeypatch.setattr(engine_room, "step_costs", lambda draft: costs(slope=0.0))
    one = Engine(chosen.target, chosen.draft)
    trees = [one.prepare([[1]], lookup=lookup).policy for lookup in (None, 0, 0, 5)]
    assert (
        trees[0] is one.adaptive and trees[1] is trees[2] and [getattr(tree, "lookup", None) for tree in trees[1:]] == [0, 0, 5]
    )
    assert len({id(getattr(tree, "experience", None)) for tree in trees}) == 3
    deepest = {lookup: max(one.generate([1] * 40, lookup=lookup, max_new_tokens=60).stats.depths) for lookup in (0, None)}
    assert deepest[0] <= DEPTH < deepest[None]


def test_who_shares_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adaptive tree does, what is published does not, unless a call says so; each kind has an experience of its own."""
    chosen = engine("llama")
    monkeypatch.setattr(engine_room, "step_costs", lambda draft: costs())
    one = Engine(chosen.target, chosen.draft)

    def coupled(**options: Any) -> bool:
        policy = one.prepare([[1]], **options).policy
        growing = None if policy is None else policy.limited(3)
        assert growing is not None
        return growing.coupled

    assert coupled() and not coupled(coupled=False) and coupled(coupled=True)
    assert one.prepare([[1]], coupled=True).policy is one.adaptive is not one.prepare([[1]], coupled=False).policy
    for options in ({"tree": "fixed"}, {"tokens": 5}, {"method": "eagle1"}, {"method": "chain"}):
        assert not coupled(**options) and coupled(**options, coupled=True)
    assert coupled(tree=DynamicTree(5, 2, 2, coupled=True))


def test_a_session_of_another_drafter_is_refused() -> None:
    chosen = engine("llama")
    session = Engine(chosen.target, chosen.draft, method="ngram").session()
    with pytest.raises(EyasError, match="the session drafts with NgramDrafter"):
        chosen.generate([1, 2], session=session, max_new_tokens=3)
    with pytest.raises(EyasError, match="tree is 5"):
        chosen.generate([1, 2], tree=5)
