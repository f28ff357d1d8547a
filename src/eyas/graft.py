"""Continuations found in the text, grafted onto the draft's tree.

A continuation is a chain of tokens under the root. As far as the draft proposes the same tokens in the same places the two are
one branch; from where they part the chain is a branch of its own. How far its next token is believed depends on how long a
suffix it was found by and on what the draft says to it, and is learnt from what such tokens came to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eyas.lookup import Continuation

Array = NDArray[np.float32]
Places = NDArray[np.int64]

UNASKED, BEST, AMONG, ABSENT = range(4)
"""What the draft says to a chain's token: not asked, its best, one of its candidates, none of them."""

EDGES = np.array([2, 3, 4, 5, 7, 10, 16, 24])  # of matched lengths: 1, 2, 3, 4, 5–6, 7–9, 10–15, 16–23, 24 and more
USUAL = np.array(
    [  # unasked, best, among, absent; by matched length
        [0.22, 0.60, 0.12, 0.03],
        [0.45, 0.75, 0.30, 0.10],
        [0.60, 0.80, 0.40, 0.20],
        [0.70, 0.85, 0.50, 0.30],
        [0.75, 0.88, 0.55, 0.35],
        [0.80, 0.90, 0.65, 0.45],
        [0.83, 0.92, 0.70, 0.50],
        [0.90, 0.95, 0.80, 0.65],
        [0.95, 0.97, 0.90, 0.80],
    ],
    np.float32,
)
"""What to believe before anything is seen, a little below what greedy answers of a small model came to."""
HABIT = 4.0  # tokens' worth of evidence that USUAL counts for


@dataclass
class Beliefs:
    """How often a chain's token was right where the tokens before it were, by matched length and the draft's word, [9, 4]."""

    kept: Array = field(default_factory=lambda: HABIT * USUAL)
    offered: Array = field(default_factory=lambda: np.full_like(USUAL, HABIT))

    def confidence(self, matched: Places, agreement: Places) -> Array:
        """Probability that a token is right."""
        place = np.searchsorted(EDGES, matched, side="right"), agreement
        out: Array = self.kept[place] / self.offered[place]
        return out.clip(0.005, 0.995)

    def judge(self, graft: Graft, emitted: Sequence[Sequence[int]], memory: float) -> None:
        """Take in what each row emitted in a step; what was seen before counts ``memory`` times as much as before."""
        self.kept += (1 - memory) * (HABIT * USUAL - self.kept)
        self.offered += (1 - memory) * (HABIT - self.offered)
        for row, tokens in enumerate(emitted):
            count = min(len(tokens), int(graft.lengths[row]))
            right = graft.tokens[row, :count] == np.array(tokens[:count])
            asked = count if right.all() else int(right.argmin()) + 1  # after a wrong one nothing was asked
            lengths = graft.matched[row] + np.arange(asked)
            place = np.searchsorted(EDGES, lengths, side="right"), graft.agreement[row, :asked]
            np.add.at(self.offered, place, 1.0)
            np.add.at(self.kept, place, right[:asked])


