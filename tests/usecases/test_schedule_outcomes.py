"""The reported outcome of a kept schedule: means, quantiles and their intervals, and what engines must hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lengthwise.gateway.config import Phases
from lengthwise.gateway.scheduling import Phase
from lengthwise.gateway.telemetry import Row
from lengthwise.schedule import TaskLengths
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import LatencyBound, ScheduleRow
from lengthwise.usecases.schedule_plan import PlannedRun, phases_of
from lengthwise.usecases.schedule_run import mean, schedule_outcome


def row_of(prefill_batch=3, decode_steps=5):
    """12 requests/s within 0.8 s at B_E and N_D."""
    return ScheduleRow(
        "rra", prefill_batch, decode_steps, 1, 1, 0, 1, throughput_rps=12.0, latency_s=0.8, latency_high_s=0.9,
        cycle_s=0.2, prefill_s=0.05, decode_s=0.03, decode_batch=9.0, memory_share=0.5,
    )  # fmt: skip


def test_an_engine_may_have_what_all_but_one_phase_in_a_hundred_hold():
    """Drawn phases against the bound that the gateway gets."""
    task = TaskLengths.from_samples([10], np.arange(2, 41))
    phases = phases_of(row_of(prefill_batch=10, decode_steps=6), task)
    rng = np.random.default_rng(0)
    present, batches = np.zeros(0, int), []
    for _ in range(4000):
        present = np.concatenate([present, rng.integers(1, 40, 10)])  # decode iterations that are still to come
        batches.append(len(present))
        present = present[present > 6] - 6
    assert phases.max_requests is not None
    above = np.mean(np.array(batches[50:]) > phases.max_requests - 10)
    assert 0.0 < above < 0.025
    assert phases.decode_batch == pytest.approx(np.mean(batches[50:]), rel=0.02)


def finished(number, arrival_s, served_s):
    nan = math.nan
    return Row(
        number, "m", "t", 0, arrival_s, 5, 9, 9.0, "report", nan, (), 9, 0.0, arrival_s, nan, arrival_s + served_s,
        served_s, "w", 0, 0, 0, "finished",
    )  # fmt: skip


def outcome_of(bound_s, served, level=0.9, engines=1):
    planned = PlannedRun(row_of(), Phases(3, 5), LatencyBound(bound_s, 9), level, "current")
    phases = [Phase(f"w{k % engines}", "steps", k * 0.5, k * 0.5 + 0.5 * engines, 3, 30, 9, 5, 6) for k in range(200)]
    rows = [finished(n, n * 100.0 / len(served), served_s) for n, served_s in enumerate(served)]
    return schedule_outcome(planned, phases, rows, engines)


def test_throughput_is_that_of_full_batches():
    seen = {one.name: one for one in outcome_of(5.0, [1.0] * 200).seen}
    assert seen["throughput"].value == pytest.approx(6.0)
    assert seen["throughput"].high - seen["throughput"].low < 1e-6
    both = {one.name: one for one in outcome_of(5.0, [1.0] * 200, engines=2).seen}
    assert both["throughput"].value == pytest.approx(6.0)
    assert both["throughput"].planned == pytest.approx(24.0)


def test_whether_a_bound_was_met_is_reported_with_its_significance():
    served = [0.1 + 0.01 * n for n in np.random.default_rng(1).permutation(200)]
    well, close, broken = (outcome_of(bound_s, served) for bound_s in (5.0, 1.95, 0.5))
    assert (well.satisfied, well.significant) == (True, True)
    assert (close.satisfied, close.significant) == (True, False)
    assert (broken.satisfied, broken.significant) == (False, True)
    assert outcome_of(1.0, []).satisfied is None


def test_the_interval_of_a_quantile_contains_it_as_often_as_stated():
    rng, inside = np.random.default_rng(2), 0
    for _ in range(300):
        latency = outcome_of(math.inf, rng.exponential(1.0, 200).tolist()).seen[-1]
        inside += latency.low <= math.log(10) <= latency.high
    assert 0.92 <= inside / 300 <= 1.0


def test_the_interval_of_a_mean_contains_it_as_often_as_stated():
    rng, inside = np.random.default_rng(3), 0
    for _ in range(400):
        _, low, high = mean(rng.normal(7.0, 2.0, 30))
        inside += low <= 7.0 <= high
    assert 0.92 <= inside / 400 <= 0.99


def test_two_phases_have_a_mean_and_no_interval():
    value, low, high = mean(np.array([1.0, 3.0]))
    assert value == 2.0
    assert math.isnan(low)
    assert math.isnan(high)


def test_phases_that_no_schedule_can_have_are_refused():
    with pytest.raises(InputError, match="longest output"):
        phases_of(row_of(decode_steps=99), TaskLengths.fixed(10, 20))
