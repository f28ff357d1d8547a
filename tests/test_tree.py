"""Trees against plain loops, and their invariants under every kind of number a draft may give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.policies import EAGLE1_TREE, DynamicTree, StaticTree, chain
from eyas.tree import DraftTree, GrowthPolicy, ancestor_mask, grow, root_tree
from tests.helpers import Path, Table, TableDraft, few, leading, path_of, properties, random_table

NAN, INF = math.nan, math.inf
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5))  # tokens, depth, top_k


def grown(policy: GrowthPolicy, *tables: Table) -> DraftTree:
    """A batch of trees, one for each table, from roots 100, 101, …"""
    draft = TableDraft(tables)
    tree = grow(policy, torch.arange(100, 100 + len(tables)), draft.first, draft.draft)
    assert draft.calls == policy.depth - 1, "one draft forward a level; the committed tokens' one counts as the first"
    return tree


@dataclass
class Node:
    path: Path
    parent: int  # among all candidates, −1: the root
    value: float
    confidence: float
    least: float  # smallest confidence on the path


def reference(policy: DynamicTree, table: Table) -> list[tuple[int, int, float, int]]:
    """Token, parent, value and depth of the nodes that EAGLE-2 (§4) verifies, in plain loops; the root first."""
    drafted: list[Node] = []
    selected: list[int] = []
    front = [-1]
    for _ in range(policy.depth):
        start = len(drafted)
        for parent in front:
            above = drafted[parent] if parent >= 0 else Node((), -1, 0.0, 0.0, 0.0)
            for token, confidence in leading(table(above.path), policy.top_k):
                path, least = (*above.path, token), min(above.least, confidence)
                drafted.append(Node(path, parent, above.value + confidence, confidence, least))
        level = range(start, len(drafted))
        if policy.rank_by == "value":
            front = sorted(level, key=lambda index: -drafted[index].value)[: policy.top_k]
        else:
            front = sorted(level, key=lambda index: -drafted[index].confidence)[: policy.top_k]
        selected += sorted(front)
    if policy.rerank:
        worth = [node.value if policy.rank_by == "value" else node.least for node in drafted]
        # sorted() is stable: among equals the shallower first, then the earlier
        chosen = sorted(sorted(range(len(drafted)), key=lambda index: -worth[index])[: policy.tokens])
    else:
        chosen = selected[: policy.tokens]
    nodes = [(-1, 0, 0.0, 0)]
    for index in chosen:
        node = drafted[index]
        parent = chosen.index(node.parent) + 1 if node.parent >= 0 else 0
        nodes.append((node.path[-1], parent, node.value, len(node.path)))
    return nodes


def listed(tree: DraftTree, row: int) -> list[tuple[int, int, float, int]]:
    """A row of a tree in the reference's form."""
    columns = (tree.tokens[row, 1:], tree.parents[row, 1:], tree.log_values[row, 1:], tree.depths[row, 1:])
    return [(-1, 0, 0.0, 0), *zip(*(column.tolist() for column in columns), strict=True)]


def check_tree(tree: DraftTree, roots: list[int]) -> None:
    """Every invariant a tree has whatever was drafted."""
    assert tree.tokens[:, 0].tolist() == roots
    assert not tree.log_values.isnan().any()
    for row in range(len(roots)):
        parents, depths, values = (part[row].tolist() for part in (tree.parents, tree.depths, tree.log_values))
        assert (parents[0], depths[0], values[0]) == (0, 0, 0.0)
        assert depths == sorted(depths) and max(depths) <= tree.max_depth
        for node in range(1, tree.size):
            assert parents[node] < node
            assert depths[node] == depths[parents[node]] + 1
            assert values[node] <= values[parents[node]]


@properties
@given(st.integers(0, 10**6), st.integers(1, 6), SHAPES, st.integers(1, 3))
def test_growth_equals_plain_loops(seed: int, vocab: int, shape: tuple[int, int, int], batch: int) -> None:
    """Otherwise other nodes than EAGLE-2's are verified: wrong set, wrong parents, wrong values or wrong order."""
    policy = DynamicTree(*shape)
    tables = [random_table(seed + row, vocab) for row in range(batch)]
    tree = grown(policy, *tables)
    for row, table in enumerate(tables):
        assert listed(tree, row) == reference(policy, table)


