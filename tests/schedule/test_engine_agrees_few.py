"""Estimates of RRA where micro-batches run empty, against the event engine: few requests, phases as long as outputs."""

from __future__ import annotations

import pytest
from test_engine_agrees_rra import agree

from lengthwise.schedule import Controls, Strategy


@pytest.mark.parametrize(("batch", "steps", "groups"), [(1, 60, 1), (2, 75, 1), (5, 70, 1), (8, 40, 1), (4, 72, 0)])
def test_few_requests_that_all_end_within_a_phase(opt_estimator, opt, four_a40, opt_tables, batch, steps, groups):
    controls = Controls(Strategy.RRA, batch, steps, tp=4 if groups else 1, tp_groups=groups)
    stages_of_one_request = 0.1  # who shares a pipeline with him is met more often than in the mean
    within = 0.05 if groups else stages_of_one_request
    agree(opt_estimator, controls, 7, opt, four_a40, opt_tables, within=within)
