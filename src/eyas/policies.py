"""The published methods' trees: EAGLE-2's dynamic one with its ablations, EAGLE-1's fixed shape, and chains.

`DynamicTree` is EAGLE-2 (arXiv 2406.16858 §4), `StaticTree` everything of a fixed shape. What a policy is asked, and when, is
said in `eyas.tree`; these two take the draft at its word and remember nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.lookup import Continuation
from eyas.transfer import upload
from eyas.tree import DraftTree, LevelScores


class Trusting:
    """What policies have in common that take the draft at its word and remember nothing."""

    def begin(self, batch: int, find: Callable[[int], list[Continuation]] | None) -> bool:
        return True

    def trust(self, level: int, tokens: Tensor, log_confidences: Tensor) -> Tensor:
        return log_confidences

    def besides(self, device: torch.device) -> LevelScores | None:
        return None

    def learn(self, tree: DraftTree, paths: list[list[int]], emitted: list[list[int]], seconds: float) -> None:
        pass


LARGEST = 1024
"""Of any setting of a dynamic tree: width squared candidates are drafted a level."""


@dataclass(frozen=True)
class DynamicTree(Trusting):
    """EAGLE-2: expand the most valuable nodes of each level, keep the most valuable of all.

    Attributes:
        tokens: draft tokens verified (the root is one more), paper §4.2.
        depth: levels of draft tokens = draft forwards.
        top_k: nodes expanded a level, and children a node.
        rank_by: ``"value"``, or ``"confidence"`` for the paper's ablation (Table 3): expansion then ranks nodes by their own
            probability alone, and reranking by the smallest one on their path, which keeps the tree connected.
        rerank: False for the other ablation: verify the nodes that expansion selected, without reranking.
        coupled: share the numbers of sampling with the draft, see `eyas.noise`; not published.
    """

    tokens: int = 60
    depth: int = 6
    top_k: int = 10
    rank_by: str = "value"
    rerank: bool = True
    coupled: bool = False

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("depth", self.depth), ("width", self.top_k)):
            if isinstance(value, bool) or not isinstance(value, int) or value > LARGEST:
                raise EyasError(f"{name} is {value}; it must be a whole number, at most {LARGEST}")
            if value < 1:
                raise EyasError(f"{name} is {value}, but a draft tree needs at least 1; use method autoregressive for none")
        if self.rank_by not in ("value", "confidence"):
            raise EyasError(f"rank_by is {self.rank_by!r}; choose value or confidence")

    def width(self, level: int) -> int:
        return self.top_k

    def expand(self, level: int, log_values: Tensor, log_confidences: Tensor) -> Tensor | None:
        return None if level == self.depth else self._best(log_values, log_confidences)

    def _best(self, log_values: Tensor, log_confidences: Tensor) -> Tensor:
        return best(log_values if self.rank_by == "value" else log_confidences, self.top_k)

    def choose(self, levels: list[LevelScores]) -> tuple[Tensor, int]:
        if not self.rerank:
            return self._selected(levels), len(levels)
        if self.rank_by == "value":
            scores = torch.cat([level.log_values for level in levels], dim=1)
        else:
            scores = torch.cat(path_minimum(levels), dim=1)
        return best(scores, self.tokens).sort(dim=1).values, len(levels)

    def _selected(self, levels: list[LevelScores]) -> Tensor:
        """The nodes expansion selected at every level, in drafting order: at most ``tokens``, shallow ones first."""
        kept, offset = [], 0
        for level in levels:
            selected = level.expanded
            if selected is None:
                selected = self._best(level.log_values, level.log_confidences)
            kept.append(selected.sort(dim=1).values + offset)
            offset += level.log_values.shape[1]
        return torch.cat(kept, dim=1)[:, : self.tokens]

    def limited(self, depth: int, context: int = 0) -> DynamicTree:
        return replace(self, depth=min(self.depth, depth))


@dataclass(frozen=True)
class StaticTree(Trusting):
    """A fixed shape: each node is the path of child ranks that leads to it, (0,) the best first token.

    Attributes:
        nodes: every node's path of ranks; closed under taking the parent.
        coupled: share the numbers of sampling with the draft, see `eyas.noise`; not published.
    """

    nodes: tuple[tuple[int, ...], ...]
    coupled: bool = False

    def __post_init__(self) -> None:
        if not self.nodes or any(not path or path[:-1] not in {(), *self.nodes} for path in self.nodes):
            raise EyasError("a static tree needs at least one node, and every node's parent in it")
        if any(rank < 0 for path in self.nodes for rank in path):
            raise EyasError("a static tree's ranks count from 0, the best child")
        # breadth-first, so that drafting order is index order
        object.__setattr__(self, "nodes", tuple(sorted(set(self.nodes), key=lambda path: (len(path), path))))

    @property
    def depth(self) -> int:
        return len(self.nodes[-1])

    def _level(self, level: int) -> list[tuple[int, ...]]:
        return [path for path in self.nodes if len(path) == level]

    def _inner(self, level: int) -> list[tuple[int, ...]]:
        """The nodes of a level that have children, in order; level 0 is the root."""
        return sorted({path[:-1] for path in self.nodes if len(path) == level + 1})

    def width(self, level: int) -> int:
        return max(path[-1] for path in self._level(level)) + 1

    def _candidates(self, level: int, paths: list[tuple[int, ...]]) -> list[int]:
        """Where paths of a level stand among its drafted candidates: (slot of the parent) · width + rank."""
        slots = {path: slot for slot, path in enumerate(self._inner(level - 1))}
        return [slots[path[:-1]] * self.width(level) + path[-1] for path in paths]

    def expand(self, level: int, log_values: Tensor, log_confidences: Tensor) -> Tensor | None:
        if level == self.depth:
            return None
        index = upload(self._candidates(level, self._inner(level)), log_values.device)
        return index.expand(len(log_values), -1)

    def choose(self, levels: list[LevelScores]) -> tuple[Tensor, int]:
        index, offset = [], 0
        for number, level in enumerate(levels, start=1):
            index += [offset + place for place in self._candidates(number, self._level(number))]
            offset += level.log_values.shape[1]
        first = levels[0].log_values
        return upload(index, first.device).repeat(len(first), 1), len(levels)

    def limited(self, depth: int, context: int = 0) -> StaticTree:
        return replace(self, nodes=tuple(path for path in self.nodes if len(path) <= depth))


def chain(depth: int) -> StaticTree:
    """The degenerate tree: the draft's best token after its best token, ``depth`` deep."""
    if depth < 1:
        raise EyasError(f"depth is {depth}, but a draft chain needs at least 1; use method autoregressive for none")
    return StaticTree(tuple((0,) * level for level in range(1, depth + 1)))


EAGLE1_TREE = StaticTree(
    tuple(
        tuple(map(int, path))
        for path in (
            "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001".split()  # noqa: SIM905
        )
    )
)
"""The 25 nodes of EAGLE-1's published tree, by child ranks."""


def best(scores: Tensor, count: int) -> Tensor:
    """Indices [B, min(count, m)] of the highest scores [B, m], best first; among equals the earlier.

    The tie rule is what keeps a chosen tree connected: a parent is drafted before its children and never worth less.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def path_minimum(levels: list[LevelScores]) -> list[Tensor]:
    """For each level's candidates the smallest log-confidence on their path from the root, [B, m] each."""
    minima: list[Tensor] = []
    for level in levels:
        own = level.log_confidences
        minima.append(torch.minimum(own, torch.cat(minima, dim=1).gather(1, level.parents)) if minima else own)
    return minima
