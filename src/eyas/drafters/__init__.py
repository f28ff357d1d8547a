"""Drafters: whatever proposes trees. One small protocol, one file a family.

A drafter belongs to one batch of requests and owns their state; the network behind it is shared.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from eyas.tree import DraftTree, GrowthPolicy


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

    def propose(self, roots: Tensor, policy: GrowthPolicy) -> DraftTree:
        """Draft a tree for each row from its last emitted token ``roots`` [B] int64."""
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
