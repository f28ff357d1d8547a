"""What an EAGLE head with a reduced draft vocabulary may propose besides: the tokens of each row's own text.

A reduced vocabulary (``d2t`` of EAGLE-3) reads few rows of the LM head, and can never propose the tokens it left out. But the
rare tokens of a text are mostly its own: the names, numbers and identifiers of its prompt. Those few rows are read too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.transfer import upload


@dataclass(frozen=True)
class OwnTokens:
    """Tokens outside the draft vocabulary that a batch may propose.

    Attributes:
        tokens: target ids [M] int64.
        weight: their rows of the LM head, [M, H].
        bias: [M], or None.
        closed: [B, 1, M] float32, −inf where a token is another row's.
    """

    tokens: Tensor
    weight: Tensor
    bias: Tensor | None
    closed: Tensor

    def read(self, features: Tensor) -> Tensor:
        """Logits [B, k, M] as the LM head gives them, of features [B, k, H]."""
        return F.linear(features, self.weight, self.bias)


class OwnVocabulary:
    """Which tokens outside the draft vocabulary each row of a batch has used, and where first.

    Args:
        head: the target's LM head.
        known: the tokens of the draft vocabulary.
        batch: rows.
        limit: at most so many a row; of more the latest.
    """

    def __init__(self, head: nn.Module, known: Collection[int], batch: int, limit: int) -> None:
        self.head, self.known, self.limit = head, known, limit
        self.first: list[dict[int, int]] = [{} for _ in range(batch)]  # token to place in the text, by row, in order
        self.gathered: OwnTokens | None = None
        self.stale = False

    def add(self, texts: list[list[int]], starts: list[int]) -> None:
        """Take in tokens, by row, of which the first stands at ``starts`` in its text."""
        for first, text, start in zip(self.first, texts, starts, strict=True):
            for place, token in enumerate(text, start=start):
                if token not in self.known and token not in first:
                    first[token] = place
                    self.stale = True

    def gather(self) -> OwnTokens | None:
        """The tokens and their rows of the LM head; None where there are none."""
        if self.stale:
            self.stale = False
            rows = [list(first)[max(len(first) - self.limit, 0) :] for first in self.first]
            tokens = sorted({token for row in rows for token in row})
            self.gathered = self._read(tokens, rows) if tokens else None
        return self.gathered

    def _read(self, tokens: list[int], rows: list[list[int]]) -> OwnTokens:
        weight = self.head.get_parameter("weight")
        bias = getattr(self.head, "bias", None)
        index, places = upload(tokens, weight.device), {token: place for place, token in enumerate(tokens)}
        closed = torch.full((len(rows), 1, len(tokens)), -torch.inf)
        for row, own in enumerate(rows):
            closed[row, 0, [places[token] for token in own]] = 0.0
        closed = closed.to(weight.device, non_blocking=True)
        return OwnTokens(index, weight[index], None if bias is None else bias[index], closed)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.first, self.stale = [self.first[row] for row in rows], True

    def take(self, rows: list[int], lengths: list[int]) -> OwnVocabulary:
        """One of its own for these rows, which knows the first ``lengths`` tokens of their texts."""
        taken = OwnVocabulary(self.head, self.known, len(rows), self.limit)
        taken.first, taken.stale = [self.first[row] for row in rows], True
        taken.truncate(lengths)
        return taken

    def put(self, rows: list[int], other: OwnVocabulary) -> None:
        """Replace these rows of the batch by those of another."""
        for row, first in zip(rows, other.first, strict=True):
            self.first[row] = first
        self.stale = True

    def truncate(self, lengths: list[int]) -> None:
        """Forget all but the first so many tokens of each text."""
        for row, (first, length) in enumerate(zip(self.first, lengths, strict=True)):
            if any(place >= length for place in first.values()):
                self.first[row] = {token: place for token, place in first.items() if place < length}
                self.stale = True