@properties
@given(st.integers(0, 10**6), SHAPES, st.booleans())
def test_ablations_equal_plain_loops(seed: int, shape: tuple[int, int, int], rerank: bool) -> None:
    """Otherwise the paper's ablations (Table 3) compare something else than ranking by confidence or verifying the
    expanded nodes."""
    table = random_table(seed, 5)
    for rank_by in ("confidence", "value"):
        policy = DynamicTree(*shape, rank_by=rank_by, rerank=rerank)
        tree = grown(policy, table)
        assert listed(tree, 0) == reference(policy, table)
        check_tree(tree, [100])


def test_rerank_prefers_value_then_depth_then_order() -> None:
    """Otherwise a deeper or later node displaces an equally good one, and the tree may lose a parent."""
    table = {(): [-1.0, -1.0, -9.0], (0,): [0.0, -1.0, -9.0], (1,): [0.0, -1.0, -9.0]}
    # by value: (0) −1, (1) −1, (0, 0) −1, (1, 0) −1, (0, 1) −2, (1, 1) −2
    chosen = [(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1)]
    for tokens in range(1, 7):
        tree = grown(DynamicTree(tokens=tokens, depth=2, top_k=2), lambda path: table[path])
        assert {path_of(tree, node) for node in range(1, tree.size)} == set(chosen[:tokens])


def numbered(values: list[float]) -> Table:
    """Confidences that depend on the rank alone."""
    return lambda path: values


class NumberedDraft(TableDraft):
    """Tokens that name their own path: the parent's token · 10 + rank + 1. Wrong parents cannot hide."""

    def _answer(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, values = super()._answer(width)
        above = torch.tensor([[path[-1] if path else 0 for path in row] for row in self.paths])
        return above[:, :, None] * 10 + torch.arange(1, width + 1), values


def grown_numbered(policy: GrowthPolicy, *tables: Table, dtype: torch.dtype = torch.float32) -> DraftTree:
    """Grow with self-naming tokens, check every parent by its child's name, and every invariant."""
    draft = NumberedDraft(tables, dtype)
    tree = grow(policy, torch.zeros(len(tables), dtype=torch.int64), draft.first, draft.draft)
    check_tree(tree, [0] * len(tables))
    parents = tree.tokens.gather(1, tree.parents)
    assert torch.equal((tree.tokens[:, 1:] - 1) // 10, parents[:, 1:]), "a chosen node's parent is chosen"
    for row in tree.tokens.tolist():
        assert len(set(row)) == len(row), "no node twice"
    return tree


@pytest.mark.parametrize("rank_by", ["value", "confidence"])
@pytest.mark.parametrize("confidence", [0.0, -0.0, -INF, NAN, INF, -1e-9, -3e38])
def test_massive_ties_stay_connected(confidence: float, rank_by: str) -> None:
    """A saturated draft gives every node the same value; with another tie rule children are chosen without their
    parents and the published code's tree falls apart."""
    table = numbered([confidence] * 10)
    for tokens in (1, 5, 9, 10, 11, 59, 60, 61, 109, 110, 111, 500):
        policy = DynamicTree(tokens=tokens, depth=6, top_k=10, rank_by=rank_by)
        tree = grown_numbered(policy, table)
        assert tree.size == 1 + min(tokens, 10 + 5 * 100)
        shallow = tree.depths[0].tolist()
        if confidence in (0.0, INF):
            assert shallow.count(1) == min(tokens, 10) and shallow.count(2) == min(max(tokens - 10, 0), 100)


HARD = st.sampled_from([0.0, -0.0, -1e-9, -1e-45, -6e-8, -0.5, -17.25, -88.7, -1e30, -3.4e38, -INF, NAN, INF, 1e-6])


@properties
@given(st.data())
def test_any_confidence_gives_a_connected_tree(data: st.DataObject) -> None:
    """Rounding, overflow, NaN or a log-probability above 0 in a draft must cost speed, never correctness."""
    width, depth, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 30))
    values = data.draw(st.lists(HARD, min_size=32, max_size=32))

    def table(path: Path) -> list[float]:
        return [values[hash((path, rank)) % 32] for rank in range(width)]

    for rank_by in ("value", "confidence"):
        for rerank in (True, False):
            policy = DynamicTree(tokens, depth, width, rank_by=rank_by, rerank=rerank)
            tree = grown_numbered(policy, table, lambda path: [0.0] * width)
            levels = [width, *[width * width] * (depth - 1)]
            assert tree.size == 1 + min(tokens, sum(levels) if rerank else width * depth)
    grown_numbered(StaticTree((*((0,) * level for level in range(1, depth)), (width - 1,))), table)


