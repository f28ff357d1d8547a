"""How large a draft tree pays on this machine: verification and drafting are timed once, and the best of a few trees is taken.

Speedup = τ · T(1) / (T(n) + depth · T_draft). T(n), one forward of the target over n nodes, depends on the machine: nearly flat
on a GPU or with matrix units, steep on a CPU without them, where EAGLE-2's 60 nodes can cost more than they bring. How τ grows
with the tree depends little on the draft: `LADDER` holds what was measured with the shipped one (docs/notes/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from eyas.drafters.eagle import EagleDraft, EagleDrafter
from eyas.tree import DraftTree, DynamicTree

LADDER: tuple[tuple[DynamicTree, float], ...] = (
    (DynamicTree(5, 4, 2), 1.95),
    (DynamicTree(8, 4, 3), 2.12),
    (DynamicTree(12, 4, 4), 2.33),
    (DynamicTree(16, 5, 5), 2.44),
    (DynamicTree(24, 6, 6), 2.55),
    (DynamicTree(32, 6, 8), 2.67),
    (DynamicTree(60, 6, 10), 2.85),
)
"""Trees to choose from, and the tokens a step to expect: 12/4/4 and 60/6/10 as measured, the others scaled from a sweep
(docs/benchmarks.md). The last is the published default."""

ROUNDS = 5
CONTEXT = 64  # tokens of context to measure at


@dataclass(frozen=True)
class StepCosts:
    """Seconds, medians over a few interleaved rounds.

    Attributes:
        verify: a forward of the target by the number of nodes; 1 is plain decoding.
        draft: drafting a tree, by its settings.
    """

    verify: dict[int, float]
    draft: dict[DynamicTree, float]

    def speedup(self, tree: DynamicTree, tau: float) -> float:
        """Expected speedup over plain decoding: τ · T(1) / (T(n) + drafting)."""
        return tau * self.verify[1] / (self.verify[tree.tokens + 1] + self.draft[tree])


@torch.inference_mode()
def measure_costs(
    draft: EagleDraft,
    trees: Sequence[DynamicTree] = tuple(tree for tree, _ in LADDER),
    sizes: Sequence[int] = (),
    context: int = CONTEXT,
    rounds: int = ROUNDS,
) -> StepCosts:
    """Time the target and the draft here and now; by default about two seconds for a small model on a CPU.

    Args:
        trees: to draft, and whose sizes to verify.
        sizes: further numbers of nodes to verify.
        context: tokens of context to measure at (half the target's limit at most).
        rounds: over which the median is taken; sizes and trees are interleaved.
    """
    target = draft.target
    ids = [token % target.vocab_size for token in range(100, 100 + min(context, target.context_limit // 2))]
    cache, drafter = target.new_cache(1, 2 * len(ids)), EagleDrafter(draft, 1)
    features, _ = target.prefill(cache, [ids])
    root = torch.tensor([ids[0]], device=target.device)
    drafter.commit([[*ids, ids[0]]], features)

    def verify(size: int) -> None:
        tokens = root.expand(size)[None]
        parents = torch.zeros_like(tokens)
        depths = parents.clone()
        depths[:, 1:] = 1
        target.verify(cache, DraftTree(tokens, parents, parents.float(), depths, 1))
        cache.rewind()

    verified: dict[int, list[float]] = {size: [] for size in sorted({1, *sizes, *(tree.tokens + 1 for tree in trees)})}
    drafted: dict[DynamicTree, list[float]] = {tree: [] for tree in trees}
    for _ in range(rounds):
        for size, times in verified.items():
            times.append(_seconds(lambda size=size: verify(size), target.device))  # type: ignore[misc]
        for tree, times in drafted.items():
            times.append(_seconds(lambda tree=tree: drafter.propose(root, tree), target.device))  # type: ignore[misc]
    return StepCosts(
        {size: median(times) for size, times in verified.items()}, {tree: median(times) for tree, times in drafted.items()}
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


def choose_tree(costs: StepCosts) -> DynamicTree:
    """The ladder's tree with the highest expected speedup."""
    return max(LADDER, key=lambda rung: costs.speedup(*rung))[0]
