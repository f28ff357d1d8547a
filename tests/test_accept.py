"""Acceptance against plain loops, and its losslessness by exact enumeration of every decision.

A walk is lossless whatever draws its tokens. So that decisions can be enumerated, draws here invert a cumulative sum at one
uniform a depth (`tests.helpers.invert`), in the place of a race (`eyas.noise.race`; see test_noise). Cutting [0, 1) at every
cumulative sum of every node of a depth leaves cells inside which no decision changes; all combinations of cells, one for each
depth, weighted by their size, are the exact distribution of what a step emits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.accept import walk
from eyas.sampling import Rule, SamplingOptions, chooser, processors
from eyas.tree import DraftTree, root_tree
from tests.helpers import FixedNoise, Path, few, invert, make_tree, path_of, properties

PARTS = 64  # probabilities are multiples of 1/64: sums and products of them are exact


def emitted(tree: DraftTree, path: Tensor, length: Tensor, next_token: Tensor) -> list[Path]:
    """What each row emits: the accepted tokens and the target's own."""
    tokens = tree.tokens.gather(1, path)
    return [
        (*row[1 : 1 + count], last)
        for row, count, last in zip(tokens.tolist(), length.tolist(), next_token.tolist(), strict=True)
    ]


def repeated(tree: DraftTree, count: int) -> DraftTree:
    """One tree as a batch of ``count``."""
    rows = (part.repeat(count, 1) for part in (tree.tokens, tree.parents, tree.log_values, tree.depths))
    return DraftTree(*rows, tree.max_depth)


# --- greedy


@properties
@given(st.data())
def test_greedy_walk_equals_plain_loops(data: st.DataObject) -> None:
    """Otherwise a branch other than the target's own greedy one is emitted, or accepted tokens are lost."""
    batch, size, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 10)), data.draw(st.integers(1, 4))
    numbers = st.integers(0, vocab - 1)
    tokens = data.draw(st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=batch, max_size=batch))
    parents = [[0] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)] for _ in range(batch)]
    wanted = data.draw(st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=batch, max_size=batch))
    tree, choices = make_tree(tokens, parents), torch.tensor(wanted)
    accepted = walk(tree, lambda nodes, path: choices.gather(1, nodes[:, None])[:, 0])
    assert accepted.path.shape == (batch, tree.max_depth + 1)
    for row in range(batch):
        node, path = 0, [0]
        while True:
            token = wanted[row][node]
            children = [child for child in range(1, size) if parents[row][child] == node and tokens[row][child] == token]
            if not children:
                break
            node = children[0]
            path.append(node)
        assert accepted.length[row] == len(path) - 1
        assert accepted.next_token[row] == token
        assert accepted.path[row].tolist() == path + [node] * (tree.max_depth + 1 - len(path))


def test_walk_asks_with_the_branch_that_leads_there() -> None:
    """Warpers judge a node with its own prefix; another branch's would apply the wrong penalties."""
    tree = make_tree([[9, 1, 2, 3, 4], [9, 1, 2, 3, 4]], [[0, 0, 0, 2, 3], [0, 0, 0, 1, 1]])
    asked: list[tuple[list[int], list[list[int]]]] = []
    wanted = torch.tensor([[2, 0, 3, 4, 7], [1, 8, 0, 0, 0]])

    def choose(nodes: Tensor, path: Tensor) -> Tensor:
        asked.append((nodes.tolist(), path.tolist()))
        return wanted.gather(1, nodes[:, None])[:, 0]

    accepted = walk(tree, choose)
    assert accepted.length.tolist() == [3, 1] and accepted.next_token.tolist() == [7, 8]
    assert [nodes for nodes, _ in asked] == [[0, 0], [2, 1], [3, 1], [4, 1]]
    assert [path[0] for _, path in asked] == [[0], [0, 2], [0, 2, 3], [0, 2, 3, 4]]
    assert asked[-1][1][1] == [0, 1, 1, 1]


def test_root_alone_emits_the_choice_there() -> None:
    """Plain decoding is the walk over one node."""
    accepted = walk(root_tree(torch.tensor([5, 6])), lambda nodes, path: torch.tensor([6, 5]))
    assert accepted.length.tolist() == [0, 0] and accepted.path.tolist() == [[0], [0]]
    assert accepted.next_token.tolist() == [6, 5]


def test_the_root_is_never_its_own_child() -> None:
    """The root is its own parent; a choice equal to the root's token must not walk in circles."""
    accepted = walk(make_tree([[3, 3]], [[0, 0]]), lambda nodes, path: torch.tensor([3]))
    assert accepted.path.tolist() == [[0, 1]] and accepted.length.tolist() == [1]
    accepted = walk(make_tree([[3, 4]], [[0, 0]]), lambda nodes, path: torch.tensor([3]))
    assert accepted.length.tolist() == [0]


def test_a_max_depth_beyond_the_deepest_node_changes_nothing() -> None:
    """`max_depth` is a bound known without asking the device, not the true depth."""
    tree = make_tree([[0, 1, 2]], [[0, 0, 1]], max_depth=6)
    accepted = walk(tree, lambda nodes, path: nodes + 1)
    assert accepted.path.tolist() == [[0, 1, 2, 2, 2, 2, 2]]
    assert accepted.length.tolist() == [2] and accepted.next_token.tolist() == [3]


