"""How sure the numbers of a schedule are: lengths that were counted, costs that may be off."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lengthwise.schedule import (
    Controls,
    Estimator,
    Planner,
    Sample,
    Strategy,
    TaskLengths,
    frontiers,
    spread_over_costs,
    spread_over_resamples,
    with_bands,
)
from lengthwise.schedule.length_drift import evaluate_deployed
from lengthwise.schedule.search_space import row_of
from lengthwise.schema.errors import InputError

CONTROLS = Controls(Strategy.RRA, 40, 13, tp=4, tp_groups=1)


def estimated(estimator, controls=CONTROLS):
    return row_of(controls, estimator.estimate([controls]))


def seen(task, count, seed):
    """So many requests of a task, and an estimator of their lengths."""
    rng = np.random.default_rng(seed)
    pmfs = (task.prompt_pmf, task.output_pmf)
    return Sample(*(rng.choice(len(pmf), count, p=pmf) for pmf in pmfs))


def counted(estimator, sample):
    setting = estimator.setting
    task = TaskLengths.from_samples(sample.prompt_tokens, sample.output_tokens)
    return Estimator(task, setting.cluster, setting.model, setting.tables, setting.assumptions)


def spread_of(estimator, count, seed=0, draws=40, bound_s=math.inf):
    sample = seen(estimator.setting.task, count, seed)
    own = counted(estimator, sample)
    return estimated(own), spread_over_resamples(own, estimated(own), sample, bound_s, draws=draws)


def test_more_requests_leave_less_open(opt_estimator):
    few, many = (spread_of(opt_estimator, count)[1] for count in (100, 1600))
    widths = [spread.throughput_rps[1] - spread.throughput_rps[0] for spread in (few, many)]
    assert widths[0] > 2.5 * widths[1] > 0  # four times, but for chance
    assert (few.requests, many.requests, few.draws) == (100, 1600, 40)


def test_the_interval_contains_the_stated_value(opt_estimator):
    row, spread = spread_of(opt_estimator, 400)
    assert spread.throughput_rps[0] < row.throughput_rps < spread.throughput_rps[1]
    assert spread.latency_s[0] <= row.latency_s <= spread.latency_s[1]


@pytest.mark.slow
def test_the_interval_contains_the_truth_as_often_as_stated(opt_estimator):
    """95 % intervals over 60 samples of 300 requests: between 50 and 60 of them (0.999 of binomials, and bias)."""
    truth, covered = estimated(opt_estimator).throughput_rps, 0
    for seed in range(60):
        _, spread = spread_of(opt_estimator, 300, seed, draws=100)
        covered += spread.throughput_rps[0] <= truth <= spread.throughput_rps[1]
    assert covered >= 50


def test_how_often_a_bound_is_met_increases_with_the_bound(opt_estimator):
    said_s = spread_of(opt_estimator, 200)[0].latency_high_s
    shares = [spread_of(opt_estimator, 200, bound_s=by * said_s)[1].met_share for by in (0.5, 1.0, 1.1, 1.5)]
    assert shares[0] == 0.0 < shares[1] <= shares[2] <= shares[3] == 1.0
    assert shares[1] < 1.0


def test_equal_seeds_give_equal_intervals(opt_estimator):
    assert spread_of(opt_estimator, 200) == spread_of(opt_estimator, 200)


def test_a_side_that_is_known_stays(opt_estimator, summaries):
    """Prompts by formula, outputs listed: only decoding varies."""
    sample = Sample(None, seen(summaries, 200, 1).output_tokens, paired=False)
    rng = np.random.default_rng(0)
    drawn = sample.resampled(summaries, rng)
    assert drawn.prompt_pmf.tolist() == summaries.prompt_pmf.tolist()
    assert drawn.output_pmf.tolist() != summaries.output_pmf.tolist()
    assert sample.requests == 200


def test_pairs_are_drawn_together():
    sample = Sample(np.array([1, 2, 3]), np.array([10, 20, 30]))
    drawn = sample.resampled(TaskLengths.fixed(1, 1), np.random.default_rng(0))
    assert drawn.mean_output_tokens == pytest.approx(10 * drawn.mean_prompt_tokens)


def test_a_sample_is_of_something():
    with pytest.raises(InputError, match="prompts, of outputs, or of both"):
        Sample(None, None, paired=False)
    with pytest.raises(InputError, match="as many prompts as outputs"):
        Sample(np.array([1]), np.array([1, 2]))


def scaled(tables, by):
    """All seconds of all degrees times as much."""
    names = ("layer_s", "comm_s", "embedding_s", "send_s", "head_s", "host_s", "prefill_s", "decode_s")
    return {
        tp: dataclasses.replace(cost, **{name: by * getattr(cost, name) for name in names})
        for tp, cost in tables.items()
    }


def test_costs_that_are_off_move_every_number_in_proportion(opt_estimator, opt_tables):
    row = estimated(opt_estimator)
    factors = np.exp(0.1 * np.linspace(-2, 2, 21))
    spread = spread_over_costs(opt_estimator, row, [scaled(opt_tables, by) for by in factors], 1e9, level=0.9)
    low, high = np.quantile(factors, [0.05, 0.95], method="hazen")
    assert spread.latency_s == pytest.approx((low * row.latency_s, high * row.latency_s), rel=1e-6)
    # of throughput the quantiles are those of the inverse
    low, high = np.quantile(1 / factors, [0.05, 0.95], method="hazen")
    assert spread.throughput_rps == pytest.approx((low * row.throughput_rps, high * row.throughput_rps))
    assert spread.met_share == 1.0


def test_the_share_that_holds_a_bound_is_of_the_draws(opt_estimator, opt_tables):
    row = estimated(opt_estimator)
    off = [scaled(opt_tables, by) for by in (0.8, 0.9, 1.1, 1.2)]
    assert spread_over_costs(opt_estimator, row, off, row.latency_high_s).met_share == 0.5
    with pytest.raises(InputError, match="needs perturbed tables"):
        spread_over_costs(opt_estimator, row, [])


def test_a_frontier_has_a_band_around_it(opt_estimator, opt_tables):
    fronts = frontiers(Planner(opt_estimator, [2], [Strategy.RRA, Strategy.WAA_C]), 4)
    assert with_bands(opt_estimator, fronts, []) == fronts
    made = with_bands(opt_estimator, fronts, [scaled(opt_tables, by) for by in (0.9, 1.1)])
    assert [name for name, _ in made] == [name for name, _ in fronts]
    for _, points in made:
        for point in points:
            low, high = point.band_rps
            assert low < point.row.throughput_rps < high
    point = made[1][1][0]
    setting = opt_estimator.setting
    slower = Estimator(setting.task, setting.cluster, setting.model, scaled(opt_tables, 1.1))
    assert point.band_rps[0] == pytest.approx(evaluate_deployed(slower, point.row, worst_case=True)[0].throughput_rps)
