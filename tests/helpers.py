"""Small stand-ins shared by the tests of trees, acceptance and sampling."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from hypothesis import settings
from torch import Tensor

from eyas.noise import Noise
from eyas.tree import Candidates, DraftTree

properties = settings(deadline=None, derandomize=True, max_examples=60)
few = settings(properties, max_examples=25)
many = settings(properties, max_examples=300)

Path = tuple[int, ...]
Table = Callable[[Path], list[float]]
"""A draft as a table: the log-confidence of every token after a path of drafted tokens."""


def random_table(seed: int, vocab: int, steps: int = 16) -> Table:
    """Log-confidences that are multiples of −1/16: their sums are exact in float32, and ties are frequent."""
    known: dict[Path, list[float]] = {}

    def table(path: Path) -> list[float]:
        if path not in known:
            generator = random.Random(repr((seed, path)))
            known[path] = [-generator.randrange(4 * steps) / 16 for _ in range(vocab)]
        return known[path]

    return table


def leading(confidences: Sequence[float], width: int) -> list[tuple[int, float]]:
    """The ``width`` best tokens with their confidences, filled up with impossible ones."""
    ranked = sorted(enumerate(confidences), key=lambda pair: -pair[1])[:width]
    return ranked + [(0, -torch.inf)] * (width - len(ranked))


class TableDraft:
    """The two callbacks of `eyas.tree.grow`, reading one table for each row of the batch.

    It checks what a real draft relies on: that ``slots`` and ``lines`` name each node's parent and its drafted ancestors.
    """

    def __init__(self, tables: Sequence[Table], dtype: torch.dtype = torch.float32) -> None:
        self.tables = tables
        self.dtype = dtype
        self.paths: list[list[Path]] = [[()] for _ in tables]  # of the nodes in the last call
        self.drafted: list[list[int]] = [[] for _ in tables]  # tokens of all nodes drafted, in order
        self.calls = 0

    def first(self, width: int) -> Candidates:
        return self._answer(width)

    def draft(self, tokens: Tensor, slots: Tensor, lines: Tensor, width: int) -> Candidates:
        self.calls += 1
        for row, (row_tokens, row_slots) in enumerate(zip(tokens.tolist(), slots.tolist(), strict=True)):
            self.paths[row] = [(*self.paths[row][slot], token) for token, slot in zip(row_tokens, row_slots, strict=True)]
            self.drafted[row] += row_tokens
            for path, line in zip(self.paths[row], lines[row].tolist(), strict=True):
                seen = [token for token, visible in zip(self.drafted[row], line, strict=True) if visible]
                assert tuple(seen) == path, "a node sees its drafted ancestors and itself"
        return self._answer(width)

    def _answer(self, width: int) -> Candidates:
        best = [[leading(table(path), width) for path in paths] for table, paths in zip(self.tables, self.paths, strict=True)]
        tokens = torch.tensor([[[token for token, _ in node] for node in row] for row in best])
        return tokens, torch.tensor([[[value for _, value in node] for node in row] for row in best], dtype=self.dtype)


def make_tree(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], max_depth: int | None = None) -> DraftTree:
    """A tree by its tokens and parents, root first."""
    depths = [[0] * len(row) for row in parents]
    for row, depth in zip(parents, depths, strict=True):
        for node, parent in enumerate(row[1:], start=1):
            depth[node] = depth[parent] + 1
    deepest = max(map(max, depths))
    return DraftTree(
        torch.tensor(tokens),
        torch.tensor(parents),
        torch.zeros(len(tokens), len(tokens[0])),
        torch.tensor(depths),
        deepest if max_depth is None else max_depth,
    )


def path_of(tree: DraftTree, node: int, row: int = 0) -> Path:
    """The drafted tokens that lead to a node, its own last; () for the root."""
    path: Path = ()
    while node:
        path = (int(tree.tokens[row, node]), *path)
        node = int(tree.parents[row, node])
    return path


class FixedNoise(Noise):
    """One uniform for each position, which `invert` takes in the place of a race's exponentials."""

    def __init__(self, values: Sequence[float]) -> None:
        self.given = values

    def __call__(self, position: int, size: int) -> Tensor:
        return torch.full((size,), self.given[position])


def invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """A draw like `eyas.noise.race`, whose decisions can be enumerated: the cumulative sum inverted at a uniform, [..., V]."""
    sums = probabilities.cumsum(-1)
    point = torch.minimum(uniforms[..., :1] * sums[..., -1:], torch.nextafter(sums[..., -1:], torch.zeros_like(sums[..., -1:])))
    return (sums > point).int().argmax(-1)
