"""What a step costs on this machine: verification and drafting are timed once, a few seconds for a small model.

T(n), one forward of the target over n nodes, depends on the machine: nearly flat on a GPU or with matrix units, steep on a CPU
without them, where EAGLE-2's 60 nodes can cost more than they bring. `eyas.adaptive` decides by these costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eyas.drafters.eagle import EagleDraft, EagleDrafter
from eyas.tree import DraftTree, DynamicTree

SIZES = (1, 2, 4, 6, 9, 13, 17, 25, 33, 49, 61)
ONE_LEVEL, NARROW, WIDE = DynamicTree(60, 1, 10), DynamicTree(60, 4, 4), DynamicTree(60, 6, 10)
"""What is measured to choose a tree for every step."""

ROUNDS = 5
CONTEXT = 64  # tokens of context to measure at


@dataclass(frozen=True)
class StepCosts:
    """Seconds, the shortest of a few interleaved rounds: other work on the machine only ever adds.

    Attributes:
        verify: a forward of the target by the number of nodes; 1 is plain decoding.
        draft: drafting a tree, by its settings.
        commit: the draft's forward over the tokens a step has committed.
    """

    verify: dict[int, float]
    draft: dict[DynamicTree, float]
    commit: float = 0.0

    def speedup(self, tree: DynamicTree, tau: float) -> float:
        """Expected speedup over plain decoding: τ · T(1) / (T(n) + drafting)."""
        return tau * self.verify[1] / (self.target(tree.tokens + 1) + self.draft[tree] + self.commit)

    def target(self, nodes: int) -> float:
        """T(n): between measured sizes, and beyond the largest, along straight lines."""
        return float(self._curve(torch.tensor([nodes])))

    def beyond(self, batch: int, tokens: int) -> Tensor:
        """T(batch · (n + 1)) − T(batch) for n = 1 … ``tokens``, float32: what n nodes a row add to plain decoding."""
        key = (batch, tokens)
        if key not in self._beyond:
            times = self._curve(batch * torch.arange(1, tokens + 2))
            self._beyond[key] = (times - times[0]).clamp(min=0)[1:].cummax(0).values.float()
        return self._beyond[key]

    @property
    def first(self) -> float:
        """Drafting a first level, with what every step's drafting has: the commit before, the tree put together after."""
        return self.draft[ONE_LEVEL] + self.commit

    def level(self, rows: int) -> float:
        """A further level of so many nodes."""
        wide, narrow = ((self.draft[tree] - self.draft[ONE_LEVEL]) / (tree.depth - 1) for tree in (WIDE, NARROW))
        slope = max(wide - narrow, 0.0) / (WIDE.top_k - NARROW.top_k)
        return max(wide - slope * (WIDE.top_k - rows), slope)

    def _curve(self, nodes: Tensor) -> Tensor:
        """T at each of ``nodes`` [m] int64, float64."""
        sizes = torch.tensor(list(self.verify))
        times = torch.tensor(list(self.verify.values()), dtype=torch.float64)
        upper = torch.searchsorted(sizes, nodes).clamp(1, len(sizes) - 1)
        share = (nodes - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
        return torch.lerp(times[upper - 1], times[upper], share.double())

    @cached_property
    def _beyond(self) -> dict[tuple[int, int], Tensor]:
        return {}


@torch.inference_mode()
def measure_costs(
    draft: EagleDraft,
    trees: Sequence[DynamicTree] = (ONE_LEVEL, NARROW, WIDE),
    sizes: Sequence[int] = SIZES,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
) -> StepCosts:
    """Time the target and the draft here and now; by default about two seconds for a small model on a CPU.

    Args:
        trees: to draft, and whose sizes to verify.
        sizes: further numbers of nodes to verify.
        context: tokens of context to measure at (half the target's limit at most).
        rounds: of which the shortest counts; sizes and trees are interleaved.
    """
    target = draft.target
    ids = [token % target.vocab_size for token in range(100, 100 + min(context, target.context_limit // 2))]
    cache, drafter = target.new_cache(1, 2 * len(ids)), EagleDrafter(draft, 1)
    features, _ = target.prefill(cache, [ids])
    root = torch.tensor([ids[0]], device=target.device)
    drafter.commit([[*ids, ids[0]]], features)
    drafter.catch_up()

    def commit() -> None:
        drafter.commit([ids[-1:] * 4], features[:, :3])  # three tokens, about what a step accepts
        drafter.catch_up()
        drafter.truncate([len(ids)])

    def verify(size: int) -> None:
        tokens = root.expand(size)[None]
        parents = torch.zeros_like(tokens)
        depths = parents.clone()
        depths[:, 1:] = 1
        target.verify(cache, DraftTree(tokens, parents, parents.float(), depths, 1))
        cache.rewind()

    verified: dict[int, list[float]] = {size: [] for size in sorted({1, *sizes, *(tree.tokens + 1 for tree in trees)})}
    drafted: dict[DynamicTree, list[float]] = {tree: [] for tree in trees}
    commits: list[float] = []
    for _ in range(rounds):
        for size, times in verified.items():
            times.append(_seconds(lambda size=size: verify(size), target.device))  # type: ignore[misc]
        for tree, times in drafted.items():
            times.append(_seconds(lambda tree=tree: drafter.propose(root, tree), target.device))  # type: ignore[misc]
        commits.append(_seconds(commit, target.device))
    return StepCosts(
        {size: min(times) for size, times in verified.items()},
        {tree: min(times) for tree, times in drafted.items()},
        min(commits),
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call, its work on the device included."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started
