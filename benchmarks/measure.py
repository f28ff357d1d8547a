"""Measure τ and speedup on questions, methods interleaved in one process; raw records as JSON lines, resumable.

    python benchmarks/measure.py TASKS_DIR OUT.jsonl [--new-tokens 128] [--per-task 40] [--methods autoregressive,60/6/10]
    python benchmarks/measure.py --report OUT.jsonl
    python benchmarks/measure.py --costs
    python benchmarks/measure.py --bookkeeping

A method is ``autoregressive``, ``generate`` (transformers', dynamic cache), ``generate-static`` (its static cache), ``eagle1``,
``chain``, or an EAGLE-2 tree as tokens/depth/width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import eyas
from eyas.drafters.eagle import EagleDrafter
from eyas.tree import DraftTree, DynamicTree

BASELINE = "autoregressive"


def one(engine: eyas.Engine, ids: list[int], method: str, new_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """Decode one prompt once; wall time around the call."""
    started = time.perf_counter()
    if method.startswith("generate"):
        prompt = torch.tensor([ids])
        static = {"cache_implementation": "static"} if method.endswith("static") else {}
        out = engine.target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            disable_compile=True,
            **static,
        )
        seconds, tokens = time.perf_counter() - started, out[0, len(ids) :].tolist()
        return {"seconds": seconds, "tokens": tokens}
    if "/" in method:
        sizes = dict(zip(("tokens", "depth", "width"), map(int, method.split("/")), strict=True))
        result = engine.generate(ids, max_new_tokens=new_tokens, method="eagle2", **sizes, **options)
    else:
        result = engine.generate(ids, max_new_tokens=new_tokens, method=method, **options)
    seconds = time.perf_counter() - started
    stats = {**result.stats.as_dict(), "delivered": result.stats.delivered}
    return {"seconds": seconds, "tokens": result.token_ids, "stats": stats}


def measure(arguments: argparse.Namespace) -> None:
    """Run what the output file does not hold yet, question by question across the tasks."""
    engine = eyas.load(draft=arguments.draft, dtype=arguments.dtype)
    methods, out = arguments.methods.split(","), Path(arguments.out)
    done = {(row["task"], row["id"]) for row in map(json.loads, out.read_text().splitlines())} if out.exists() else set()
    tasks = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in sorted(Path(arguments.tasks).glob("*.jsonl"))}
    options = {"temperature": arguments.temperature, "seed": 0} if arguments.temperature else {}
    warm = engine.render([{"role": "user", "content": "Hello"}])
    for method in methods:
        one(engine, warm, method, 16, options)
    for number in range(arguments.per_task):
        for task, lines in tasks.items():
            question = json.loads(lines[number])
            if (task, question["id"]) in done:
                continue
            ids = engine.render([{"role": "user", "content": question["turns"][0]}])
            shift = number % len(methods)  # no method is always first
            runs = {
                method: one(engine, ids, method, arguments.new_tokens, options) for method in methods[shift:] + methods[:shift]
            }
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"task": task, "id": question["id"], "prompt_tokens": len(ids), "runs": runs}) + "\n")
            print(number, task, {name: f"{run['seconds']:.1f}s" for name, run in runs.items()}, file=sys.stderr, flush=True)


def report(path: Path) -> None:
    """A Markdown table: by task and method τ and speedup (ratio of tokens per second), and where steps' time goes."""
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        by_task[row["task"]].append(row["runs"])
    methods = list(next(iter(by_task.values()))[0])
    methods = [BASELINE, *(method for method in methods if method != BASELINE)]
    print("| task | n | " + " | ".join(f"{method} τ | speedup | same ids" for method in methods[1:]) + " |")
    print("|---|---|" + "---|---|---|" * (len(methods) - 1))
    means: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for task, runs in by_task.items():
        cells = []
        for method in methods[1:]:
            stats = [run[method].get("stats") for run in runs]
            tau = (
                sum(sum(stat["delivered"]) for stat in stats) / max(1, sum(stat["steps"] for stat in stats))
                if stats[0]
                else 1.0
            )
            speedups = [
                (len(run[method]["tokens"]) / run[method]["seconds"])
                / (len(run[BASELINE]["tokens"]) / run[BASELINE]["seconds"])
                for run in runs
            ]
            same = sum(run[method]["tokens"] == run[BASELINE]["tokens"] for run in runs)
            means[method].append((tau, statistics.median(speedups)))
            cells.append(f"{tau:.2f} | {statistics.median(speedups):.2f} | {same}/{len(runs)}")
        print(f"| {task} | {len(runs)} | " + " | ".join(cells) + " |")
    mean = [
        f"{statistics.mean(t for t, _ in pairs):.2f} | {statistics.mean(s for _, s in pairs):.2f} | "
        for pairs in means.values()
    ]
    print("| **mean** | | " + " | ".join(mean) + " |")
    rows = [run for runs in by_task.values() for run in runs]
    for method in methods:
        stats = [run[method]["stats"] for run in rows if "stats" in run[method]]
        speed = sum(len(run[method]["tokens"]) for run in rows) / sum(run[method]["seconds"] for run in rows)
        line = f"{method}: {speed:.1f} tokens/s"
        if stats:
            parts = {name: sum(stat[f"{name}_seconds"] for stat in stats) for name in ("draft", "verify", "rest")}
            steps = sum(parts.values())
            line += ", of a step " + ", ".join(f"{name} {100 * value / steps:.1f} %" for name, value in parts.items())
        print(line)


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
            run = one(engine, ids, method, arguments.new_tokens if attempt else 8, {})
            target.model.forward, draft.head.forward, target.score = (watch.call for watch in watches)  # type: ignore[method-assign]
        forwards = sum(watch.seconds for watch in watches)
        total = run["stats"]["seconds"]
        print(f"{method}: bookkeeping {100 * (1 - forwards / total):.1f} % of {total:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="?")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--per-task", type=int, default=40)
    parser.add_argument("--methods", default="autoregressive,60/6/10")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--bookkeeping", action="store_true")
    given = parser.parse_args()
    if given.report:
        report(given.report)
    elif given.costs:
        costs(given)
    elif given.bookkeeping:
        bookkeeping(given)
    else:
        measure(given)
