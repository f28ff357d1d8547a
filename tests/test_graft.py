"""What the text suggests, on the draft's tree: one branch where both agree, the best of both, and what is learnt of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.adaptive import PROBE, REST, AdaptiveTree, Experience, Growth, Pace
from eyas.graft import ABSENT, AMONG, BEST, HABIT, UNASKED, USUAL, Beliefs, Graft
from eyas.lookup import Continuation
from eyas.tree import DraftTree, grow
from tests.helpers import TableDraft, properties
from tests.test_adaptive import adaptive, costs

Suggestions = list[tuple[int, list[int]]]


def continuations(suggestions: Suggestions) -> list[Continuation]:
    return [Continuation(matched, np.array(tokens, np.int64)) for matched, tokens in suggestions]


def grafted(
    policy: AdaptiveTree, suggestions: Suggestions, *confidences: float, depth: int = 50
) -> tuple[Growth, DraftTree, TableDraft]:
    """A step's tree of a draft that gives every node the children 0, 1, … of these confidences, best first."""
    growing, batch = policy.limited(depth), len(suggestions)
    policy.experience.paces[batch] = Pace(plain=1.0, steps=1)  # not the step that looks what plain decoding takes
    assert growing is not None
    draft = TableDraft([lambda path: [math.log(share) for share in confidences]] * batch)

    def find(count: int) -> list[Continuation]:
        return continuations([(matched, tokens[:count]) for matched, tokens in suggestions])

    return growing, grow(growing, torch.zeros(batch, dtype=torch.int64), draft.first, draft.draft, find), draft


