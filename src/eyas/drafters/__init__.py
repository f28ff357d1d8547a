"""Drafters: whatever proposes trees. One small protocol, one file a family.

A drafter belongs to one batch of requests and owns their state; the network behind it is shared.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from eyas.noise import SharedNoise
from eyas.tree import Candidates, DraftTree, GrowthPolicy


class Drafter(Protocol):
    """What the decoding loop asks of a drafter."""

    def commit(self, tokens: list[list[int]], features: Tensor) -> None:
        """Take in what the target has committed; its forwards may wait for the next `propose`.

        Args:
            tokens: by row the committed ones, at least one, and the new root after them: token j is the one that
                ``features[:, j]`` belongs to.
            features: [B, m, H] of the target; a row that commits fewer than m tokens is filled up.
        """
        ...

    def catch_up(self) -> None:
        """Do now what `commit` has put off, if anything."""
        ...

    def propose(self, roots: Tensor, policy: GrowthPolicy, noise: SharedNoise | None = None) -> DraftTree:
        """Draft a tree for each row from its last emitted token ``roots`` [B] int64.

        Args:
            noise: what it may know of the target's draws; None: nothing is drawn, or it is not to know.
        """
        ...

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        ...

    def take(self, rows: list[int], lengths: list[int]) -> Drafter:
        """A drafter of its own for these rows, which knows their first ``lengths`` committed tokens."""
        ...

    def put(self, rows: list[int], other: Any) -> None:
        """Replace these rows of the batch by those of another drafter made by `take`."""
        ...

    def truncate(self, lengths: list[int]) -> None:
        """Forget all but the first so many committed tokens of each row, to continue another text from there."""
        ...


def best_tokens(logits: Tensor, width: int) -> Candidates:
    """The most likely tokens, at most ``width`` of them, after nodes with these logits [B, k, V] float32, best first."""
    values, tokens = logits.topk(min(width, logits.shape[-1]), dim=-1)
    return tokens, values - logits.logsumexp(dim=-1, keepdim=True)
