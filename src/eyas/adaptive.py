"""A tree that fits the machine and the moment: draft and verify what pays, by measured costs and by what has been accepted.

A step that verifies n nodes after some draft levels brings 1 + Σ v tokens on average, v being each node's value: the
probability that the target's own path leads through it. Tokens per second are highest in the long run when every step maximises
Σ v − ρ · seconds, with ρ that long-run rate itself (renewal reward; Dinkelbach's method for ratios). So

- another level is drafted when what it is expected to add to that maximum is more than ρ · (its seconds);
- as many nodes are verified as maximise it; when that is none, the step is plain decoding;
- when drafting has not paid for a few steps it rests for a few, and then asks a small tree whether things are better now.

Drafts are over-confident, small ones most: confidences are scaled, by depth and by height, by how often such nodes were
accepted where their parents were, relative to what was promised (the relation that EAGLE-2's Figure 6 shows).

Lossless: which nodes are verified depends on the draft, on costs measured before, and on what earlier steps accepted; never on
the random number that decides at a node. What is emitted there is the target's own choice, whether or not the tree holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eyas.budget import StepCosts
from eyas.tree import DraftTree, LevelScores, best

DEPTH = 8  # levels at most
EDGES = torch.tensor([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98]).log()  # between heights
HABIT = 1.0  # promised tokens that count as kept before anything is seen
MEMORY = 0.99  # what a promise, or a step's rate, counts a step later
USUAL = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.008)  # the best children's confidences, unseen
PATIENCE = 4  # steps in a row that may be worse than plain decoding
REST = 12  # steps of plain decoding after that
PROBE = 3  # nodes verified after a rest, whatever they promise


@dataclass
class Experience:
    """What a draft's proposals have come to, step after step; shared by all trees grown for it.

    Attributes:
        promised: summed confidences of nodes whose parent was accepted, by depth and height, [DEPTH + 1, heights].
        kept: how many of those nodes were accepted, likewise.
        shares: mean calibrated confidence of a node's children, by depth and rank, [DEPTH + 1, ranks].
        tokens, seconds: of the last steps; ``expected``: the seconds that the costs had foretold.
        poor: steps in a row that were worse than plain decoding.
        rest: steps of plain decoding still to come.
        probing: whether the tree that grows is the first after a rest.
        raw: of the tree that grows, the draft's own log-probabilities by level, [B, m] each; then of its nodes, [B, n − 1].
        values: calibrated values by level, [B, m] each.
        spent: seconds of its draft levels.
        worth: its Σ v − ρ · seconds beyond plain decoding.
    """

    promised: Tensor = field(default_factory=lambda: torch.zeros(DEPTH + 1, len(EDGES) + 1))
    kept: Tensor = field(default_factory=lambda: torch.zeros(DEPTH + 1, len(EDGES) + 1))
    shares: Tensor = field(default_factory=lambda: torch.tensor(USUAL).repeat(DEPTH + 1, 1))
    tokens: float = 0.0
    seconds: float = 0.0
    expected: float = 0.0
    poor: int = 0
    rest: int = 0
    probing: bool = False
    raw: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    spent: float = 0.0
    worth: float = 0.0

    def calibrated(self, level: int, log_confidences: Tensor) -> Tensor:
        """Log-probabilities as promises of that depth and height have been kept."""
        factors = ((self.kept[level] + HABIT) / (self.promised[level] + HABIT)).log()
        return (log_confidences + factors[torch.bucketize(log_confidences, EDGES)]).clamp(max=0.0)

    def learn(self, tree: DraftTree, paths: list[list[int]]) -> None:
        """Take in which nodes were accepted."""
        self.promised *= MEMORY
        self.kept *= MEMORY
        (raw,) = self.raw
        heights, promises = torch.bucketize(raw, EDGES), raw.exp()
        accepted = torch.zeros(tree.tokens.shape, dtype=torch.bool)  # [B, n]
        for row, path in enumerate(paths):
            accepted[row, path] = True
        offered = accepted.gather(1, tree.parents[:, 1:])  # [B, n - 1]: their parents were accepted
        places = tree.depths[:, 1:][offered], heights[offered]
        self.promised.index_put_(places, promises[offered], accumulate=True)
        self.kept.index_put_(places, accepted[:, 1:][offered].float(), accumulate=True)


@dataclass(frozen=True)
class AdaptiveTree:
    """The policy; see the module. It decides on the host: on an accelerator every level waits for the device.

    Attributes:
        costs: what a step's parts cost here.
        experience: what it goes by besides, and learns.
        tokens, depth, top_k: never more than these; as `eyas.tree.DynamicTree` has them.
    """

    costs: StepCosts
    experience: Experience
    tokens: int = 60
    depth: int = DEPTH
    top_k: int = 10

    def limited(self, depth: int) -> AdaptiveTree | None:
        experience = self.experience
        if experience.rest:
            return None
        experience.raw, experience.values, experience.spent = [], [], 0.0
        return replace(self, depth=1 if experience.probing else min(self.depth, depth))

    def width(self, level: int) -> int:
        return self.top_k

    def trust(self, level: int, log_confidences: Tensor) -> Tensor:
        experience, raw = self.experience, log_confidences.cpu()
        trusted = experience.calibrated(level, raw)
        experience.raw.append(raw.flatten(1))
        if level > 1:
            found, shares = trusted[:, 0].exp().mean(0), experience.shares[level]  # [w], the best parent's children
            shares[: len(found)].lerp_(found[: len(shares)], 1 - MEMORY)
        return trusted.to(log_confidences.device)

    def expand(self, level: int, log_values: Tensor, log_confidences: Tensor) -> Tensor | None:
        experience, batch = self.experience, len(log_values)
        experience.values.append(log_values.exp().cpu())
        if level == self.depth:
            return None
        values, order = torch.cat(experience.values, dim=1), best(log_values, self.top_k)  # [B, m], [B, k]
        children = experience.values[-1].gather(1, order.cpu())[:, :, None] * experience.shares[level + 1]  # [B, k, w]
        expected = torch.cat([values, children.flatten(1)], dim=1)
        deeper, size = self._worth(expected)
        if not size:
            return None
        least = expected.topk(size, dim=1).values[:, -1:]  # [B, 1]
        parents = max(int((children[:, :, 0] >= least).sum(1).max()), 1)  # whose best child would be verified
        seconds = self.costs.level(batch * parents)
        if deeper - self._worth(values)[0] <= self._rate(batch) * seconds:
            return None
        experience.spent += seconds
        return order[:, :parents]

    def choose(self, levels: list[LevelScores]) -> Tensor:
        experience, scores = self.experience, torch.cat([level.log_values for level in levels], dim=1)  # [B, m]
        worth, size = self._worth(torch.cat(experience.values, dim=1))
        experience.worth = worth - self._rate(len(scores)) * (experience.spent + self.costs.first)
        chosen = best(scores, max(size, PROBE) if experience.probing else size).sort(dim=1).values
        experience.raw = [torch.cat(experience.raw, dim=1).gather(1, chosen.cpu())]
        return chosen

    def learn(self, tree: DraftTree, paths: list[list[int]], seconds: float) -> None:
        experience, batch, taken = self.experience, len(paths), sum(map(len, paths))
        expected = self.costs.target(batch * tree.size)
        if experience.rest:
            experience.rest -= 1
            experience.probing = not experience.rest
        else:
            expected += experience.spent + self.costs.first
            if tree.size > 1:
                experience.learn(tree, paths)
            failed = experience.probing and taken == batch
            experience.poor = experience.poor + 1 if experience.worth < 0 and not experience.probing else 0
            experience.probing = False
            if failed or experience.poor >= PATIENCE:
                experience.poor, experience.rest = 0, REST
                experience.promised /= 2  # so that in the end a probe is believed again
                experience.kept /= 2
        experience.tokens = MEMORY * experience.tokens + taken
        experience.seconds = MEMORY * experience.seconds + seconds
        experience.expected = MEMORY * experience.expected + expected

    def _worth(self, values: Tensor) -> tuple[float, int]:
        """The largest Σ v − ρ · (seconds beyond plain decoding) of verifying the best of ``values`` [B, m], and how many."""
        batch = len(values)
        gains = values.topk(min(self.tokens, values.shape[1]), dim=1).values.cumsum(1).sum(0)  # [n]
        worth = gains - self._rate(batch) * self.costs.beyond(batch, self.tokens)[: len(gains)]
        size = int(worth.argmax())
        return (float(worth[size]), size + 1) if worth[size] > 0 else (0.0, 0)

    def _rate(self, batch: int) -> float:
        """Tokens that a second has to bring: those of the last steps, at least plain decoding's at the same pace.

        Costs are those of a short context and a quiet machine; where steps take longer, more must come of each.
        """
        plain, experience = batch / self.costs.target(batch), self.experience
        if not experience.seconds:
            return plain
        return max(plain * experience.expected, experience.tokens) / experience.seconds