def paths(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    """Every node's tokens from the root's child on; nodes without value left out."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, tree.size):
        parent = int(tree.parents[row, node])
        assert parent < node
        found.append((*found[parent], int(tree.tokens[row, node])))
        assert int(tree.depths[row, node]) == len(found[node]) <= tree.max_depth
        assert tree.log_values[row, node] <= tree.log_values[row, parent]
    return [path for node, path in enumerate(found) if node and tree.log_values[row, node].isfinite()]


def test_where_both_agree_there_is_one_branch() -> None:
    """The draft's best is 0 everywhere; the text suggests 0 0 7 7: two tokens in common, then a branch of its own."""
    policy = adaptive(costs(slope=0.001, level=0.01, first=0.01), tokens=12, top_k=3)
    growing, tree, _ = grafted(policy, [(30, [0, 0, 7, 7])], 0.8, 0.1, 0.05)
    found = paths(tree)
    assert len(set(found)) == len(found) and {(0,), (0, 0), (0, 0, 7), (0, 0, 7, 7)} <= set(found)
    assert growing.graft is not None
    assert growing.graft.agreement.tolist() == [[BEST, BEST, ABSENT, UNASKED]]
    assert growing.graft.merged.tolist() == [2]


@properties
@given(st.data())
def test_the_tree_holds_the_best_of_both(data: Any) -> None:
    """Of all candidates, each counted once, none that was left out is worth more than one that was taken."""
    tokens, batch = st.lists(st.integers(0, 4), max_size=9), data.draw(st.integers(1, 3))
    suggestions = [(data.draw(st.integers(1, 30)), data.draw(tokens)) for _ in range(batch)]
    price = data.draw(st.sampled_from([0.0, 0.01, 0.05]))
    policy = adaptive(costs(slope=price, level=price, first=price), tokens=data.draw(st.integers(1, 25)), top_k=3)
    growing, tree, _ = grafted(
        policy, suggestions, *data.draw(st.sampled_from([(0.5, 0.3, 0.1), (0.9, 0.05, 0.02), (0.3, 0.2)]))
    )
    values = np.exp(growing._log_values())
    for row in range(batch):
        found = paths(tree, row)
        assert len(set(found)) == len(found)
        left = sorted(values[row], reverse=True)[tree.size - 1 :]
        assert not left or tree.log_values[row, 1:].exp().min() >= left[0] - 1e-6


def test_siblings_share_what_a_suggestion_leaves() -> None:
    for tokens, said in (([[[0, 1, 2]]], BEST), ([[[1, 0, 2]]], AMONG), ([[[1, 2, 3]]], ABSENT)):
        graft = Graft(continuations([(4, [0])]), Beliefs())
        believed = np.log(np.array([[[0.5, 0.3, 0.1]]], np.float32))
        raw = believed.copy()
        graft.meet(1, np.array(tokens), believed, raw)
        confidence = float(USUAL[3, said])
        assert graft.agreement.tolist() == [[said]] and math.exp(graft.log_confidences[0, 0]) == pytest.approx(confidence)
        shares = np.exp(believed[0, 0])
        own = {BEST: 0, AMONG: 1}.get(said)
        others = [share for place, share in enumerate(shares) if place != own]
        before = [share for place, share in enumerate((0.5, 0.3, 0.1)) if place != own]
        left = 1 - (0 if own is None else (0.5, 0.3, 0.1)[own])
        assert others == pytest.approx([share * (1 - confidence) / left for share in before], rel=1e-5)
        assert own is None or (shares[own] == pytest.approx(confidence) and raw[0, 0, own] == -np.inf)
        assert np.exp([value for place, value in enumerate(raw[0, 0]) if place != own]) == pytest.approx(others, rel=1e-5)


def test_a_sure_suggestion_spares_the_draft() -> None:
    policy = adaptive(costs(slope=0.01, first=0.3))
    growing, tree, draft = grafted(policy, [(30, [3] * 20)], 0.6, 0.2, 0.1)
    assert paths(tree) == [(3,) * length for length in range(1, tree.size)] and tree.size > 5
    assert draft.paths == [[()]] and draft.calls == 0 and not growing.log_values
    policy.experience.poor, policy.experience.promised[1, 3], policy.experience.kept[1, 3] = 2, 5.0, 4.0
    growing.learn(tree, [[0]], [[0]], 1.0)
    experience = policy.experience
    assert experience.poor == 2 and experience.promised[1, 3] == 5 and experience.kept[1, 3] == 4, (
        "who was not asked is not judged"
    )
    _, tree, _ = grafted(policy, [(1, [3] * 20)], 0.6, 0.2, 0.1)
    assert (0,) in paths(tree), "a doubtful one does not"


def test_a_suggestion_is_used_while_the_draft_rests_and_not_while_it_is_probed() -> None:
    policy = AdaptiveTree(costs(slope=0.01), Experience(rest=REST))
    for _ in range(REST):
        growing, tree, _ = grafted(policy, [(30, [3] * 5)], 0.6, 0.2, 0.1)
        assert paths(tree) == [(3,) * length for length in range(1, 6)] and not growing.log_values
        growing.learn(tree, [[0]], [[3]], 1.0)
    assert policy.experience.probing
    growing, tree, _ = grafted(policy, [(30, [3] * 5)], 0.6, 0.2, 0.1)
    assert paths(tree)[:PROBE] == [(0,), (1,), (2,)]
    growing.learn(tree, [[0, 1]], [[0, 0]], 1.0)
    assert not policy.experience.probing and not policy.experience.rest
    bare = AdaptiveTree(costs(), Experience(rest=2), lookup=0)
    assert bare.limited(5) is None and bare.limited(5) is None and bare.limited(5) is not None


def test_a_sure_chain_does_not_hide_the_nodes_that_pay() -> None:
    """The chain's node is worth most, but its other children nothing; the draft's own best is expanded all the same."""
    policy = adaptive(costs(slope=0.02, level=0.02, first=0.02), tokens=12, top_k=3)
    policy.experience.beliefs.kept[:, :] = policy.experience.beliefs.offered * 0.5
    policy.experience.beliefs.kept[8, UNASKED] = policy.experience.beliefs.offered[8, UNASKED] * 0.99
    _, tree, draft = grafted(policy, [(23, [0, 9])], 0.5, 0.45, 0.01)
    assert draft.calls and (1, 0) in paths(tree)


def test_a_poor_draft_rests_while_the_text_goes_on() -> None:
    policy = adaptive(costs(slope=0.01, level=0.3, first=0.3))
    drafted = []
    for _ in range(60):
        growing, tree, _ = grafted(policy, [(2, [7, 8, 9])], 0.5, 0.3, 0.1)
        path = [0]
        while following := [
            node for node in range(1, tree.size) if tree.parents[0, node] == path[-1] and tree.tokens[0, node] > 6
        ]:
            path.append(following[0])
        drafted.append(bool(growing.log_values))
        growing.learn(tree, [path], [[7, 8, 9, 1][: len(path)]], policy.costs.target(tree.size) + growing.spent)
    assert drafted[0] and not any(drafted[-20:]) and (7, 8, 9) in paths(tree)


def test_rows_without_a_suggestion_are_filled_up() -> None:
    """While the draft rests one row has something to verify, the other nothing: its nodes have no value and no depth but 1."""
    policy = AdaptiveTree(costs(slope=0.001), Experience(rest=1))
    _, tree, _ = grafted(policy, [(30, [3, 4, 5]), (0, [])], 0.6)
    assert tree.size == 4 and paths(tree, 0) == [(3,), (3, 4), (3, 4, 5)] and paths(tree, 1) == []
    assert tree.parents[1].tolist() == [0] * 4 and tree.depths[1].tolist() == [0, 1, 1, 1]


def test_no_deeper_than_the_step_may_go() -> None:
    _, tree, _ = grafted(adaptive(costs(slope=0.0)), [(30, [3] * 20)], 0.6, depth=2)
    assert tree.max_depth == 2
    _, tree, _ = grafted(adaptive(costs(slope=0.0), lookup=3), [(30, [3] * 20)], 0.6)
    assert max(map(len, [path for path in paths(tree) if set(path) == {3}])) == 3


def right(count: int, length: int = 6) -> Callable[[Beliefs], None]:
    """A judgement of a chain of which the first ``count`` tokens were right."""

    def judge(beliefs: Beliefs) -> None:
        graft = Graft(continuations([(3, list(range(1, length + 1)))]), beliefs)
        beliefs.judge(graft, [[*range(1, count + 1), 99]], 0.99)

    return judge


def test_what_was_asked_is_learnt() -> None:
    """Found by 3 tokens, then as if by 4, 5, …; two were right, the third was wrong, the rest was not asked."""
    beliefs = Beliefs()
    right(2)(beliefs)
    asked, kept = beliefs.offered[:, UNASKED] - HABIT, beliefs.kept[:, UNASKED] - HABIT * USUAL[:, UNASKED]
    assert asked.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert kept.tolist() == pytest.approx([0, 0, 1, 1, 0, 0, 0, 0, 0], abs=1e-6)
    assert (beliefs.offered[:, 1:] == HABIT).all()
    for _ in range(300):
        right(0)(beliefs)
    sure, usual = beliefs.confidence(np.array([3, 30]), np.array([UNASKED, UNASKED]))
    assert sure < 0.05 and usual == pytest.approx(USUAL[8, 0], abs=1e-4)
    for _ in range(300):
        right(6)(beliefs)
    assert beliefs.confidence(np.array([3]), np.array([UNASKED]))[0] > 0.9


def test_a_step_that_ends_early_asks_no_more() -> None:
    beliefs = Beliefs()
    graft = Graft(continuations([(3, [1, 2, 3]), (0, [])]), beliefs)
    beliefs.judge(graft, [[1], [5, 5]], 1.0)
    assert (beliefs.offered - HABIT).sum() == 1
