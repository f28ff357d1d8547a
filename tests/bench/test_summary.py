"""Numbers add up: every figure of a table is recomputed from raw records another way."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.bench.compare import compare
from eyas.bench.methods import BASELINE
from eyas.bench.records import Record, Run
from eyas.bench.summary import acceptance_by_depth, interval, table, tau, time_shares
from eyas.errors import EyasError

NEAR = {"divergence": 2, "margin": -0.01, "tolerance": 0.1}


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Answers by a baseline and two methods, one of them with steps, to a few questions of two tasks at two temperatures."""
    found = []
    for temperature in (0.0, 1.0):
        for task in ("a", "b"):
            for number in range(draw(st.integers(1, 4))):
                for method in (BASELINE, "eagle2", "other"):
                    delivered = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
                    taken = [count - draw(st.integers(0, 1)) for count in delivered]
                    seen = {"delivered": delivered, "accepted": taken, "depths": [4 if method == "eagle2" else 0] * len(taken)}
                    if method == BASELINE:
                        seen = {
                            "delivered": [1] * sum(delivered),
                            "accepted": [0] * sum(delivered),
                            "depths": [0] * sum(delivered),
                        }
                    more = {} if method == "other" else seen
                    times = {"draft_seconds": 1.0, "verify_seconds": 2.0, "rest_seconds": 1.0}
                    parted = draw(st.sampled_from([{}, {"divergence": 2}, NEAR]))
                    tokens, seconds = list(range(1 + sum(delivered))), draw(st.floats(0.1, 9))
                    place = (task, str(number), 0, temperature, method)
                    found.append(Record(*place, 5, tokens, seconds, **more, **times, **parted))  # type: ignore[arg-type]
    return found


@settings(max_examples=6, deadline=None)
@given(records())
def test_a_table_follows_from_its_records(found: list[Record]) -> None:
    for temperature in (0.0, 1.0):
        cells = table(found, temperature)
        assert list(cells) == ["a", "b", "mean"]
        for task in ("a", "b"):
            for method in (BASELINE, "eagle2", "other"):
                own = [r for r in found if (r.task, r.method, r.temperature) == (task, method, temperature)]
                base = {r.id: r for r in found if (r.task, r.method, r.temperature) == (task, BASELINE, temperature)}
                cell = cells[task][method]
                assert cell.n == len(own)
                ratios = [len(r.tokens) / r.seconds / (len(base[r.id].tokens) / base[r.id].seconds) for r in own]
                assert cell.speedup == pytest.approx(median(ratios))
                assert min(ratios) - 1e-9 <= cell.low <= cell.high <= max(ratios) + 1e-9
                assert cell.tokens_per_second == pytest.approx(sum(len(r.tokens) for r in own) / sum(r.seconds for r in own))
                assert cell.identical == sum(r.divergence is None for r in own)
                assert cell.near_ties == sum(r.margin is not None for r in own)
                if method == "other":
                    assert cell.tau is None
                else:
                    tokens = sum(len(r.tokens) - 1 for r in own)  # the prefill's token has no step
                    assert cell.tau == pytest.approx(tokens / sum(len(r.delivered or ()) for r in own))
        for method, cell in cells["mean"].items():
            assert cell.speedup == pytest.approx((cells["a"][method].speedup + cells["b"][method].speedup) / 2)
            if method != "other":
                assert cell.tau == pytest.approx(((cells["a"][method].tau or 0) + (cells["b"][method].tau or 0)) / 2)
            assert cell.n == cells["a"][method].n + cells["b"][method].n
        assert cells["mean"][BASELINE].speedup == 1.0


@given(records())
def test_acceptance_counts_sum_to_the_accepted_tokens(found: list[Record]) -> None:
    eagle = [record for record in found if record.method == "eagle2"]
    counts = acceptance_by_depth(eagle)
    assert sum(accepted for accepted, _ in counts) == sum(min(t, 4) for r in eagle for t in r.accepted or ())
    assert all(accepted <= offered for accepted, offered in counts)
    assert [offered for _, offered in counts] == sorted((offered for _, offered in counts), reverse=True)


def test_a_step_that_ended_inside_its_branch_was_not_asked_for_more() -> None:
    ended = Record("a", "0", 0, 0.0, "eagle2", 1, [1, 2, 3], 1.0, delivered=[2], accepted=[2], depths=[4])
    refused = Record("a", "0", 0, 0.0, "eagle2", 1, [1, 2, 3, 4], 1.0, delivered=[3], accepted=[2], depths=[4])
    assert acceptance_by_depth([ended]) == [(1, 1), (1, 1)]
    assert acceptance_by_depth([refused]) == [(1, 1), (1, 1), (0, 1)]


def test_shares_tau_and_intervals() -> None:
    one = Record("a", "0", 0, 0.0, "m", 1, [1], 1.0, delivered=[3, 1], draft_seconds=1.0, verify_seconds=2.0, rest_seconds=1.0)
    assert time_shares([one]) == {"draft": 0.25, "verify": 0.5, "rest": 0.25} and time_shares([]) is None
    assert tau([one]) == 2.0 and tau([]) is None
    low, high = interval([[1.0] * 9 + [5.0]], "x")
    assert low == high == 1.0
    chance = random.Random(0)
    values = [chance.gauss(2, 0.5) for _ in range(60)]
    low, high = interval([values], "x")
    assert low < median(values) < high and high - low < 0.6


def run(speeds: dict[str, float], tokens: int = 10) -> Run:
    chance = random.Random(1)
    found = []
    for number in range(30):
        for method, speed in speeds.items():
            jitter = 1 + 0.1 * chance.random()
            found.append(Record("a", str(number), 0, 0.0, method, 1, list(range(tokens)), tokens / (speed * jitter)))
    return Run({}, {}, found)


def test_compare_tells_a_difference_from_noise() -> None:
    before, after = run({BASELINE: 10, "x": 15, "y": 15}), run({BASELINE: 10, "x": 18, "y": 15})
    better, same = compare(before, after)
    assert better.startswith("x, ") and ": better (n=30" in better and "no difference beyond noise" in same
    assert ": worse (" in compare(after, before)[0]
    with pytest.raises(EyasError, match="in common"):
        compare(before, Run({}, {}, []))
    with pytest.raises(EyasError, match="no method besides autoregressive in common"):
        compare(before, run({BASELINE: 10, "z": 12}))