@few
@given(st.integers(0, 10**6), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_rounded_confidences_stay_connected(seed: int, dtype: torch.dtype) -> None:
    """Half-precision logits put many confidences on the same value, and tiny ones beside large ones."""
    generator = torch.Generator().manual_seed(seed)

    def table(path: Path) -> list[float]:
        logits = torch.randn(8, generator=generator) * 20
        return logits.log_softmax(-1).to(dtype).sort(descending=True).values.tolist()

    tree = grown_numbered(DynamicTree(tokens=40, depth=5, top_k=8), table, table, dtype=dtype)
    assert tree.log_values.dtype == torch.float32
    assert tree.size == 41


def test_impossible_tokens_are_not_preferred() -> None:
    """NaN and −inf both mean impossible; a possible node must never lose its place to one."""
    table = numbered([-2.0, -INF, NAN, -3.0])
    tree = grown(DynamicTree(tokens=6, depth=2, top_k=4), table)
    assert tree.log_values[0].tolist() == [0.0, -2.0, -3.0, -4.0, -5.0, -5.0, -6.0]
    everything = grown(DynamicTree(tokens=99, depth=2, top_k=4), table)
    assert everything.log_values[0].isneginf().sum() == everything.size - 7


def test_more_tokens_than_drafted_takes_them_all() -> None:
    """Otherwise inconsistent settings crash deep inside."""
    tree = grown(DynamicTree(tokens=1000, depth=3, top_k=2), random_table(0, 5))
    assert tree.size == 1 + 2 + 4 + 4
    assert grown(DynamicTree(tokens=1000, depth=3, top_k=2, rerank=False), random_table(0, 5)).size == 1 + 3 * 2


@pytest.mark.parametrize("rerank", [True, False])
@pytest.mark.parametrize("rank_by", ["value", "confidence"])
def test_smallest_settings(rank_by: str, rerank: bool) -> None:
    """Depth 1, width 1 and one token are valid trees."""
    table = random_table(3, 5)
    order = [token for token, _ in leading(table(()), 5)]
    options = {"rank_by": rank_by, "rerank": rerank}
    flat = grown(DynamicTree(tokens=3, depth=1, top_k=4, **options), table)
    assert sorted(flat.tokens[0, 1:].tolist()) == sorted(order[:3])
    assert flat.max_depth == 1
    line = grown(DynamicTree(tokens=9, depth=4, top_k=1, **options), table)
    assert line.parents.tolist() == [[0, 0, 1, 2, 3]] and line.depths.tolist() == [[0, 1, 2, 3, 4]]
    single = grown(DynamicTree(tokens=1, depth=3, top_k=3, **options), table)
    assert single.size == 2 and single.tokens[0, 1] in order[:3]
    assert grown(DynamicTree(1, 1, 1, **options), table).tokens.tolist() == [[100, order[0]]]


def test_a_small_vocabulary_is_filled_up() -> None:
    """A draft vocabulary smaller than the width is padded with impossible tokens; they come last and break nothing."""
    tree = grown(DynamicTree(tokens=6, depth=2, top_k=5), random_table(0, 2))
    assert tree.log_values.isfinite().all()
    assert grown(DynamicTree(tokens=30, depth=2, top_k=5), random_table(0, 2)).size == 31


@few
@given(st.integers(0, 10**6), SHAPES)
def test_a_row_does_not_depend_on_its_neighbours(seed: int, shape: tuple[int, int, int]) -> None:
    """A row's result must be the same alone and in a batch."""
    tables = [random_table(seed, 4), numbered([0.0] * 4), numbered([NAN] * 4)]
    for policy in (DynamicTree(*shape), DynamicTree(*shape, rank_by="confidence"), EAGLE1_TREE):
        together = grown(policy, *tables)
        for row, table in enumerate(tables):
            assert listed(together, row) == listed(grown(policy, table), 0)


EAGLE1_PATHS = (
    "0, 1, 2, 3, 00, 01, 02, 10, 11, 20, 21, 30, 000, 001, 002, 010, 011, 020, 021, 100, 0000, 0001, 0002, 00000, 00001"
)


def test_eagle1_tree_has_the_published_shape() -> None:
    """25 nodes, by child ranks, and each one carries the token of its rank under its parent."""
    paths = [tuple(map(int, path)) for path in EAGLE1_PATHS.split(", ")]
    assert len(paths) == 25 and list(EAGLE1_TREE.nodes) == paths
    assert EAGLE1_TREE.depth == 5
    assert [EAGLE1_TREE.width(level) for level in range(1, 6)] == [4, 3, 3, 3, 2]
    check_static(EAGLE1_TREE, random_table(1, 6))


def test_a_limited_tree_is_no_deeper() -> None:
    assert grown(DynamicTree(tokens=7, depth=5, top_k=3).limited(1), random_table(0, 5)).max_depth == 1


def check_static(policy: StaticTree, table: Table) -> None:
    """A static tree against following every path of ranks through the table."""
    tree = grown(policy, table)
    assert tree.size == len(policy.nodes) + 1 and tree.max_depth == policy.depth
    check_tree(tree, [100])
    for node, ranks in enumerate(policy.nodes, start=1):
        path: Path = ()
        value = 0.0
        for rank in ranks:
            token, confidence = leading(table(path), rank + 1)[rank]
            path, value = (*path, token), value + confidence
        assert path_of(tree, node) == path
        assert tree.log_values[0, node] == value
        parent = (0, *(policy.nodes.index(ranks[:-1]) + 1 for _ in ranks[1:2]))[-1]
        assert tree.parents[0, node] == parent


@few
@given(st.integers(0, 10**6), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1))
def test_any_static_shape_is_followed(seed: int, leaves: list[Path]) -> None:
    """Shapes with gaps among ranks and in any order: an index slip would put a wrong token or parent in place."""
    nodes = tuple({path[:end] for path in leaves for end in range(1, len(path) + 1)})
    policy = StaticTree(nodes)
    check_static(policy, random_table(seed, 5))
    assert policy == StaticTree((*reversed(nodes), *nodes))


