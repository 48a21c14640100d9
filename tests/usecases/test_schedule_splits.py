"""The reported outcome of a split schedule: requests that ended, those in flight, and latencies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lengthwise.gateway.telemetry import Row
from lengthwise.schema.schedule import LatencyBound, ScheduleRow
from lengthwise.usecases.schedule_plan import PlannedRun
from lengthwise.usecases.schedule_run import split_in_flight, split_outcome, split_requests

SPLIT = ScheduleRow(
    "waa-c", 3, 1, 1, 1, 0, 1, throughput_rps=4.0, latency_s=2.0, latency_high_s=2.5, cycle_s=0.2, prefill_s=0.05,
    decode_s=0.03, decode_batch=8.5, memory_share=0.5,
)  # fmt: skip


def row(number, arrival_s, served_s, outcome="finished"):
    nan = math.nan
    return Row(
        number, "m", "t", 0, arrival_s, 5, 9, 9.0, "report", nan, (), 9, 0.0, arrival_s, nan, arrival_s + served_s,
        served_s, "w", 0, 0, 0, outcome,
    )  # fmt: skip


def outcome_of(rows, bound_s=5.0, level=0.9, routers=1):
    return split_outcome(PlannedRun(SPLIT, None, LatencyBound(bound_s, 9), level, "current"), rows, routers)


def test_a_decode_batch_and_two_prefills_are_under_way():
    assert split_in_flight(SPLIT) == 9 + 2 * 3


def test_enough_are_played_to_fill_a_large_plan_several_times():
    large = replace(SPLIT, prefill_batch=224, decode_batch=18.7)
    assert split_requests(SPLIT) == 1000
    assert split_requests(large) >= 4 * split_in_flight(large)
    assert split_requests(large, 2) == 2 * split_requests(large)


def test_even_arrivals_end_at_their_rate_and_obey_littles_law():
    """Four a second that take 2 s each: eight are there."""
    reported = outcome_of([row(n, n / 4, 2.0) for n in range(800)])
    seen = {one.name: one for one in reported.seen}
    assert seen["throughput"].planned == 4.0
    assert seen["throughput"].value == pytest.approx(4.0, rel=0.02)
    assert seen["requests in flight"].value == pytest.approx(8.0, rel=0.02)
    assert seen["latency of 9 tokens"].value == 2.0
    assert (reported.satisfied, reported.significant, reported.phases) == (True, True, 0)


def test_the_start_and_what_failed_do_not_count():
    slow = [row(n, n / 4, 9.0) for n in range(100)]
    rest = [row(n, n / 4, 1.0, "finished" if n % 2 else "failed") for n in range(100, 800)]
    seen = {one.name: one for one in outcome_of([*slow, *rest], level=0.99).seen}
    assert seen["latency of 9 tokens"].value == 1.0
    assert seen["throughput"].value == pytest.approx(2.0, rel=0.05)


def test_routers_add_up_in_the_plan_and_a_bound_may_break():
    reported = outcome_of([row(n, n / 4, 2.0) for n in range(800)], bound_s=1.5, routers=2)
    assert {one.name: one.planned for one in reported.seen}["throughput"] == 8.0
    assert (reported.satisfied, reported.significant) == (False, True)


def test_too_few_requests_have_no_interval_and_none_no_verdict():
    few = {one.name: one for one in outcome_of([row(n, n / 4, 0.1) for n in range(20)]).seen}
    assert math.isnan(few["throughput"].low)
    assert few["throughput"].value > 0
    assert outcome_of([]).satisfied is None
