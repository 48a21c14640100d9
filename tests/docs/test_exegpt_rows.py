"""What the benchmark of schedules works out itself: FasterTransformer's batches, places in a phase, kinds of them."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from documents import ROOT


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_longest_of_a_batch_is_what_draws_give(benchmark):
    pmf = np.array([0.0, 0.5, 0.3, 0.15, 0.05])
    expected = benchmark("_exegpt_scenarios").expected_longest(pmf, np.array([1, 2, 8]))
    assert expected[0] == pytest.approx(pmf @ np.arange(5))
    drawn = np.random.default_rng(1).choice(5, p=pmf, size=(200_000, 8))
    assert expected[1] == pytest.approx(drawn[:, :2].max(axis=1).mean(), abs=0.01)
    assert expected[2] == pytest.approx(drawn.max(axis=1).mean(), abs=0.01)


def test_a_batch_ends_sooner_than_the_tasks_longest_output_and_padding_costs(benchmark):
    scenarios = benchmark("_exegpt_scenarios")
    of = scenarios.estimator(scenarios.OPT, "s")
    ft = scenarios.faster_transformer(of)
    static = ft.static
    assert (ft.rps > static.batch / static.latency_s).all()
    assert (ft.padded_s >= -1e-9).all()
    assert ft.padded_s[-1] > 0
    bounds_s = ft.bounds_s()
    assert list(bounds_s) == sorted(bounds_s)
    for bound_s in bounds_s:
        rps, row = ft.best(bound_s)
        assert row.latency_s <= bound_s
        assert 0 < ft.padded_rps(bound_s) < rps


def test_a_times_place_counts_from_the_last_encoding(benchmark):
    over = benchmark("_exegpt_variance").over_its_place
    encodes = np.array([False, True, False, False, True, False, False, False])
    duration_s = np.array([9.0, 5.0, 2.0, 1.0, 5.0, 4.0, 3.0, 7.0])
    assert over(duration_s, encodes).tolist() == pytest.approx([2 / 3, 1 / 2, 4 / 3, 3 / 2, 1.0])


def test_schedules_are_told_apart_by_who_is_there_at_the_end_of_a_phase(benchmark):
    engine, scenarios = benchmark("_exegpt_engine"), benchmark("_exegpt_scenarios")
    from lengthwise.schedule import Controls, Strategy

    of = scenarios.estimator(scenarios.OPT, "s")
    few, many = Controls(Strategy.RRA, 2, 10), Controls(Strategy.RRA, 200, 10)
    long = Controls(Strategy.RRA, 200, 80)
    apart = Controls(Strategy.WAA_C, 10, tp=2, tp_groups=2), Controls(Strategy.WAA_M, 2)
    kinds = [engine.kind(of, one, of.estimate([one])) for one in (few, long, many, *apart)]
    assert kinds == list(engine.KINDS)


def test_errors_are_told_by_strategy_and_kind(benchmark):
    engine = benchmark("_exegpt_engine")
    rows = [
        {"strategy": "rra", "kind": engine.PHASES[2], "rps_error": -0.02, "latency_error": 0.01},
        {"strategy": "waa-c", "kind": engine.APART[0], "rps_error": 0.01, "latency_error": -0.08},
    ]
    told = engine.error(rows)
    assert told["schedules"] == 2
    assert told["beyond_5_percent"] == 1
    assert set(told["by_strategy"]) == {"rra", "waa-c"}
    assert told["by_strategy"]["waa-c"]["latency_p95"] == pytest.approx(0.08)
    assert told["by_kind"][engine.PHASES[2]]["throughput_p95"] == pytest.approx(0.02)
    assert told["worst"][0]["strategy"] == "waa-c"


def test_shares_of_points_are_told_by_strategy(benchmark):
    search = benchmark("_exegpt_search")
    choices = [
        {"model": "m", "task": task, "bound": "none", "by_strategy": {"rra": {"points": 100, "evaluated": seen}}}
        for task, seen in (("s", 2), ("t", 5))
    ]
    choices[0]["by_strategy"]["waa-c"] = {"points": 10, "evaluated": 4}
    choices[1]["by_strategy"]["waa-c"] = {"points": 0, "evaluated": 0}
    told = search.shares_of(choices)
    assert {name: one["value"] for name, one in told.items()} == {"rra": 0.05, "waa-c": 0.4}
    assert told["rra"]["of"] == "m, t, bound none"
    assert told["waa-c"]["choices_made"] == 1


def test_gains_leave_out_where_nothing_meets_the_bound(benchmark):
    figures = benchmark("_exegpt_figures")
    assert figures.gains([{"gain": 2.0}, {"gain": 0.0}, {"gain": 3.0}]) == [2.0, 3.0]


def test_an_interval_over_scenarios_is_students_over_their_means(benchmark):
    from scipy.stats import t

    interval = benchmark("_exegpt_systems").interval
    scenarios = [[1.0, 3.0], [2.0, 4.0], [4.0, 6.0]]
    means = np.array([2.0, 3.0, 5.0])
    half = t.ppf(0.975, 2) * means.std(ddof=1) / np.sqrt(3)
    assert interval(scenarios) == pytest.approx((means.mean() - half, means.mean() + half))
    assert interval(scenarios[:1]) is None
    low, high = interval([[1.0, 1.0, 1.0, 1.0], [3.0]])  # the mean is of ratios, of which one scenario has most
    assert (low + high) / 2 == pytest.approx(7 / 5)
