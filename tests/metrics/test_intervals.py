"""Coverage: do 95 % intervals hold the truth in about 95 % of runs?"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import norm, t, ttest_1samp

from lengthwise.metrics.distribution import column_distribution
from lengthwise.statistics import batch_half_width, mean_estimate, t_quantile

RUNS = 200


def ar1(seed: int, n: int, phi: float) -> np.ndarray:
    """Stationary, mean 0, variance 1."""
    noise = np.random.default_rng(seed).normal(size=n + 200)
    return lfilter([1], [1, -phi], noise)[200:] * np.sqrt(1 - phi**2)


def mm1(seed: int, n: int, load: float) -> np.ndarray:
    """Waiting times of an M/M/1 queue with mean service 1 (Lindley), the first tenth left out."""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(rng.exponential(1.0, n) * load - rng.exponential(1.0, n))
    return ((walk - np.minimum.accumulate(np.minimum(walk, 0))) / load)[n // 10 :]


def coverage(runs, truth: dict[str, float]) -> dict[str, float]:
    made = [column_distribution(run, 0.95) for run in runs]
    hits = {name: [e.low <= v <= e.high for e in (getattr(d, name) for d in made)] for name, v in truth.items()}
    return {name: float(np.mean(h)) for name, h in hits.items()}


def test_coverage_on_correlated_normal_values() -> None:
    truth = {"mean": 0.0, "sd": 1.0, "p50": 0.0, "p90": norm.ppf(0.9), "p99": norm.ppf(0.99)}
    got = coverage((ar1(seed, 8000, 0.8) for seed in range(RUNS)), truth)
    assert all(0.90 <= share <= 0.99 for share in got.values()), got


def test_coverage_on_an_mm1_queue() -> None:
    load = 0.7
    truth = {"mean": load / (1 - load), "p90": np.log(load / 0.1) / (1 - load)}
    got = coverage((mm1(seed, 20_000, load) for seed in range(RUNS)), truth)
    assert all(0.89 <= share <= 0.99 for share in got.values()), got


def test_neighbours_that_move_together_widen_the_interval() -> None:
    trend = np.linspace(0, 1, 10)[:, None]
    mixed = trend[np.array([0, 9, 1, 8, 2, 7, 3, 6, 4, 5])]
    center = trend.mean(axis=0)
    plain = t_quantile(0.95, 9) * trend.std(ddof=1) / np.sqrt(10)
    assert batch_half_width(mixed, center, 0.95) == pytest.approx(plain)
    assert batch_half_width(trend, center, 0.95) > 1.5 * plain


def test_biased_batches_widen_the_interval_and_do_not_move_it() -> None:
    batches = np.random.default_rng(0).normal(size=(10, 1))
    inside = batch_half_width(batches, batches.mean(axis=0), 0.95)
    assert batch_half_width(batches, batches.mean(axis=0) + 3, 0.95) > 2 * inside


def test_mean_estimate_has_students_interval() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0])
    found = mean_estimate(values, 0.9)
    low, high = ttest_1samp(values, 0).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert not mean_estimate(values[:1], 0.9).has_interval


@pytest.mark.parametrize(("level", "degrees"), [(0.95, 9), (0.9, 1), (0.99, 30)])
def test_t_quantiles(level, degrees) -> None:
    assert t_quantile(level, degrees) == pytest.approx(t.ppf(0.5 + level / 2, degrees))


@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("degrees", [1, 2, 11, 40, 41, 1000])
def test_quantiles_of_students_t_are_those_of_scipy(level, degrees):
    assert t_quantile(level, degrees) == pytest.approx(t.ppf(0.5 + level / 2, degrees), rel=1e-9)
