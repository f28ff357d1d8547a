"""Counting what decoding did."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.statistics import Statistics
from tests.helpers import properties


def counted(*steps: tuple[int, int, int]) -> Statistics:
    statistics = Statistics()
    for step in steps:
        statistics.step(*step)
    return statistics


def test_tau_is_the_mean_of_delivered_tokens() -> None:
    """The target's own token counts, and the last step counts only what was delivered before the end."""
    assert counted((4, 3, 6), (1, 0, 6), (2, 2, 6)).tau == pytest.approx(7 / 3)
    assert counted((1, 0, 0)).tau == 1


def test_no_step_has_no_tau() -> None:
    """A request that ends at the prefill's token divides by nothing."""
    empty = Statistics(prefill_seconds=0.5)
    assert empty.tau is None and empty.steps == 0 and empty.acceptance == []
    assert empty.tokens_per_second == 2.0
    assert Statistics().tokens_per_second == 0.0


def test_acceptance_is_conditional_on_getting_there() -> None:
    """Depth d is judged only in steps that accepted depth d − 1 and had a tree so deep."""
    statistics = counted((3, 2, 3), (1, 0, 3), (2, 1, 3), (4, 3, 3))
    assert statistics.acceptance == [3 / 4, 2 / 3, 1 / 2]
    shallow = counted((3, 2, 2), (4, 3, 3))  # the first step's tree ended at depth 2: no word on depth 3
    assert shallow.acceptance == [1.0, 1.0, 1.0]
    assert counted((1, 0, 3)).acceptance == [0.0, None, None]
    assert counted((1, 0, 0)).acceptance == []


def test_a_step_cut_inside_its_branch_says_nothing_of_the_next_depth() -> None:
    """The text ended with an accepted token: what the draft proposed after it was not refused."""
    assert counted((2, 2, 3)).acceptance == [1.0, 1.0, None]
    assert counted((2, 2, 3), (3, 2, 3)).acceptance == [1.0, 1.0, 0.0]
    assert counted((1, 1, 1)).acceptance == [1.0]


@properties
@given(
    st.lists(
        st.integers(0, 5).flatmap(
            lambda depth: st.integers(0, depth).flatmap(
                lambda accepted: st.tuples(st.integers(max(accepted, 1), accepted + 1), st.just(accepted), st.just(depth))
            )
        ),
        max_size=12,
    )
)
def test_sums_add_up(steps: list[tuple[int, int, int]]) -> None:
    """Accepted and own tokens make up the delivered ones; rates are shares."""
    statistics = counted(*steps)
    assert statistics.steps == len(steps) == len(statistics.accepted) == len(statistics.depths)
    assert sum(statistics.delivered) == sum(delivered for delivered, _, _ in steps)
    own = sum(delivered - accepted for delivered, accepted, _ in steps)
    assert sum(statistics.delivered) == sum(statistics.accepted) + own
    if steps:
        assert statistics.tau == sum(statistics.delivered) / len(steps)
    assert len(statistics.acceptance) == max((depth for _, _, depth in steps), default=0)
    assert all(rate is None or 0 <= rate <= 1 for rate in statistics.acceptance)
    for depth, rate in enumerate(statistics.acceptance, start=1):
        got = sum(accepted >= depth for _, accepted, _ in steps)
        assert (got > 0) == bool(rate)


def test_seconds_add_up() -> None:
    """Tokens per second are the delivered ones, the prefill's one included, over everything."""
    statistics = counted((4, 3, 6), (3, 2, 6))
    statistics.prefill_seconds = 1.0
    statistics.spend(draft=0.25, verify=0.5, rest=0.25)
    statistics.spend(draft=0.5, verify=1.0, rest=0.5)
    assert (statistics.draft_seconds, statistics.verify_seconds, statistics.rest_seconds) == (0.75, 1.5, 0.75)
    assert statistics.decode_seconds == 3.0 and statistics.seconds == 4.0
    assert statistics.tokens_per_second == 8 / 4


def test_as_dict_is_json_and_agrees() -> None:
    """The command line prints it."""
    statistics = counted((4, 3, 4), (1, 0, 4))
    statistics.prefill_seconds = 0.5
    read = json.loads(json.dumps(statistics.as_dict()))
    assert read["tau"] == 2.5 and read["steps"] == 2 and read["accepted"] == [3, 0]
    assert read["acceptance_by_depth"] == [0.5, 1.0, 1.0, 0.0]
    assert read["tokens_per_second"] == pytest.approx(12.0) and read["seconds"] == 0.5


def test_requests_do_not_share_counts() -> None:
    """A mutable default would add up over requests."""
    counted((4, 3, 6))
    assert Statistics().delivered == [] == Statistics().accepted
