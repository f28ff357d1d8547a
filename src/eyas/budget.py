"""How large a draft tree pays on this machine: verification and drafting are timed once, and the best of a few trees is taken.

Speedup = τ · T(1) / (T(n) + depth · T_draft). T(n), one forward of the target over n nodes, depends on the machine: nearly flat
on a GPU or with matrix units, steep on a CPU without them, where EAGLE-2's 60 nodes can cost more than they bring. How τ grows
with the tree depends little on the draft: `LADDER` holds what was measured with the shipped one (docs/notes/).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from eyas.drafters.eagle import EagleDraft, EagleDrafter
from eyas.tree import DraftTree, DynamicTree

LADDER: tuple[tuple[DynamicTree, float], ...] = (
    (DynamicTree(5, 4, 2), 1.84),
    (DynamicTree(8, 4, 3), 2.00),
    (DynamicTree(12, 4, 4), 2.11),
    (DynamicTree(16, 5, 5), 2.16),
    (DynamicTree(24, 5, 8), 2.31),
    (DynamicTree(32, 5, 8), 2.37),
    (DynamicTree(60, 6, 10), 2.59),
)
"""Trees to choose from, and the tokens a step to expect: 12/4/4 and 60/6/10 as measured, the others scaled from a sweep.
The last is the published default."""

ROUNDS = 5
CONTEXT = 64  # tokens of context to measure at


@dataclass(frozen=True)
class StepCosts:
    """Seconds, medians over a few interleaved rounds.

    Attributes:
        plain: a forward of the target over one token.
        verify: a forward over a ladder tree's nodes, root included, by their number.
        draft: drafting a ladder tree, by its settings.
    """

    plain: float
    verify: dict[int, float]
    draft: dict[DynamicTree, float]

    def speedup(self, tree: DynamicTree, tau: float) -> float:
        """Expected speedup over plain decoding."""
        return tau * self.plain / (self.verify[tree.tokens + 1] + self.draft[tree])


@torch.inference_mode()
def measure_costs(draft: EagleDraft) -> StepCosts:
    """Time the target and the draft here and now; about two seconds for a small model on a CPU."""
    target = draft.target
    context = [token % target.vocab_size for token in range(100, 100 + min(CONTEXT, target.context_limit // 2))]
    cache, drafter = target.new_cache(1, 2 * CONTEXT), EagleDrafter(draft, 1)
    features, _ = target.prefill(cache, [context])
    root = torch.tensor([context[0]], device=target.device)
    drafter.commit(torch.tensor([[*context, context[0]]], device=target.device), features, [len(context)])

    def verify(size: int) -> None:
        tokens = root.expand(size)[None]
        parents = torch.zeros_like(tokens)
        depths = parents.clone()
        depths[:, 1:] = 1
        target.verify(cache, DraftTree(tokens, parents, parents.float(), depths, 1))
        cache.rewind()

    sizes = [1, *(tree.tokens + 1 for tree, _ in LADDER)]
    verified: dict[int, list[float]] = {size: [] for size in sizes}
    drafted: dict[DynamicTree, list[float]] = {tree: [] for tree, _ in LADDER}
    for _ in range(ROUNDS):
        for size in sizes:
            verified[size].append(_seconds(lambda size=size: verify(size), target.device))  # type: ignore[misc]
        for tree in drafted:
            drafted[tree].append(_seconds(lambda tree=tree: drafter.propose(root, tree), target.device))  # type: ignore[misc]
    verify_seconds = {size: median(times) for size, times in verified.items()}
    return StepCosts(verify_seconds[1], verify_seconds, {tree: median(times) for tree, times in drafted.items()})


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call, its work on the device included."""
    started = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def choose_tree(costs: StepCosts) -> DynamicTree:
    """The ladder's tree with the highest expected speedup."""
    return max(LADDER, key=lambda rung: costs.speedup(*rung))[0]
