"""A tree that fits the machine and the moment: draft and verify what pays, by measured costs and by what has been accepted.

A step that verifies n nodes after some draft levels brings 1 + Σ v tokens on average, v being each node's value: the
probability that the target's own path leads through it. Tokens per second are highest in the long run when every step maximises
Σ v − ρ · seconds, with ρ that long-run rate itself (renewal reward; Dinkelbach's method for ratios). So

- another level is drafted when what it is expected to add to that maximum is more than ρ · (its seconds);
- as many nodes are verified as maximise it; when that is none, the step is plain decoding;
- what the text itself suggests (`eyas.graft`) is among the nodes for nothing; where that is sure nothing is drafted;
- when drafting has not paid for a few steps it rests for a few, and then asks a small tree whether things are better now.

Drafts are over-confident, small ones most: confidences are scaled, by depth and by height, by how often such nodes were
accepted where their parents were, relative to what was promised (the relation that EAGLE-2's Figure 6 shows).

Lossless: what is emitted at a node is the target's own choice there, a function of its distribution and of the position's
random numbers, whether or not the tree holds it. So the tree may depend on anything: the draft, costs measured before, what
earlier steps accepted, and, where they are shared (`eyas.noise`), the very numbers that decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.budget import StepCosts
from eyas.graft import Beliefs, Graft
from eyas.lookup import Continuation
from eyas.transfer import upload
from eyas.tree import DraftTree, LevelScores

Array = NDArray[np.float32]

DEPTH = 8  # levels at most
EDGES = np.log(np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98], np.float32))  # of heights
HABIT = 1.0  # promised tokens that count as kept like all others, before anything of their kind is seen
MEMORY = 0.99  # what a promise, or a step's rate, counts a step later
USUAL = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.008)  # the best children's confidences, unseen
PATIENCE = 4  # steps in a row that may be worse than plain decoding
REST = 12  # steps of plain decoding after that
PROBE = 3  # nodes verified after a rest, whatever they promise
PEEK = 32  # steps of a batch from one plain one to the next, which show what plain decoding of so many rows really takes
LONGEST = 4.0  # times its expected seconds, that a step is believed to have taken: a suspended process is no slow machine


def _by_depth_and_height() -> Array:
    return np.zeros((DEPTH + 1, len(EDGES) + 1), np.float32)


@dataclass
class Pace:
    """What a batch's steps took over what their costs foretold: costs are measured on one row, and many rows attend otherwise.

    Attributes:
        plain: of plain decoding; ``tree``: of trees; None: not seen.
        steps: how many were seen.
    """

    plain: float | None = None
    tree: float | None = None
    steps: int = 0

    def learn(self, ratio: float, is_plain: bool) -> None:
        """Take in a step; while there are no trees they are slowly forgotten, and so tried again."""
        self.steps += 1
        if is_plain:
            self.plain = ratio if self.plain is None else 0.7 * self.plain + 0.3 * ratio
            self.tree = None if self.tree is None else 0.99 * self.tree + 0.01 * self.plain
        else:
            self.tree = ratio if self.tree is None else 0.7 * self.tree + 0.3 * ratio

    @property
    def peeks(self) -> bool:
        """Whether the next step should be plain decoding."""
        return self.plain is None or self.steps % PEEK == 0

    @property
    def scale(self) -> float:
        """How much dearer trees are, next to plain decoding, than foretold."""
        return 1.0 if self.plain is None or self.tree is None else max(self.tree / self.plain, 1.0)


@dataclass
class Experience:
    """What a draft's proposals have come to, step after step; shared by all trees grown for it.

    Attributes:
        promised: summed confidences of nodes whose parent was accepted, by depth and height, [DEPTH + 1, heights].
        kept: how many of those nodes were accepted, likewise.
        beliefs: what the text's own suggestions have come to.
        shares: mean calibrated confidence of the best node's children, by depth and rank, [DEPTH + 1, ranks].
        seconds: what the last steps took; ``expected``: what their costs had foretold; ``plain``: what plain decoding of the
            same tokens would have.
        paces: by number of rows, for more than one.
        poor: steps in a row that were worse than plain decoding.
        rest: steps of plain decoding still to come.
        probing: whether the next tree is the first after a rest.
    """

    promised: Array = field(default_factory=_by_depth_and_height)
    kept: Array = field(default_factory=_by_depth_and_height)
    beliefs: Beliefs = field(default_factory=Beliefs)
    shares: Array = field(default_factory=lambda: np.tile(np.array(USUAL, np.float32), (DEPTH + 1, 1)))
    seconds: float = 0.0
    expected: float = 0.0
    plain: float = 0.0
    paces: dict[int, Pace] = field(default_factory=dict)
    poor: int = 0
    rest: int = 0
    probing: bool = False

    def calibrated(self, level: int, log_confidences: Array) -> Array:
        """Log-probabilities of a level as promises of that depth and height have been kept.

        What has not been seen is taken to be as the rest: else a draft that is sure and wrong would be believed anew at every
        depth and height.
        """
        overall = (self.kept.sum() + HABIT) / (self.promised.sum() + HABIT)
        factors = np.log((self.kept[level] + HABIT * overall) / (self.promised[level] + HABIT))
        out: Array = np.minimum(log_confidences + factors[np.searchsorted(EDGES, log_confidences)], 0.0)
        return out

    def rate(self, plain: float) -> float:
        """Tokens that a second has to bring: as many as the last steps', and at least plain decoding's at the same pace.

        Args:
            plain: tokens a second of plain decoding here, as the costs have it.
        """
        return plain * max(self.expected, self.plain) / self.seconds if self.seconds else plain

    def account(self, seconds: float, expected: float, plain: float) -> None:
        """Take in what a step took, see the attributes."""
        self.seconds = MEMORY * self.seconds + min(seconds, LONGEST * expected)
        self.expected = MEMORY * self.expected + expected
        self.plain = MEMORY * self.plain + plain

    def judge(self, promises: Array, parents: NDArray[np.int64], depths: NDArray[np.int64], paths: list[list[int]]) -> None:
        """Take in which of a step's nodes were accepted.

        Args:
            promises: the draft's own log-probabilities of the nodes after the root, [B, n − 1];
                −inf: not the draft's.
            parents, depths: of all nodes, [B, n].
            paths: accepted nodes of each row, from the root on.
        """
        accepted = np.zeros(parents.shape, bool)
        for row, path in enumerate(paths):
            accepted[row, path] = True
        offered = np.take_along_axis(accepted, parents[:, 1:], 1) & np.isfinite(promises)  # their parents were accepted
        places = depths[:, 1:][offered], np.searchsorted(EDGES, promises[offered])
        self.promised *= MEMORY
        self.kept *= MEMORY
        np.add.at(self.promised, places, np.exp(promises[offered]))
        np.add.at(self.kept, places, accepted[:, 1:][offered])


@dataclass(frozen=True)
class AdaptiveTree:
    """The policy; see the module. It decides on the host: on an accelerator every draft level waits for the device once.

    Attributes:
        costs: what a step's parts cost here.
        experience: what it goes by besides, and learns.
        tokens, depth, top_k: never more than these, see `eyas.policies.DynamicTree`. Depth is the draft's, DEPTH at most.
        lookup: tokens that the text itself may suggest; 0: none, the draft alone proposes.
        coupled: share the numbers of sampling with the draft, see `eyas.noise`.
    """

    costs: StepCosts
    experience: Experience
    tokens: int = 60
    depth: int = DEPTH
    top_k: int = 10
    lookup: int = 40
    coupled: bool = True

    def limited(self, depth: int, context: int = 0) -> Growth | None:
        """The policy for one step, see `eyas.tree.TreePolicy`."""
        experience = self.experience
        resting = experience.rest > 0
        if resting:
            experience.rest -= 1
            experience.probing = not experience.rest
            if not self.lookup:
                return None
        return Growth(self, depth, context, resting)


class Growth:
    """One step's tree while it grows, and what it came to; see `eyas.tree.GrowthPolicy`.

    Attributes:
        raw: the draft's own log-probabilities by level, [B, m] each, less what a suggestion leaves to its siblings; in the end
            of the chosen nodes, [B, n − 1]. −inf for those that are not the draft's alone.
        log_values: calibrated ones summed from the root, by level, [B, m] each.
        base: those of the nodes that were expanded last, [B, k]; at first the root's.
        graft: what the text itself suggests, or None.
        room: how deep the tree may be; ``depth``: levels that are drafted.
        rate: ρ for this step; ``prices``: ρ · (seconds beyond plain decoding) of 1 … tokens nodes, [tokens].
        spent: seconds of drafting.
        worth: what drafting has added to Σ v − ρ · seconds.
    """

    def __init__(self, tree: AdaptiveTree, depth: int, context: int, resting: bool = False) -> None:
        self.tree, self.context, self.resting = tree, context, resting
        self.costs, self.experience, self.coupled = tree.costs, tree.experience, tree.coupled
        self.probing = self.experience.probing and not resting
        self.room = depth
        self.depth = 1 if self.probing else min(depth, tree.depth, DEPTH)
        self.raw: list[Array] = []
        self.log_values: list[Array] = []
        self.graft: Graft | None = None
        self.spent = self.worth = 0.0

    def width(self, level: int) -> int:
        return self.tree.top_k

    def begin(self, batch: int, find: Callable[[int], list[Continuation]] | None) -> bool:
        self.base = np.zeros((batch, 1), np.float32)
        plain = self.costs.target(batch, batch, self.context)
        self.rate, beyond = self.experience.rate(batch / plain), self.costs.beyond(batch, self.tree.tokens, self.context)
        if batch > 1:
            pace = self.experience.paces.setdefault(batch, Pace())
            if pace.peeks:
                self.resting = True
                return False
            self.rate, beyond = max(self.rate, batch / plain), beyond + (pace.scale - 1) * (plain + beyond)
        self.prices = self.rate * beyond
        count = min(self.tree.lookup, self.tree.tokens, self.room)
        found = find(count) if find is not None and count and not self.probing else []
        if any(len(each.tokens) for each in found):
            self.graft = Graft(found, self.experience.beliefs)
        if self.resting or (self.graft is None and (batch == 1 or self.probing)):
            return not self.resting
        left = np.ones((batch, 1), np.float32) if self.graft is None else self.graft.left()
        suggested = np.zeros((batch, 0), np.float32) if self.graft is None else np.exp(self.graft.log_values)
        expected = np.concatenate([suggested, left * self.experience.shares[1]], 1)
        return self._best(expected)[0] - self._best(suggested)[0] > self.rate * self.costs.first

    def trust(self, level: int, tokens: Tensor, log_confidences: Tensor) -> Tensor:
        raw: Array = log_confidences.cpu().numpy()  # [B, k, w]
        trusted = self.experience.calibrated(level, raw)
        found, shares = np.exp(trusted[:, 0]).mean(0), self.experience.shares[level]  # [w], [ranks]
        shares[: len(found)] += (1 - MEMORY) * (found[: len(shares)] - shares[: len(found)])
        self.spent += self.costs.first if level == 1 else 0.0
        if self.graft is not None:
            raw = raw.copy()
            self.graft.meet(level, tokens.cpu().numpy(), trusted, raw)
        values = (self.base[:, :, None] + trusted).reshape(len(raw), -1)
        if self.graft is not None:
            self.graft.merge(values, self._drafted)
        self.raw.append(raw.reshape(len(raw), -1))
        self.log_values.append(values)
        return upload(trusted, log_confidences.device)

    def expand(self, level: int, log_values: Tensor, log_confidences: Tensor) -> Tensor | None:
        if level == self.depth:
            return None
        values, last = np.exp(self._log_values()), self.log_values[-1]  # [B, m] each
        order = np.argsort(-last, 1, kind="stable")[:, : self.tree.top_k]  # [B, k]
        above = np.take_along_axis(last, order, 1)  # [B, k]
        left = np.exp(above) if self.graft is None else np.exp(above) * self.graft.left(order)
        children = left[:, :, None] * self.experience.shares[level + 1]  # [B, k, ranks]
        expected = np.concatenate([values, children.reshape(len(values), -1)], 1)
        deeper, size = self._best(expected)
        if not size:
            return None
        least = -np.partition(-expected, size - 1, 1)[:, size - 1 : size]  # [B, 1]
        pays = children[:, :, 0] >= least  # [B, k]: whose best child would be verified
        parents = max(int((pays * np.arange(1, pays.shape[1] + 1)).max()), 1)
        seconds = self.costs.level(len(values) * parents)
        if deeper - self._best(values)[0] <= self.rate * seconds:
            return None
        self.spent += seconds
        self.base = above[:, :parents]
        if self.graft is not None:
            self.graft.follow(order[:, :parents])
        return upload(order[:, :parents], log_values.device)

    def besides(self, device: torch.device) -> LevelScores | None:
        graft = self.graft
        if graft is None:
            return None
        parts = (graft.tokens, graft.log_values, graft.log_confidences, graft.parents(self._drafted), graft.depths)
        return LevelScores(*(upload(part, device) for part in parts))

    def choose(self, levels: list[LevelScores]) -> tuple[Tensor, int]:
        log_values = self._log_values()  # [B, m]
        gain, size = self._best(np.exp(log_values))
        if self.log_values:
            alone = 0.0 if self.graft is None else self._best(np.exp(self.graft.alone))[0]
            self.worth = gain - alone - self.rate * self.spent
        if self.probing:
            size = max(size, PROBE)
        chosen = np.sort(np.argsort(-log_values, 1, kind="stable")[:, :size], 1)  # [B, n - 1]
        depths = [np.full_like(each, level, np.int64) for level, each in enumerate(self.log_values, 1)]
        if self.graft is not None:
            self.raw.append(np.full_like(self.graft.log_confidences, -np.inf))
            depths.append(self.graft.depths)
        self.raw = [np.take_along_axis(np.concatenate(self.raw, 1), chosen, 1)]
        deepest = int(np.take_along_axis(np.concatenate(depths, 1), chosen, 1).max(initial=0))
        return upload(chosen, levels[0].log_values.device), deepest

    def learn(self, tree: DraftTree, paths: list[list[int]], emitted: list[list[int]], seconds: float) -> None:
        experience, batch, taken = self.experience, len(paths), sum(map(len, paths))
        if tree.size > 1 and self.log_values:
            parents, depths = torch.stack([tree.parents, tree.depths]).cpu().numpy()
            experience.judge(self.raw[0], parents, depths, paths)
        if self.graft is not None:
            experience.beliefs.judge(self.graft, emitted, MEMORY)
        step = self.costs.target(batch * tree.size, batch, self.context) + self.spent
        if batch > 1:
            experience.paces.setdefault(batch, Pace()).learn(min(seconds / step, LONGEST), tree.size == 1)
        experience.account(seconds, step, taken * self.costs.target(batch, batch, self.context) / batch)
        if not self.log_values:  # nothing was drafted
            return
        failed = self.probing and taken == batch
        experience.poor = experience.poor + 1 if self.worth < 0 and not self.probing else 0
        experience.probing = False
        if failed or experience.poor >= PATIENCE:
            experience.poor, experience.rest = 0, REST
            experience.promised /= 2  # so that in the end a probe is believed again
            experience.kept /= 2

    @property
    def _drafted(self) -> int:
        """Candidates of the draft so far."""
        return sum(each.shape[1] for each in self.log_values)

    def _log_values(self) -> Array:
        """Log values [B, m] of all candidates so far, what the text suggests included."""
        return np.concatenate(self.log_values if self.graft is None else [*self.log_values, self.graft.log_values], 1)

    def _best(self, values: Array) -> tuple[float, int]:
        """The largest Σ v − ρ · (seconds beyond plain decoding) of verifying the best of ``values`` [B, m], and how many."""
        ranked = -np.sort(-values, 1)[:, : len(self.prices)]
        worth = np.concatenate([[0.0], ranked.cumsum(1).sum(0) - self.prices[: ranked.shape[1]]])  # of 0, 1, … nodes
        size = int(worth.argmax())
        return float(worth[size]), size
