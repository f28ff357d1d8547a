"""Prompt lookup: what followed the last few tokens earlier in the same text may follow again (no draft model, no training).

The longest suffix that has occurred before decides: its continuations, the latest first, are a node's children. A tree takes in
several continuations at once; the confidences are fixed guesses that fall with a shorter suffix and an older continuation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.noise import SharedNoise
from eyas.transfer import upload
from eyas.tree import Candidates, DraftTree, GrowthPolicy, grow

TRUST = (0.25, 0.5, 0.7, 0.8)  # that a continuation repeats, by the number of tokens its suffix shares: 1, 2, 3, 4
OLDER = 0.4  # of the confidence, for each continuation seen since


class History:
    """One row's tokens with an index from every n-gram to what has followed it.

    Attributes:
        tokens: the committed tokens, and the root once it is known.
        committed: how many of them are committed.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.committed = len(tokens)
        self.following: dict[tuple[int, ...], list[int]] = {}  # latest last, each token once
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Take in the next token."""
        for size in range(1, min(len(TRUST), len(self.tokens)) + 1):
            found = self.following.setdefault(tuple(self.tokens[-size:]), [])
            if token in found:
                found.remove(token)
            found.append(token)
        self.tokens.append(token)

    def continuations(self, branch: Sequence[int], width: int) -> list[tuple[int, float]]:
        """At most ``width`` tokens that may follow the text and a branch after it, with log confidences, best first."""
        context = [*self.tokens[-len(TRUST) :], *branch][-len(TRUST) :]
        guesses: dict[int, float] = {}
        for size in range(len(context), 0, -1):
            found = self.following.get(tuple(context[-size:]), ())
            for age, token in enumerate(reversed(found)):
                if token not in guesses:
                    guesses[token] = math.log(TRUST[size - 1]) + age * math.log(OLDER)
            if len(guesses) >= width:
                break
        return sorted(guesses.items(), key=lambda guess: -guess[1])[:width]


class NgramDrafter:
    """Drafts from each row's own text; reads tokens on the host, and the target's features not at all."""

    def __init__(self, batch: int) -> None:
        self.histories = [History() for _ in range(batch)]

    def commit(self, tokens: list[list[int]], features: Tensor) -> None:
        """See `eyas.drafters.Drafter.commit`."""
        for history, row in zip(self.histories, tokens, strict=True):
            known = len(history.tokens) - history.committed  # 1 where the first of these is the root before
            for token in row[known:]:
                history.append(token)
            history.committed += len(row) - 1

    def catch_up(self) -> None:
        """Nothing is ever put off."""

    def propose(self, roots: Tensor, policy: GrowthPolicy, noise: SharedNoise | None = None) -> DraftTree:
        """Grow a tree of continuations: as large as the policy says, or as many as there are. Noise tells it nothing."""
        branches: list[list[list[int]]] = [[[]] for _ in self.histories]  # of each expanded node, by row

        def candidates(width: int) -> Candidates:
            found = [
                [_filled(history.continuations(branch, width), width) for branch in rows]
                for history, rows in zip(self.histories, branches, strict=True)
            ]
            packed = upload(found, roots.device, torch.float64)  # [B, k, w, 2]
            return packed[..., 0].long(), packed[..., 1].float()

        def draft(tokens: Tensor, slots: Tensor, lines: Tensor, width: int) -> Candidates:
            for row, (nodes, parents) in enumerate(zip(tokens.tolist(), slots.tolist(), strict=True)):
                branches[row] = [[*branches[row][slot], token] for token, slot in zip(nodes, parents, strict=True)]
            return candidates(width)

        return possible(grow(policy, roots, candidates, draft))

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.histories = [self.histories[row] for row in rows]

    def take(self, rows: list[int], lengths: list[int]) -> NgramDrafter:
        """A drafter of its own for these rows."""
        taken = NgramDrafter(len(rows))
        taken.histories = [History(self.histories[row].tokens[:length]) for row, length in zip(rows, lengths, strict=True)]
        return taken

    def put(self, rows: list[int], other: NgramDrafter) -> None:
        """Replace these rows of the batch by those of another drafter."""
        for row, history in zip(rows, other.histories, strict=True):
            self.histories[row] = history

    def truncate(self, lengths: list[int]) -> None:
        """Forget all but the first so many tokens of each row."""
        self.histories = [
            History(history.tokens[: min(length, history.committed)])
            for history, length in zip(self.histories, lengths, strict=True)
        ]


def possible(tree: DraftTree) -> DraftTree:
    """The tree without its impossible nodes (of value −inf), as small as the batch's fullest row allows; asks the host."""
    real = tree.log_values.isfinite()  # [B, n]; a node's parent is worth as much or more, so it stays too
    size = int(real.sum(dim=1).max())
    order = (~real).int().sort(dim=1, stable=True).indices[:, :size]  # real nodes first, in order
    moved = torch.zeros_like(tree.parents).scatter_(1, order, torch.arange(size, device=order.device).expand_as(order))
    stays = real.gather(1, order)
    depths = tree.depths.gather(1, order).where(stays, torch.ones_like(order))  # filling hangs from the root
    return DraftTree(
        tokens=tree.tokens.gather(1, order),
        parents=moved.gather(1, tree.parents.gather(1, order)).where(stays, torch.zeros_like(order)),
        log_values=tree.log_values.gather(1, order),
        depths=depths,
        max_depth=int(depths.max()),
    )


def _filled(guesses: list[tuple[int, float]], width: int) -> list[tuple[int, float]]:
    return guesses + [(0, -math.inf)] * (width - len(guesses))
