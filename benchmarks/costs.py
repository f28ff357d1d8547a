"""What a step costs here: T(n) of the target, a tree's drafting, and the share of neither (bookkeeping).

python benchmarks/costs.py [--draft DRAFT] [--dtype DTYPE] [--methods eagle2,autoregressive] [--new-tokens 128]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

import eyas
from eyas.drafters.eagle import EagleDrafter
from eyas.tree import DraftTree, DynamicTree


def costs(arguments: argparse.Namespace) -> None:
    """T(n)/T(1) as the loop sees it, sizes interleaved, and a draft level's cost."""
    engine = eyas.load(draft=arguments.draft, dtype=arguments.dtype)
    target, draft = engine.target, engine.draft
    assert draft is not None
    sizes = (1, 2, 4, 8, 12, 16, 24, 32, 48, 61, 64)
    context = torch.randint(100, 20000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    times: dict[int, list[float]] = defaultdict(list)
    levels = []
    with torch.inference_mode():
        cache = target.new_cache(1, 400)
        features, _ = target.prefill(cache, [context])
        drafter = EagleDrafter(draft, 1)
        drafter.commit(torch.tensor([[*context, 5]]), features, [len(context)])
        for _ in range(15):
            for size in sizes:
                tokens = torch.arange(1, size + 1)[None]
                tree = DraftTree(tokens, torch.zeros_like(tokens), torch.zeros(1, size), (tokens > 1).long(), 1)
                started = time.perf_counter()
                target.verify(cache, tree)
                times[size].append(time.perf_counter() - started)
                cache.rewind()
            started = time.perf_counter()
            drafter.propose(torch.tensor([5]), DynamicTree())
            levels.append(time.perf_counter() - started)
    plain = statistics.median(times[1][3:])
    print(f"dtype {target.dtype}, threads {torch.get_num_threads()}, T(1) {1000 * plain:.1f} ms, context {len(context)}")
    print("| n | " + " | ".join(map(str, sizes)) + " |\n|---|" + "---|" * len(sizes))
    print("| T(n)/T(1) | " + " | ".join(f"{statistics.median(times[size][3:]) / plain:.2f}" for size in sizes) + " |")
    print(f"a 60/6/10 tree is drafted in {1000 * statistics.median(levels[3:]):.1f} ms")


class Stopwatch:
    """Adds up the time spent inside a callable, put in its place."""

    def __init__(self, call: Any) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        out = self.call(*args, **kwargs)
        self.seconds += time.perf_counter() - started
        return out


def bookkeeping(arguments: argparse.Namespace) -> None:
    """The share of a step that is neither a forward of the target nor of the draft (its scoring by the LM head included)."""
    engine = eyas.load(draft=arguments.draft, dtype=arguments.dtype)
    target, draft = engine.target, engine.draft
    assert draft is not None
    ids = engine.render([{"role": "user", "content": "Explain how rain forms, and why some clouds bring none."}])
    for method in arguments.methods.split(","):
        for attempt in range(2):  # the first warms up
            watches = Stopwatch(target.model.forward), Stopwatch(draft.head.forward), Stopwatch(target.score)
            target.model.forward, draft.head.forward, target.score = watches  # type: ignore[method-assign]
            result = engine.generate(ids, method=method, max_new_tokens=arguments.new_tokens if attempt else 8)
            target.model.forward, draft.head.forward, target.score = (watch.call for watch in watches)  # type: ignore[method-assign]
        forwards = sum(watch.seconds for watch in watches)
        total = result.stats.seconds
        print(f"{method}: bookkeeping {100 * (1 - forwards / total):.1f} % of {total:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--methods", default="eagle2,eagle1,autoregressive")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    costs(given)
    bookkeeping(given)
