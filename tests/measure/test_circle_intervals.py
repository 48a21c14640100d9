"""Intervals of a circle's errors: repeats and blocks of requests, resampled."""

from __future__ import annotations

import _intervals as intervals
import numpy as np
import pytest


def repeats(*errors: float, measured_s: tuple[float, ...] = (1.0, 1.0, 1.0)) -> list:
    """Runs of one draw each: seconds measured, and simulated with an error."""
    return [(np.array([s]), np.array([(1 + error) * s])) for error, s in zip(errors, measured_s, strict=False)]


def test_repeats_are_drawn():
    assert intervals.of_repeats({"a-high": repeats(0.1, 0.1, 0.1)}, 0.1) == pytest.approx((0.1, 0.1))
    assert intervals.of_repeats({"a-high": repeats(0.1, 0.05, 0.3)}, 0.1) == pytest.approx((0.05, 0.3))


def test_a_load_measured_once_has_no_interval():
    assert intervals.of_repeats({"a-high": repeats(0.1)}, 0.1) is None
    assert intervals.of_repeats({}, 1.0) is None


def test_one_simulation_is_as_uncertain_as_the_spread_of_repeats():
    """Each simulated run takes 1 s; the engine took 1, 1.1 and 0.8 s."""
    seconds = (1.0, 1.1, 0.8)
    low, high = intervals.of_repeats({"a-high": repeats(*(1 / s - 1 for s in seconds), measured_s=seconds)}, 0.0)
    assert low == pytest.approx(0.0)
    assert high == pytest.approx(0.25)


def test_blocks_of_requests_widen_the_interval_of_equal_repeats():
    rng = np.random.default_rng(3)
    measured_s = rng.lognormal(0.0, 0.5, 200)
    simulated_s = measured_s * np.exp(0.05 + 0.3 * rng.standard_normal(200))
    runs = [intervals.of_run(measured_s, simulated_s, 0.5, seed) for seed in range(3)]
    value = float(abs(np.median(simulated_s) / np.median(measured_s) - 1))
    low, high = intervals.of_repeats({"a-high": runs}, value)
    assert low <= value <= high
    assert high - low > 0.02
    few = [intervals.of_run(measured_s[:24], simulated_s[:24], 0.5, seed) for seed in range(3)]
    narrow, wide = intervals.of_repeats({"a-high": few}, value)
    assert wide - narrow > high - low


def test_an_unreported_quantile_is_no_draw():
    measured_s = np.array([1.0, np.nan, np.nan, np.nan])
    reported, simulated_s = intervals.of_run(measured_s, np.ones(4), 0.5, 0)
    assert np.isfinite(reported).all()
    assert len(reported) == len(simulated_s) < intervals.DRAWS_OF_A_RUN


def test_of_scores_all_ends_are_taken_together():
    runs = {"one": {"p50": [0.3, 0.1, -0.05, 0.2], "p90": [0.3, -0.2, -0.3, -0.1]}}
    assert intervals.of_scores(runs) == pytest.approx((0.05, 0.25))
    assert intervals.of_scores({}) is None