# --- losslessness


def cells(cuts: Iterable[float]) -> list[tuple[float, float]]:
    """The cells of [0, 1) between these cuts: (start, width)."""
    edges = sorted({0.0, *cuts, 1.0})
    return [(low, high - low) for low, high in itertools.pairwise(edges)]


def law(
    tree: DraftTree,
    cuts: Sequence[Iterable[float]],
    choose: Callable[[list[tuple[float, ...]]], Callable[[Tensor, Tensor], Tensor]],
    place: float,
) -> dict[Path, float]:
    """The exact distribution of what one step emits.

    Args:
        tree: one tree.
        cuts: for each depth, where the choices of its nodes change.
        choose: gives the walk's ``choose`` for a batch with these uniforms, a tuple for each row.
        place: where in its cell each uniform stands, in [0, 1).
    """
    combinations = list(itertools.product(*map(cells, cuts)))
    uniforms = [tuple(low + place * width for low, width in cell) for cell in combinations]
    weights = [math.prod(width for _, width in cell) for cell in combinations]
    many = repeated(tree, len(combinations))
    accepted = walk(many, choose(uniforms))
    found: dict[Path, float] = {}
    emissions = emitted(many, accepted.path, accepted.length, accepted.next_token)
    for sequence, weight in zip(emissions, weights, strict=True):
        found[sequence] = found.get(sequence, 0.0) + weight
    return found


def check_lossless(
    tree: DraftTree, found: dict[Path, float], conditional: Callable[[Path], list[float]], tolerance: float
) -> None:
    """P(the step emits tokens that begin with s) is the target's own, for every s that the tree decides on.

    Those are a node's path and one token more; together they also say that the step ends only where the tree does.
    """
    assert math.isclose(sum(found.values()), 1.0, abs_tol=max(tolerance, 1e-12))

    def begins(prefix: Path) -> float:
        return sum(weight for sequence, weight in found.items() if sequence[: len(prefix)] == prefix)

    nodes = {path_of(tree, node) for node in range(tree.size) if not twin(tree, node)}
    for path in nodes:
        reached = math.prod(conditional(path[:end])[path[end]] for end in range(len(path)))
        for token, probability in enumerate(conditional(path)):
            assert abs(begins((*path, token)) - reached * probability) <= tolerance, (path, token)
    for sequence, weight in found.items():
        if weight > tolerance:
            assert sequence[:-1] in nodes and sequence not in nodes, "the step ends exactly where the tree does"


def twin(tree: DraftTree, node: int) -> bool:
    """Whether the node or one above it repeats the token of an earlier sibling: such nodes are never visited."""
    while node:
        same = (tree.parents[0] == tree.parents[0, node]) & (tree.tokens[0] == tree.tokens[0, node])
        if same[1:node].any():
            return True
        node = int(tree.parents[0, node])
    return False


def exact_law(tree: DraftTree, conditional: Callable[[Path], list[float]], place: float) -> dict[Path, float]:
    """The law of a step that draws from bare probabilities, in float64."""
    paths = [path_of(tree, node) for node in range(tree.size)]
    probabilities = torch.tensor([conditional(path) for path in paths], dtype=torch.float64)  # [n, V]
    cuts = [
        {float(cut) for cut in probabilities[tree.depths[0] == depth].cumsum(-1).flatten()}
        for depth in range(tree.max_depth + 1)
    ]

    def choose(uniforms: list[tuple[float, ...]]) -> Callable[[Tensor, Tensor], Tensor]:
        numbers = torch.tensor(uniforms, dtype=torch.float64)
        return lambda nodes, path: invert(probabilities[nodes], numbers[:, path.shape[1] - 1, None])

    return law(tree, cuts, choose, place)