class Graft:
    """One step's chains, while the draft's tree grows level by level.

    Attributes:
        tokens: [B, C]; ``lengths`` [B] of them are real; ``matched`` [B] tokens found each chain.
        agreement: [B, C], what the draft says to each token.
        log_confidences: [B, C], each token's given the one before.
        merged: [B], how many of a chain's first tokens are candidates of the draft, too.
        places: [B], the last of those in drafting order, −1 for the root; ``base`` [B]: its log value.
        slots: [B], where that node stands among the expanded ones; −1: it is not among them, so that the branches have parted.
    """

    def __init__(self, found: Sequence[Continuation], beliefs: Beliefs) -> None:
        batch, longest = len(found), max(len(each.tokens) for each in found)
        self.beliefs = beliefs
        self.lengths = np.array([len(each.tokens) for each in found])
        self.matched = np.array([each.matched for each in found])
        self.tokens = np.zeros((batch, longest), np.int64)
        for row, each in enumerate(found):
            self.tokens[row, : len(each.tokens)] = each.tokens
        self.columns = np.arange(longest)
        self.agreement = np.full((batch, longest), UNASKED)
        self.log_confidences = np.log(beliefs.confidence(self.matched[:, None] + self.columns, self.agreement))
        self.log_confidences[self.columns >= self.lengths[:, None]] = -np.inf
        self.merged, self.places = np.zeros(batch, np.int64), np.full(batch, -1)
        self.base = np.zeros(batch, np.float32)
        self.slots = np.where(self.lengths, 0, -1)
        self._candidates = np.full(batch, -1)

    def meet(self, level: int, tokens: Places, log_confidences: Array, raw: Array) -> None:
        """See what the draft says to the chains' tokens of a level, and correct what it is believed there, in place.

        The other children of a node that has a chain's token among them share what that leaves.

        Args:
            tokens: [B, k, w] children of the nodes that were expanded, the draft's best first; ``log_confidences``: likewise.
            raw: the draft's own, likewise, to be judged by; the chain's token is none of its own any more: −inf.
        """
        self._candidates[:] = -1
        for row in np.flatnonzero((self.slots >= 0) & (self.lengths >= level)):
            slot, column = self.slots[row], level - 1
            theirs = log_confidences[row, slot]  # [w], a view
            equal = np.flatnonzero((tokens[row, slot] == self.tokens[row, column]) & np.isfinite(theirs))
            said = ABSENT if not len(equal) else AMONG if equal[0] else BEST
            self.agreement[row, column] = said
            confidence = self.beliefs.confidence(self.matched[row] + column, np.array(said))
            left = 1 - np.exp(theirs[equal]).sum()
            shift = np.log((1 - confidence) / max(left, 1e-3))
            theirs += shift
            np.minimum(theirs, np.log1p(-confidence), out=theirs)
            self.log_confidences[row, column] = np.log(confidence)
            raw[row, slot] = np.minimum(raw[row, slot] + shift, 0.0)
            if len(equal):
                raw[row, slot, equal[0]] = -np.inf
                theirs[equal[0]] = np.log(confidence)
                self._candidates[row] = slot * tokens.shape[2] + equal[0]

    def merge(self, log_values: Array, offset: int) -> None:
        """Told the log values [B, m] of that level's candidates, of which the first is number ``offset`` in drafting order."""
        for row in np.flatnonzero(self._candidates >= 0):
            self.merged[row] += 1
            self.base[row] = log_values[row, self._candidates[row]]
            self.places[row] = offset + self._candidates[row]

    def left(self, expanded: Places | None = None) -> Array:
        """What the chains leave to the other children of nodes about to be expanded: 1, or 1 − the next token's confidence.

        Args:
            expanded: [B, k] candidates of the level that has been merged last; None: the root, [B, 1].
        """
        on = (self.slots >= 0)[:, None] if expanded is None else (expanded == self._candidates[:, None])  # [B, k]
        column = np.minimum(self.merged, len(self.columns) - 1)
        following = np.exp(self.log_confidences[np.arange(len(on)), column])
        following = np.where(self.merged < self.lengths, following, 0.0)
        out: Array = np.where(on, 1 - following[:, None], 1.0).astype(np.float32)
        return out

    def follow(self, expanded: Places) -> None:
        """Told which candidates of the level that has been merged last are expanded, [B, k]."""
        hit = (expanded == self._candidates[:, None]) & (self._candidates >= 0)[:, None]
        self.slots = np.where(hit.any(1), hit.argmax(1), -1)

    @property
    def log_values(self) -> Array:
        """Log values [B, C] of the chains' tokens that are nobody's candidates; −inf for the others."""
        own = self.columns >= self.merged[:, None]
        out: Array = self.base[:, None] + np.where(own, self.log_confidences, 0.0).cumsum(1)
        return np.where(own, out, -np.inf)

    @property
    def alone(self) -> Array:
        """Log values [B, C] of the chains' tokens had nothing been drafted, as they are believed now."""
        out: Array = self.log_confidences.cumsum(1)
        return out

    @property
    def depths(self) -> Places:
        """The tokens' depths [B, C]; 1 for those without value."""
        out: Places = np.where(np.isfinite(self.log_values), self.columns + 1, 1)
        return out

    def parents(self, drafted: int) -> Places:
        """The tokens' parents [B, C] in drafting order, after ``drafted`` candidates; −1, the root, for those without value."""
        column, merged = self.columns, self.merged[:, None]
        out: Places = np.where(column == merged, self.places[:, None], drafted + column - 1)
        return np.where(np.isfinite(self.log_values), out, -1)