def test_chain_is_the_best_token_after_the_best_token() -> None:
    """The degenerate tree."""
    table = random_table(2, 7)
    tree = grown(chain(4), table)
    path: Path = ()
    for _ in range(4):
        path = (*path, leading(table(path), 1)[0][0])
    assert tree.tokens[0, 1:].tolist() == list(path)
    assert tree.parents.tolist() == [[0, 0, 1, 2, 3]]


@properties
@given(st.data())
def test_ancestor_mask_equals_following_parents(data: st.DataObject) -> None:
    """A node that sees too much or too little gets other logits than its own branch would."""
    size, batch = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    rows = [[0] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)] for _ in range(batch)]
    expected = torch.zeros(batch, size, size, dtype=torch.bool)
    deepest = 0
    for row, parents in enumerate(rows):
        for node in range(size):
            seen = node
            expected[row, node, node] = True
            steps = 0
            while seen:
                seen, steps = parents[seen], steps + 1
                expected[row, node, seen] = True
            deepest = max(deepest, steps)
    for max_depth in (deepest, deepest + 2):
        assert torch.equal(ancestor_mask(torch.tensor(rows), max_depth), expected)


def test_ancestors_of_a_grown_tree() -> None:
    """`DraftTree.ancestors` is what the target's mask is made of."""
    tree = grown(DynamicTree(tokens=12, depth=3, top_k=3), random_table(0, 5), random_table(1, 5))
    for row in range(2):
        for node in range(tree.size):
            line = [step for step in range(tree.size) if tree.ancestors[row, node, step]]
            assert tuple(tree.tokens[row, line[1:]].tolist()) == path_of(tree, node, row)


def test_root_tree_is_the_root_alone() -> None:
    """Plain decoding verifies one node a row."""
    tree = root_tree(torch.tensor([4, 9]))
    check_tree(tree, [4, 9])
    assert tree.size == 1 and tree.max_depth == 0
    assert tree.ancestors.tolist() == [[[True]], [[True]]]
