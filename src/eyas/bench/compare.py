"""Two runs side by side: what got better beyond noise."""

from __future__ import annotations

import random
from statistics import mean, median

from eyas.bench.methods import BASELINE
from eyas.bench.records import Record, Run
from eyas.bench.summary import RESAMPLES, tau
from eyas.errors import EyasError


def compare(before: Run, after: Run) -> list[str]:
    """A line for each method and temperature that both runs have, on the answers that both have.

    The speedup's difference is judged by a bootstrap over the questions, paired: "better" or "worse" only where the 95 %
    interval of the difference of medians leaves zero out.

    Raises:
        EyasError: they have nothing in common.
    """
    lines = []
    old, new = ({record.key: record for record in run.records} for run in (before, after))
    shared = [key for key in old if key in new]
    if not shared:
        raise EyasError("the runs have no question, temperature and method in common; compare runs of the same tasks")
    for temperature in dict.fromkeys(key[3] for key in shared):
        for method in dict.fromkeys(key[4] for key in shared if key[3] == temperature):
            keys = [key for key in shared if key[3:] == (temperature, method)]
            pairs = [
                (ratio(old, key), ratio(new, key))
                for key in keys
                if (*key[:4], BASELINE) in old and (*key[:4], BASELINE) in new
            ]
            if method != BASELINE and pairs:
                lines.append(_line(method, temperature, pairs, [old[key] for key in keys], [new[key] for key in keys]))
    if not lines:
        raise EyasError(f"the runs have no method besides {BASELINE} in common; compare runs of the same methods")
    return lines


def ratio(records: dict[tuple[str, str, int, float, str], Record], key: tuple[str, str, int, float, str]) -> float:
    """A record's speedup over the baseline's answer to the same question in the same run."""
    return records[key].speed / records[(*key[:4], BASELINE)].speed


def _line(method: str, temperature: float, pairs: list[tuple[float, float]], old: list[Record], new: list[Record]) -> str:
    chance = random.Random(f"{method} {temperature}")
    drawn = []
    for _ in range(RESAMPLES):
        sample = chance.choices(pairs, k=len(pairs))
        drawn.append(median(b for _, b in sample) - median(a for a, _ in sample))
    drawn.sort()
    low, high = drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES) - 1]
    verdict = "better" if low > 0 else "worse" if high < 0 else "no difference beyond noise"
    speeds = f"speedup {median(a for a, _ in pairs):.2f} → {median(b for _, b in pairs):.2f} ({low:+.2f} to {high:+.2f})"
    taus = tau(old), tau(new)
    accepted = f", τ {taus[0]:.2f} → {taus[1]:.2f}" if None not in taus else ""
    same = mean(a.tokens == b.tokens for a, b in zip(old, new, strict=True))
    where = f"n={len(pairs)}, {100 * same:.0f} % the same tokens"
    return f"{method}, temperature {temperature:g}: {speeds}{accepted}: {verdict} ({where})"
