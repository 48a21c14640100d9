"""Micro-batches that may be empty: what is estimated of them is right at its ends and jumps nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise.schedule import Controls, Estimator, Strategy, TaskLengths
from lengthwise.schedule.kernel import largest_excess, pace_factor, presence


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("each", [1.0, 3.0, 6.0, 100.0])
def test_nothing_jumps_between_no_sequence_and_many(each, isolated):
    seqs = np.arange(0.001, min(each, 12.0), 0.001)
    present, more = np.array([presence(one, each, isolated) for one in seqs.tolist()]).T
    for values in (present, seqs * more):
        assert np.abs(np.diff(values)).max() < 0.003
    if each > 12:
        assert presence(12.0, each, isolated) == (1.0, 1.0)


def test_one_expected_request_is_present_or_absent():
    assert presence(0.25, 1.0, False) == (0.25, 4.0)
    assert presence(0.25, 1.0, True) == (1.0, 4.0)


def test_few_requests_are_present_as_often_as_independent_ones():
    rng = np.random.default_rng(3)
    counts = rng.binomial(20, 0.1, 200_000)
    present, more = presence(2.0, 20.0, False)
    assert present == pytest.approx((counts > 0).mean(), rel=0.01)
    assert 2.0 * more == pytest.approx(counts[counts > 0].mean(), rel=0.01)
    seen = (counts**2).sum() / counts.sum()
    assert 2.0 * presence(2.0, 20.0, True)[1] == pytest.approx(seen, rel=0.01)


def test_latency_does_not_jump_as_batches_grow(opt, four_a40, opt_tables):
    """Each more request to a phase at whose end few are left adds a little; none takes any back."""
    estimator = Estimator(TaskLengths.from_preset("exegpt-t"), four_a40, opt, opt_tables)
    batches = range(8, 160)
    got = estimator.estimate([Controls(Strategy.RRA, b, 150, tp=4, tp_groups=1) for b in batches])
    slopes = np.diff(got.latency_s) / got.latency_s[:-1]
    assert slopes.min() > 0
    assert slopes.max() < 0.02


def test_an_iteration_lasts_as_long_as_the_way_of_its_largest_micro_batch():
    """Four micro-batches on four equal stages, each as long as its sequences and one more, or empty and not there."""
    rng = np.random.default_rng(5)
    for seqs, each in ((0.4, 12.0), (2.0, 12.0), (20.0, 60.0)):
        counts = rng.binomial(int(each), seqs / each, (100_000, 4))
        visits_s = np.where(counts > 0, 1.0 + 0.1 * counts, 0.0)
        drawn_s = np.maximum(visits_s.sum(axis=1), 4 * visits_s.max(axis=1)).mean()
        present, more = presence(seqs, each, False)
        mean_s = 1.0 + 0.1 * seqs * more
        larger = largest_excess(seqs * more, 1.0 - seqs / each, 1.03)  # of four normal ones
        times = pace_factor(present, 4, (mean_s + 0.1 * larger) / mean_s, mean_s, 4 * mean_s)
        assert 4 * mean_s * times == pytest.approx(drawn_s, rel=0.04)


def test_where_one_stage_is_busy_all_the_time_its_own_seconds_count():
    assert pace_factor(1.0, 8, 1.05, 3.0, 8.0) == 1.0
    assert pace_factor(0.5, 8, 1.0, 1.0, 8.0) == pytest.approx(1 - 0.5**8)
    assert pace_factor(1.0, 1, 1.0, 3.0, 8.0) == 1.0
    assert pace_factor(0.0, 4, 1.0, 0.0, 0.0) == 0.0
