"""What is planned within a bound in the worst case is within it when the event engine plays it, resized or not."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_schedules import in_window, independent

from lengthwise.schedule import Assumptions, Estimator, Strategy, TaskLengths
from lengthwise.schedule.lengths import SIZES, adjusted_batches
from lengthwise.schedule.planner import Planner

COUNT = 30_000
ABOVE_HIGH, ABOVE_BOUND = 0.1, 0.02
RRA, WAA = (Strategy.RRA,), (Strategy.WAA_C, Strategy.WAA_M)
REQUESTED = [
    *(("exegpt-s", bound_s, strategies) for bound_s in (3.13, 14.52) for strategies in (RRA, WAA)),
    *(("exegpt-t", 12.94, RRA), ("exegpt-t", 24.74, RRA), ("exegpt-t", 24.74, WAA)),
]
"""Bottom 10 % and 70 %, and 30 % and 70 %, of FasterTransformer's latencies, where something meets them."""


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [None, 0.05, 0.1])
@pytest.mark.parametrize(("task", "bound_s", "strategies"), REQUESTED)
def test_a_bound_met_in_the_worst_case_is_met_in_simulation(
    task, bound_s, threshold, strategies, opt, four_a40, opt_tables
):
    assumptions = Assumptions(threshold=threshold)
    of = Estimator(TaskLengths.from_preset(task), four_a40, opt, opt_tables, assumptions)
    choice = Planner(of, tuple(opt_tables), strategies).best(bound_s)
    output, duration_s, _ = in_window(of, choice.controls, independent(of.setting.task, COUNT, 3), threshold)
    quantile = of.setting.bound_tokens
    long = duration_s[(output == quantile) | (output == quantile - 1)]
    assert len(long) > 15
    assert np.mean(long > choice.row.latency_high_s) <= ABOVE_HIGH
    assert np.mean(long > bound_s) <= ABOVE_BOUND
    assert np.mean(duration_s > bound_s) < 0.0125  # one in a hundred outputs is longer than what the bound is for


@pytest.mark.parametrize("threshold", [0.05, 0.2])
def test_batches_of_few_prompts_cannot_be_brought_near_their_mean(summaries, threshold):
    found = adjusted_batches(summaries, threshold, 0.99)
    assert found.prompts[0] > 1.1  # a short prompt is joined by another
    np.testing.assert_allclose(found.prompts[SIZES.index(12) :], 1.0, atol=0.02)
    assert found.ranges[0] > 0.5
    assert (np.diff(found.ranges) < 0.02).all()
    assert found.ranges[-1] <= threshold * 1.01


def test_prompts_of_one_length_need_no_resizing():
    found = adjusted_batches(TaskLengths.fixed(256, 32), 0.05, 0.99)
    assert (found.prompts == 1).all()
    assert np.isinf(found.ranges).all()
