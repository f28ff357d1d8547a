"""Draft trees: their shape, how they grow, and which of the drafted nodes are verified (EAGLE-2, arXiv 2406.16858 §4).

Nodes are flattened, parents before their children, the draft's breadth-first: node 0 is the root, the last emitted token.

    tokens   [ 7, 3, 9, 3, 5 ]             7 ─┬─ 3 ─── 3
    parents  [ 0, 0, 0, 1, 2 ]                └─ 9 ─── 5
    depths   [ 0, 1, 1, 2, 2 ]

`grow` drafts level by level under a *policy*, which answers how many children a node gets (`width`), how far the draft's
confidences are believed (`trust`), which nodes of a level are expanded, if any (`expand`), what else is put on the tree
(`besides`), and which of all these nodes are kept (`choose`); before, it says whether to draft at all (`begin`), and afterwards
it is told what was accepted (`learn`). Two policies cover every published method: `DynamicTree`
(EAGLE-2 and the paper's ablations) and `StaticTree` (EAGLE-1's fixed shape, and chains). `eyas.adaptive` fits the tree to the
machine and the moment. Nothing here loops over nodes, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.lookup import Continuation
from eyas.transfer import upload


@dataclass(frozen=True)
class DraftTree:
    """A batch of trees of one size.

    Attributes:
        tokens: [B, n] int64; column 0 is the root.
        parents: [B, n] int64; a parent's index is below its child's. The root is its own parent.
        log_values: [B, n] float32, sum of log-probabilities, as far as the policy trusts what proposed them, from the root (0).
        depths: [B, n] int64, edges from the root.
        max_depth: the deepest level any node can have; known without asking the device.
    """

    tokens: Tensor
    parents: Tensor
    log_values: Tensor
    depths: Tensor
    max_depth: int

    @property
    def size(self) -> int:
        """Nodes of each tree, root included."""
        return self.tokens.shape[1]

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, n, n] bool: [b, i, j] is true where j is i or an ancestor of i."""
        return ancestor_mask(self.parents, self.max_depth)


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """Ancestor-or-self relation [B, n, n] bool of trees given by ``parents`` [B, n]."""
    batch, n = parents.shape
    identity = torch.eye(n, dtype=torch.bool, device=parents.device).expand(batch, n, n)
    mask, above, reach = identity, parents, 0  # mask: up to ``reach`` edges up; above: the node reach + 1 edges up, or the root
    while reach < max_depth:
        mask = mask | mask.gather(1, above[:, :, None].expand(batch, n, n))
        above, reach = above.gather(1, above), 2 * reach + 1
    return mask


def root_tree(roots: Tensor) -> DraftTree:
    """Trees of the root alone: verifying them is plain decoding. ``roots``: [B] int64."""
    zeros = torch.zeros_like(roots)[:, None]
    return DraftTree(roots[:, None], zeros, zeros.float(), zeros, 0)


class TreePolicy(Protocol):
    """How a request's trees grow, step after step."""

    def limited(self, depth: int, context: int = 0) -> GrowthPolicy | None:
        """The policy for a step after ``context`` tokens, at most ``depth`` (≥ 1) levels deep; None: nothing is drafted."""
        ...


class GrowthPolicy(Protocol):
    """How one step's tree grows. Log values and confidences are float32 tensors [B, candidates] on the draft's device."""

    @property
    def depth(self) -> int:
        """Levels of draft tokens at most."""
        ...

    def width(self, level: int) -> int:
        """Children drafted for each expanded node; ``level`` counts from 1."""
        ...

    def begin(self, batch: int, find: Callable[[int], list[Continuation]] | None) -> bool:
        """A step of so many rows begins; whether to draft at all.

        Args:
            find: gives what each row's text itself suggests, so many tokens of it; None: nothing does.
        """
        ...

    def trust(self, level: int, tokens: Tensor, log_confidences: Tensor) -> Tensor:
        """What the draft's log-probabilities [B, k, w] of a level's tokens, likewise, are taken for; at most 0."""
        ...

    def expand(self, level: int, log_values: Tensor, log_confidences: Tensor) -> Tensor | None:
        """Which of a level's candidates are run through the draft, [B, k] int64; None: this level is the last."""
        ...

    def besides(self, device: torch.device) -> LevelScores | None:
        """Nodes that the tree may have besides the drafted ones, as if they were a last level; None: there are none."""
        ...

    def choose(self, levels: list[LevelScores]) -> tuple[Tensor, int]:
        """Which of all candidates, in drafting order, make up the tree: ascending indices [B, n − 1] int64.

        Also the deepest level that any of them can be of, 0 for none; known without asking the device.
        """
        ...

    def learn(self, tree: DraftTree, paths: list[list[int]], emitted: list[list[int]], seconds: float) -> None:
        """Told what a step came to.

        Args:
            tree: the step's.
            paths: by row the accepted nodes, from the root on.
            emitted: by row the tokens chosen at each of them.
            seconds: how long the step took.
        """
        ...