def shares(weights: Sequence[int]) -> list[float]:
    """Multiples of 1/64 that sum to one, in about these proportions; a weight of zero stays zero."""
    total = sum(weights)
    parts = [weight * PARTS // total for weight in weights]
    parts[max(range(len(parts)), key=lambda token: weights[token])] += PARTS - sum(parts)
    return [part / PARTS for part in parts]


BINARY = [[0, 1, 2, 1, 3, 0, 4], [0, 0, 0, 1, 1, 2, 2]]  # tokens, parents
TREES = {
    "binary": BINARY,
    "chain": [[3, 1, 1, 2], [0, 0, 1, 2]],
    "bush": [[0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0]],
    "lopsided": [[2, 4, 3, 0, 1, 2, 2], [0, 0, 0, 2, 3, 3, 2]],
    "twins": [[2, 1, 1, 3, 4, 4, 0], [0, 0, 0, 1, 2, 3, 2]],
    "root alone": [[1], [0]],
}


@pytest.mark.parametrize("place", [0.0, 0.5], ids=["cell edges", "cell middles"])
@pytest.mark.parametrize("name", TREES)
def test_every_tree_is_lossless(name: str, place: float) -> None:
    """The emitted tokens have exactly the target's distribution: with siblings, twins, children of no mass (node 4 after
    1 in the twins' tree) and certain tokens."""
    tree = make_tree([TREES[name][0]], [TREES[name][1]])
    tables: dict[Path, list[float]] = {
        (): shares([1, 3, 2, 0, 2]),
        (1,): shares([0, 1, 1, 6, 0]),
        (2,): shares([0, 0, 0, 0, 1]),
        (1, 3): shares([2, 2, 2, 1, 1]),
        (3,): shares([5, 0, 0, 1, 1]),
        (3, 0): shares([0, 3, 4, 0, 0]),
        (4,): shares([1, 0, 0, 0, 0]),
    }

    def conditional(path: Path) -> list[float]:
        return tables.get(path, shares([1, 1, 1, 1, 1]))

    check_lossless(tree, exact_law(tree, conditional, place), conditional, 1e-12)


@few
@given(st.data())
def test_random_trees_are_lossless(data: st.DataObject) -> None:
    """The same for random trees and targets, many of them sparse or certain."""
    vocab = data.draw(st.integers(2, 5))
    size = data.draw(st.integers(2, 8))
    tokens = [data.draw(st.integers(0, vocab - 1)) for _ in range(size)]
    parents, depths = [0], [0]
    for node in range(1, size):  # at most 3 deep
        parents.append(data.draw(st.sampled_from([above for above in range(node) if depths[above] < 3])))
        depths.append(depths[parents[node]] + 1)
    tree = make_tree([tokens], [parents])
    weights = st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=vocab, max_size=vocab).filter(any)
    tables = {path_of(tree, node): shares(data.draw(weights)) for node in range(size)}
    check_lossless(tree, exact_law(tree, tables.__getitem__, 0.0), tables.__getitem__, 1e-12)


def test_the_enumeration_can_fail() -> None:
    """A walk that keeps the best drafted child whenever it has any mass is biased, and the check must see it."""
    tree = make_tree([BINARY[0]], [BINARY[1]])
    conditional = {path_of(tree, node): shares([2, 1, 1, 2, 2]) for node in range(tree.size)}
    found = exact_law(tree, conditional.__getitem__, 0.0)
    biased = {sequence: weight for sequence, weight in found.items() if sequence[0] == 1}
    biased = {sequence: weight / sum(biased.values()) for sequence, weight in biased.items()}
    with pytest.raises(AssertionError):
        check_lossless(tree, biased, conditional.__getitem__, 1e-12)


HISTORY = [3, 1, 1, 0]
WARPERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "all of them": {"temperature": 1.3, "top_k": 4, "top_p": 0.8},
    "penalty": {"temperature": 0.9, "repetition_penalty": 1.8},
    "penalty and top-p": {"repetition_penalty": 0.6, "top_p": 0.6},
}


def by_hand(options: SamplingOptions) -> LogitsProcessorList:
    """transformers' processors in the order of its ``generate``."""
    chain = LogitsProcessorList()
    if options.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.temperature != 1:
        chain.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        chain.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(TopPLogitsWarper(options.top_p))
    return chain


@pytest.mark.parametrize("name", ["binary", "twins"])
@pytest.mark.parametrize("warpers", WARPERS)
def test_sampling_through_the_rules_is_lossless(name: str, warpers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified with raw logits, with another node's prefix, or with a bonus token that ignores the warpers, the
    enumerated distribution would differ from the warped target's. In float32, as it runs."""
    monkeypatch.setattr("eyas.sampling.race", invert)
    options = SamplingOptions(**{"temperature": 1.0, **WARPERS[warpers]})
    tree = make_tree([TREES[name][0]], [TREES[name][1]])
    generator = torch.Generator().manual_seed(7)
    logits: dict[Path, Tensor] = {}  # a target's logits depend on the path alone: twins share them
    for node in range(tree.size):
        logits.setdefault(path_of(tree, node), torch.randn(5, generator=generator) * 1.5)
    chain = by_hand(options)
    root = int(tree.tokens[0, 0])

    def warped(path: Path) -> Tensor:
        return chain(torch.tensor([[*HISTORY, root, *path]]), logits[path][None])[0]

    paths = [path_of(tree, node) for node in range(tree.size)]
    sums = torch.stack([warped(path).softmax(-1).cumsum(-1) for path in paths]).double()
    sums = sums / sums[:, -1:]
    cuts = [{float(cut) for cut in sums[tree.depths[0] == depth].flatten()} for depth in range(tree.max_depth + 1)]

    def choose(uniforms: list[tuple[float, ...]]) -> Callable[[Tensor, Tensor], Tensor]:
        own = processors(options, len(HISTORY), (), torch.device("cpu"))
        rules = [Rule(options, own, FixedNoise((-1.0, *numbers))) for numbers in uniforms]
        many = torch.stack([logits[path] for path in paths]).expand(len(rules), -1, -1)
        return chooser(rules, many, repeated(tree, len(rules)), [HISTORY] * len(rules), [1] * len(rules))

    found = law(tree, cuts, choose, place=0.5)
    check_lossless(tree, found, lambda path: warped(path).double().softmax(-1).tolist(), 1e-6)
