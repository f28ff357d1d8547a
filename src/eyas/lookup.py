"""Prompt lookup: what followed the last few tokens where they stood earlier in the same text may follow again.

Summaries, code, sums and lists repeat themselves and their prompt. The longest suffix of the text that occurred before is
looked up, in its latest occurrence, and what stood after it is proposed: without a model, for some microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

LONGEST = 32
"""Tokens of a suffix that are compared; longer matches count as so long."""


@dataclass(frozen=True)
class Continuation:
    """What followed an earlier occurrence.

    Attributes:
        matched: tokens of the suffix that agree, at most LONGEST; 0 where the last token is new.
        tokens: [n] what followed; a text that repeats itself up to its end is taken to go on like that.
    """

    matched: int
    tokens: Tokens


class KnownText:
    """One row's tokens: the committed ones and the root after them.

    Attributes:
        committed: how many tokens are committed.
    """

    def __init__(self, tokens: Sequence[int] | Tokens = ()) -> None:
        self.ids: Tokens = np.zeros(2 * len(tokens) + 64, np.int64)
        self.ids[: len(tokens)] = tokens
        self.length = self.committed = len(tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens and the root after them."""
        end = self.committed + len(tokens)
        if end > len(self.ids):
            self.ids = np.concatenate([self.ids[: self.committed], np.zeros(end + 64, np.int64)])
        self.ids[self.committed : end] = tokens
        self.length, self.committed = end, end - 1

    def truncate(self, length: int) -> None:
        """Forget all but the first so many committed tokens."""
        self.length = self.committed = min(length, self.committed)

    def take(self, length: int) -> KnownText:
        """A text of its own of the first so many committed tokens."""
        return KnownText(self.ids[: min(length, self.committed)])

    def continuation(self, count: int) -> Continuation:
        """What may follow, ``count`` tokens of it, or none."""
        known = self.ids[: self.length]
        ends, matched = np.flatnonzero(known[:-1] == known[-1]) if self.length else known[:0], 1
        if not len(ends):
            return Continuation(0, known[:0])
        while matched < LONGEST:
            longer = ends[ends >= matched]
            longer = longer[known[longer - matched] == known[-1 - matched]] if len(longer) else longer
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        start = int(ends[-1]) + 1
        return Continuation(matched, known[start + np.arange(count) % (self.length - start)])
