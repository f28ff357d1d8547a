"""The share of a step that is neither a forward of the target nor of the draft. (What those cost: eyas inspect --costs.)

python benchmarks/bookkeeping.py [--draft DRAFT] [--dtype DTYPE] [--methods eagle2,autoregressive] [--new-tokens 128]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import eyas


class Stopwatch:
    """Adds up the time spent inside a callable, put in its place."""

    def __init__(self, call: Any) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        out = self.call(*args, **kwargs)
        self.seconds += time.perf_counter() - started
        return out


def bookkeeping(engine: eyas.Engine, methods: list[str], new_tokens: int) -> None:
    """The share of a step that is neither a forward of the target nor of the draft (its scoring by the LM head included)."""
    target, draft = engine.target, engine.draft
    assert draft is not None
    ids = engine.render([{"role": "user", "content": "Explain how rain forms, and why some clouds bring none."}])
    for method in methods:
        for attempt in range(2):  # the first warms up
            watches = Stopwatch(target.model.forward), Stopwatch(draft.head.forward), Stopwatch(draft.read.forward)
            target.model.forward, draft.head.forward, draft.read.forward = watches  # type: ignore[method-assign]
            result = engine.generate(ids, method=method, max_new_tokens=new_tokens if attempt else 8)
            target.model.forward, draft.head.forward, draft.read.forward = (watch.call for watch in watches)  # type: ignore[method-assign]
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
    loaded = eyas.load(draft=given.draft, dtype=given.dtype)
    bookkeeping(loaded, given.methods.split(","), given.new_tokens)
