"""Draft trees: their shape, how they grow, and which of the drafted nodes are verified (EAGLE-2, arXiv 2406.16858 §4).

Nodes are flattened, parents before their children, the draft's breadth-first: node 0 is the root, the last emitted token.

    tokens   [ 7, 3, 9, 3, 5 ]             7 ─┬─ 3 ─── 3
    parents  [ 0, 0, 0, 1, 2 ]                └─ 9 ─── 5
    depths   [ 0, 1, 1, 2, 2 ]

`grow` drafts level by level under a *policy*, which answers how many children a node gets (`width`), how far the draft's
confidences are believed (`trust`), which nodes of a level are expanded, if any (`expand`), what else is put on the tree
(`besides`), and which of all these nodes are kept (`choose`); before, it says whether to draft at all (`begin`), and afterwards
it is told what was accepted (`learn`). `eyas.policies` has those of the published methods; `eyas.adaptive` fits the tree to
the machine and the moment. Nothing here loops over nodes, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from eyas.lookup import Continuation


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

    @property
    def coupled(self) -> bool:
        """Whether drafting may know the numbers that the target's draws go by, see `eyas.noise`."""
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
