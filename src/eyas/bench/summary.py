"""From records to figures. Every number of a report is computed here, and only from raw records."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from eyas.bench.methods import BASELINE
from eyas.bench.records import Record

RESAMPLES = 2000


@dataclass(frozen=True)
class Cell:
    """One method on one task at one temperature.

    Attributes:
        n: answers.
        tau: tokens delivered per step, all answers together; None where steps cannot be seen.
        speedup: median over answers of tokens per second over the baseline's for the same prompt.
        low, high: 95 % bootstrap interval of that median.
        tokens_per_second: delivered tokens over wall time, all answers together.
        identical: greedy answers whose tokens all equal the baseline's.
        near_ties: of the others, those that part where rounding alone may tip the target's choice.
    """

    n: int
    tau: float | None
    speedup: float
    low: float
    high: float
    tokens_per_second: float
    identical: int
    near_ties: int


def table(records: Sequence[Record], temperature: float) -> dict[str, dict[str, Cell]]:
    """Cells by task and method at one temperature, both in the order of the records; the task ``mean`` comes last.

    A mean row averages the tasks' medians and τ, as the paper does; its interval is of that mean, resampling within tasks.
    """
    chosen = [record for record in records if record.temperature == temperature]
    tasks = list(dict.fromkeys(record.task for record in chosen))
    methods = list(dict.fromkeys(record.method for record in chosen))
    baseline = {record.key[:4]: record for record in chosen if record.method == BASELINE}
    found: dict[str, dict[str, Cell]] = {task: {} for task in tasks}
    ratios: dict[tuple[str, str], list[float]] = {}
    for task in tasks:
        for method in methods:
            own = [each for each in chosen if (each.task, each.method) == (task, method) and each.key[:4] in baseline]
            if own:
                ratios[task, method] = [each.speed / baseline[each.key[:4]].speed for each in own]
                found[task][method] = cell(own, ratios[task, method], f"{task} {method} {temperature}")
    found["mean"] = {}
    for method in methods:
        cells = [found[task][method] for task in tasks if method in found[task]]
        if len(cells) == len(tasks) and cells:
            found["mean"][method] = mean_cell(cells, [ratios[task, method] for task in tasks], f"{method} {temperature}")
    return found


def cell(own: Sequence[Record], ratios: Sequence[float], seed: str) -> Cell:
    """The figures of one method's answers to one task."""
    low, high = interval([list(ratios)], seed)
    return Cell(
        n=len(own), tau=tau(own), speedup=median(ratios), low=low, high=high,
        tokens_per_second=sum(len(each.tokens) for each in own) / sum(each.seconds for each in own),
        identical=sum(each.divergence is None for each in own),
        near_ties=sum(abs(each.margin) <= (each.tolerance or 0) for each in own if each.margin is not None),
    )  # fmt: skip


def mean_cell(cells: Sequence[Cell], ratios: list[list[float]], seed: str) -> Cell:
    """The mean over tasks."""
    low, high = interval(ratios, seed)
    taus = [each.tau for each in cells if each.tau is not None]
    return Cell(
        n=sum(each.n for each in cells), tau=mean(taus) if len(taus) == len(cells) else None,
        speedup=mean(each.speedup for each in cells), low=low, high=high,
        tokens_per_second=mean(each.tokens_per_second for each in cells),
        identical=sum(each.identical for each in cells), near_ties=sum(each.near_ties for each in cells),
    )  # fmt: skip


def tau(records: Iterable[Record]) -> float | None:
    """Delivered tokens over steps, prefills excluded; None where steps cannot be seen or there were none."""
    steps = tokens = 0
    for record in records:
        if record.delivered is None:
            return None
        steps += len(record.delivered)
        tokens += sum(record.delivered)
    return tokens / steps if steps else None


def interval(groups: list[list[float]], seed: str) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of the groups' medians, resampled within each group."""
    chance = random.Random(seed)
    drawn = sorted(mean(median(chance.choices(group, k=len(group))) for group in groups) for _ in range(RESAMPLES))
    return drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES) - 1]


def acceptance_by_depth(records: Iterable[Record]) -> list[tuple[int, int]]:
    """For depth 1, 2, …: steps that accepted that depth, and steps that had got there and were offered it.

    A step that ended inside its branch was not asked for more, as in `eyas.statistics.Statistics.acceptance`.
    """
    counts: list[list[int]] = []
    for record in records:
        for took, deep, given in zip(record.accepted or (), record.depths or (), record.delivered or (), strict=True):
            for depth in range(1, deep + 1):
                if took >= depth or (took == depth - 1 and given > took):
                    while len(counts) < depth:
                        counts.append([0, 0])
                    counts[depth - 1][0] += took >= depth
                    counts[depth - 1][1] += 1
    return [(accepted, offered) for accepted, offered in counts]


def time_shares(records: Sequence[Record]) -> dict[str, float] | None:
    """Where the time of a method's steps went: shares of draft, verify and rest; None where that cannot be seen."""
    parts = {name: sum(getattr(record, f"{name}_seconds") or 0.0 for record in records) for name in ("draft", "verify", "rest")}
    total = sum(parts.values())
    return {name: value / total for name, value in parts.items()} if total else None
