"""Prompt lookup: what it finds, and that its trees hold no more than that."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafters.ngram import OLDER, TRUST, History, NgramDrafter, possible
from eyas.policies import DynamicTree
from eyas.tree import DraftTree

TEXTS = st.lists(st.integers(0, 4), max_size=40)


def naive(tokens: list[int], branch: list[int]) -> dict[int, int]:
    """Every token that has followed the longest possible suffix, with that suffix's length."""
    whole, found = [*tokens, *branch], {}
    for size in range(min(len(TRUST), len(whole)), 0, -1):
        suffix = whole[-size:]
        for place in range(len(tokens) - size):
            if tokens[place : place + size] == suffix:
                found.setdefault(tokens[place + size], size)
    return found


@given(TEXTS, st.lists(st.integers(0, 4), max_size=3))
def test_continuations_are_what_followed_the_longest_suffixes(tokens: list[int], branch: list[int]) -> None:
    expected = naive(tokens, branch)
    guesses = History(tokens).continuations(branch, width=10)
    assert {token for token, _ in guesses} == set(expected)
    assert [value for _, value in guesses] == sorted((value for _, value in guesses), reverse=True)
    for token, value in guesses:
        assert value <= math.log(TRUST[expected[token] - 1]) + 1e-9, "no more trust than the suffix earns"
    assert len(History(tokens).continuations(branch, width=2)) == min(2, len(expected))


def test_the_latest_continuation_comes_first() -> None:
    (first, best), (second, older) = History([1, 2, 1, 3, 1]).continuations([], 5)[:2]
    assert (first, second) == (3, 2) and best - older == pytest.approx(-math.log(OLDER))


def test_a_repeated_passage_is_drafted_whole() -> None:
    drafter = NgramDrafter(2)
    text = [5, 6, 7, 8, 9, 5]
    drafter.commit([[*text, 6], [1, 2]], torch.empty(2, 6, 0))
    tree = drafter.propose(torch.tensor([6, 2]), DynamicTree(3, 3, 2))
    assert tree.tokens[0].tolist() == [6, 7, 8, 9] and tree.parents[0].tolist() == [0, 0, 1, 2]
    assert not tree.log_values[1, 1:].isfinite().any(), "the second row has nothing to repeat"
    assert drafter.histories[0].tokens == [*text, 6] and drafter.histories[1].tokens == [1, 2]


def test_nothing_to_repeat_means_plain_decoding() -> None:
    drafter = NgramDrafter(1)
    drafter.commit([[1, 2, 3]], torch.empty(1, 2, 0))
    tree = drafter.propose(torch.tensor([3]), DynamicTree())
    assert tree.size == 1 and tree.max_depth == 0


def test_rows_move_with_what_they_know() -> None:
    drafter = NgramDrafter(2)
    drafter.commit([[1, 2, 3], [4, 5, 6]], torch.empty(2, 2, 0))
    part = drafter.take([1], [1])
    part.commit([[7, 8]], torch.empty(1, 1, 0))
    drafter.put([0], part)
    assert [history.tokens for history in drafter.histories] == [[4, 7, 8], [4, 5, 6]]
    drafter.commit([[8, 9], [6, 6]], torch.empty(2, 1, 0))
    drafter.truncate([2, 9])
    assert [history.tokens for history in drafter.histories] == [[4, 7], [4, 5, 6]]
    drafter.select([1])
    assert [history.tokens for history in drafter.histories] == [[4, 5, 6]]


@given(st.data())
def test_possible_keeps_exactly_the_possible_nodes(data: st.DataObject) -> None:
    """Paths of tokens from the root, row by row, before and after."""
    n, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    tokens = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=rows, max_size=rows))
    )
    parents = torch.tensor([[0] + [data.draw(st.integers(0, i - 1)) for i in range(1, n)] for _ in range(rows)])
    values, depths = torch.zeros(rows, n), torch.zeros(rows, n, dtype=torch.int64)
    for row in range(rows):
        for node in range(1, n):
            parent = int(parents[row, node])
            depths[row, node] = depths[row, parent] + 1
            gone = data.draw(st.booleans())
            values[row, node] = -math.inf if gone else values[row, parent] - 1
    tree = DraftTree(tokens, parents, values, depths, n)
    kept = possible(tree)

    def paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for node in range(tree.size):
            path, place = [int(tree.tokens[row, node])], node
            while place:
                place = int(tree.parents[row, place])
                path.append(int(tree.tokens[row, place]))
            if math.isfinite(float(tree.log_values[row, node])):
                assert len(path) == int(tree.depths[row, node]) + 1
                found.append(tuple(path))
        return found

    assert kept.size == max(len(paths(tree, row)) for row in range(rows))
    assert (kept.parents[:, 1:] < torch.arange(1, kept.size)).all(), "parents before children"
    for row in range(rows):
        assert paths(kept, row) == paths(tree, row)
