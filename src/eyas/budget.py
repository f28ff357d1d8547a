"""What a step costs on this machine: verification and drafting are timed once, a few seconds for a small model.

T(n), one forward of the target over n nodes, depends on the machine: nearly flat on a GPU or with matrix units, steep on a CPU
without them, where EAGLE-2's 60 nodes can cost more than they bring. `eyas.adaptive` decides by these costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.cache import RowCache
from eyas.drafters.eagle import EagleDraft, EagleDrafter
from eyas.policies import DynamicTree
from eyas.target import Target
from eyas.tree import DraftTree

SIZES = (1, 2, 4, 6, 9, 13, 17, 25, 33, 49, 61)
ONE_LEVEL, NARROW, WIDE = DynamicTree(60, 1, 10), DynamicTree(60, 4, 4), DynamicTree(60, 6, 10)
"""What is drafted to see the price of a level."""

ROUNDS = 5
CONTEXT = 64  # tokens of context to measure at
FAR = 1024  # and how many of them to see what context costs


@dataclass(frozen=True)
class StepCosts:
    """Seconds, the shortest of a few interleaved rounds: other work on the machine only ever adds.

    Attributes:
        verify: a forward of the target by the number of nodes; 1 is plain decoding.
        draft: drafting a tree, by its settings.
        commit: the draft's forward over the tokens a step has committed.
        reach: what a token of context beyond CONTEXT adds to a forward of the target, for each row of a batch.
        attention: what it adds for each node besides.
    """

    verify: dict[int, float]
    draft: dict[DynamicTree, float]
    commit: float = 0.0
    reach: float = 0.0
    attention: float = 0.0

    def speedup(self, tree: DynamicTree, tau: float) -> float:
        """Expected speedup over plain decoding: τ · T(1) / (T(n) + drafting)."""
        return tau * self.verify[1] / (self.target(tree.tokens + 1) + self.draft[tree] + self.commit)

    def target(self, nodes: int, batch: int = 1, context: int = CONTEXT) -> float:
        """T(n): between measured sizes, and beyond the largest, along straight lines; ``nodes`` are all rows' together."""
        further = max(context - CONTEXT, 0) * (self.reach * batch + self.attention * nodes)
        return float(self._curve(np.array(nodes))) + further

    def beyond(self, batch: int, tokens: int, context: int = CONTEXT) -> NDArray[np.float64]:
        """T(batch · (n + 1)) − T(batch) for n = 1 … ``tokens``: what n nodes a row add to plain decoding."""
        nodes = np.arange(1, tokens + 1)
        more = np.maximum.accumulate(np.maximum(self._curve(batch * (nodes + 1)) - self._curve(np.array(batch)), 0.0))
        out: NDArray[np.float64] = more + max(context - CONTEXT, 0) * self.attention * batch * nodes
        return out

    @property
    def first(self) -> float:
        """Drafting a first level, with what every step's drafting has: the commit before, the tree put together after."""
        return self.draft[ONE_LEVEL] + self.commit

    def level(self, rows: int) -> float:
        """A further level of so many nodes."""
        wide, narrow = ((self.draft[tree] - self.draft[ONE_LEVEL]) / (tree.depth - 1) for tree in (WIDE, NARROW))
        slope = max(wide - narrow, 0.0) / (WIDE.top_k - NARROW.top_k)
        return max(wide - slope * (WIDE.top_k - rows), slope)

    def _curve(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """T at each of ``nodes``."""
        sizes, times = np.array(list(self.verify)), np.array(list(self.verify.values()))
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        out: NDArray[np.float64] = np.interp(nodes, sizes, times) + np.maximum(nodes - sizes[-1], 0) * max(slope, 0.0)
        return out


@torch.inference_mode()
def measure_costs(
    draft: EagleDraft,
    trees: Sequence[DynamicTree] = (ONE_LEVEL, NARROW, WIDE),
    sizes: Sequence[int] = SIZES,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
) -> StepCosts:
    """Time the target and the draft here and now; a few seconds for a small model on a CPU.

    Args:
        trees: to draft, and whose sizes to verify.
        sizes: further numbers of nodes to verify.
        context: tokens of context to measure at (half the target's limit at most).
        rounds: of which the shortest counts; sizes and trees are interleaved.
    """
    target = draft.target
    ids = _some_text(target, context)
    cache, drafter = target.new_cache(1, 2 * len(ids)), EagleDrafter(draft, 1)
    features, _ = target.prefill(cache, [ids])
    root = torch.tensor([ids[0]], device=target.device)
    drafter.commit([[*ids, ids[0]]], features)
    drafter.catch_up()

    def commit() -> None:
        drafter.commit([ids[-1:] * 4], features[:, :3])  # three tokens, about what a step accepts
        drafter.catch_up()
        drafter.truncate([len(ids)])

    verified: dict[int, list[float]] = {size: [] for size in sorted({1, *sizes, *(tree.tokens + 1 for tree in trees)})}
    drafted: dict[DynamicTree, list[float]] = {tree: [] for tree in trees}
    commits: list[float] = []
    for _ in range(rounds):
        for size, times in verified.items():
            times.append(_seconds(lambda size=size: _verify(target, cache, size), target.device))  # type: ignore[misc]
        for tree, times in drafted.items():
            times.append(_seconds(lambda tree=tree: drafter.propose(root, tree), target.device))  # type: ignore[misc]
        commits.append(_seconds(commit, target.device))
    return StepCosts(
        {size: min(times) for size, times in verified.items()},
        {tree: min(times) for tree, times in drafted.items()},
        min(commits),
    )


@torch.inference_mode()
def measure_context(draft: EagleDraft, costs: StepCosts) -> StepCosts:
    """The costs with what context adds to them; unchanged for a target that takes only short texts."""
    target, sizes = draft.target, (1, SIZES[-1])
    ids = _some_text(target, FAR)
    if len(ids) < 4 * CONTEXT:
        return costs
    cache = target.new_cache(1, 2 * len(ids))
    target.prefill(cache, [ids], with_features=False)
    lone, many = (
        min(_seconds(lambda size=size: _verify(target, cache, size), target.device) for _ in range(ROUNDS))  # type: ignore[misc]
        for size in sizes
    )
    more = len(ids) - CONTEXT
    attention = max((many - lone - costs.target(sizes[1]) + costs.target(1)) / (sizes[1] - 1) / more, 0.0)
    return replace(costs, reach=max((lone - costs.target(1)) / more - attention, 0.0), attention=attention)


def _some_text(target: Target, length: int) -> list[int]:
    """Token ids of any text, of half the target's context at most."""
    return [token % target.vocab_size for token in range(100, 100 + min(length, target.context_limit // 2))]


def _verify(target: Target, cache: RowCache, size: int) -> None:
    """A forward over so many nodes, a root and its children."""
    tokens = torch.full((1, size), 1, device=target.device)
    parents = torch.zeros_like(tokens)
    depths = parents.clone()
    depths[:, 1:] = 1
    target.verify(cache, DraftTree(tokens, parents, parents.float(), depths, 1))
    cache.rewind()


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call, its work on the device included."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started