@dataclass(frozen=True)
class LevelScores:
    """One level's candidates as `GrowthPolicy.choose` sees them.

    Attributes:
        tokens: [B, m] int64.
        log_values: [B, m] float32, summed log-probabilities from the root.
        log_confidences: [B, m] float32, each candidate's own log-probability given its parent.
        parents: [B, m] int64, index of the parent among all candidates in drafting order, −1 for the root.
        depths: [B, m] int64, edges from the root.
        expanded: [B, k] int64, the candidates that were expanded; None at the last level.
    """

    tokens: Tensor
    log_values: Tensor
    log_confidences: Tensor
    parents: Tensor
    depths: Tensor
    expanded: Tensor | None = None


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
    """

    tokens: int = 60
    depth: int = 6
    top_k: int = 10
    rank_by: str = "value"
    rerank: bool = True

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
    """

    nodes: tuple[tuple[int, ...], ...]

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
        return StaticTree(tuple(path for path in self.nodes if len(path) <= depth))


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


Candidates = tuple[Tensor, Tensor]
"""Tokens [B, k, w] int64 and their log-probabilities [B, k, w] float32, best first."""


def grow(
    policy: GrowthPolicy,
    roots: Tensor,
    first: Callable[[int], Candidates],
    draft: Callable[[Tensor, Tensor, Tensor, int], Candidates],
    find: Callable[[int], list[Continuation]] | None = None,
) -> DraftTree:
    """Draft a tree level by level and keep what the policy chooses.

    Args:
        policy: how to grow.
        roots: [B] int64, the last emitted tokens.
        first: ``first(w)`` gives the root's ``w`` best children, as [B, 1, w].
        draft: ``draft(tokens, slots, lines, w)`` runs nodes ``tokens`` [B, k] of one level through the draft and gives the
            ``w`` best children of each; ``slots`` [B, k] is each one's parent among the nodes of the draft call before;
            ``lines`` [B, k, nodes drafted so far + k] bool marks its drafted ancestors and itself, in drafting order.
        find: what each row's text suggests, see `GrowthPolicy.begin`.

    Returns:
        A connected `DraftTree` of the chosen nodes and the root.
    """
    levels = _drafted(policy, roots, first, draft) if policy.begin(len(roots), find) else []
    more = policy.besides(roots.device)
    levels += [] if more is None else [more]
    return _assemble(roots, levels, *policy.choose(levels)) if levels else root_tree(roots)


def _drafted(
    policy: GrowthPolicy,
    roots: Tensor,
    first: Callable[[int], Candidates],
    draft: Callable[[Tensor, Tensor, Tensor, int], Candidates],
) -> list[LevelScores]:
    """All candidates, level by level."""
    device, batch = roots.device, len(roots)
    tokens, confidences = first(policy.width(1))  # [B, 1, w] each
    base = torch.zeros(batch, 1, device=device)  # the expanded nodes' log values; at first the root's
    parents = torch.full((batch, 1), -1, device=device)  # their places in drafting order
    lines = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # their drafted ancestors
    levels: list[LevelScores] = []
    total = 0
    while True:
        width, level = tokens.shape[2], len(levels) + 1
        confidences = confidences.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
        confidences = policy.trust(level, tokens, confidences)
        log_values = (base[:, :, None] + confidences).flatten(1)  # [B, k·w]
        expanded = policy.expand(level, log_values, confidences.flatten(1))  # [B, k']
        above = parents.repeat_interleave(width, dim=1)  # [B, k·w]
        depths = torch.full_like(above, level)
        levels.append(LevelScores(tokens.flatten(1), log_values, confidences.flatten(1), above, depths, expanded))
        if expanded is None:
            return levels
        slots = expanded // width  # which of this level's expanded parents each one descends from
        own = torch.eye(expanded.shape[1], dtype=torch.bool, device=device).expand(batch, -1, -1)
        inherited = lines.gather(1, slots[:, :, None].expand(-1, -1, lines.shape[2]))
        lines = torch.cat([inherited, own], dim=2)  # [B, k', drafted nodes]
        base, parents = log_values.gather(1, expanded), expanded + total
        total += log_values.shape[1]
        tokens, confidences = draft(levels[-1].tokens.gather(1, expanded), slots, lines, policy.width(level + 1))


def _assemble(roots: Tensor, levels: list[LevelScores], chosen: Tensor, max_depth: int) -> DraftTree:
    """The tree of the chosen candidates: drafting order, in which parents come before their children, shifts by one."""

    def picked(what: str, root: Tensor) -> Tensor:
        return torch.cat([root[:, None], torch.cat([getattr(level, what) for level in levels], dim=1).gather(1, chosen)], dim=1)

    none = torch.full_like(roots, -1)
    up = picked("parents", none)  # [B, n], −1 for the root
    parents = torch.where(up < 0, 0, torch.searchsorted(chosen.contiguous(), up.clamp(min=0)) + 1)
    zero = torch.zeros_like(roots)
    return DraftTree(
        picked("tokens", roots), parents, picked("log_values", zero.float()), picked("depths", zero), max_depth=max_depth
    )


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
