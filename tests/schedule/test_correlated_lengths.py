"""Prompts and outputs that correlate, which estimates assume they do not: random order makes up for most of it."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_schedules import correlated, in_window

from lengthwise.schedule import Controls, Strategy

CORRELATION, COUNT = 0.94, 20_000
RRA = Controls(Strategy.RRA, 40, 20, tp=4, tp_groups=1)


def test_draws_have_the_lengths_of_the_task_and_correlate(summaries):
    mixed, in_a_row = (correlated(summaries, CORRELATION, COUNT, 3, mixed=mixed) for mixed in (True, False))
    for lengths in (mixed, in_a_row):
        assert np.corrcoef(*lengths)[0, 1] == pytest.approx(CORRELATION, abs=0.03)
        assert lengths[0].mean() == pytest.approx(summaries.mean_prompt_tokens, rel=0.02)
        assert lengths[1].mean() == pytest.approx(summaries.mean_output_tokens, rel=0.02)
    assert sorted(zip(*mixed, strict=True)) == sorted(zip(*in_a_row, strict=True))
    neighbors = [np.corrcoef(prompt[:-1], prompt[1:])[0, 1] for prompt, _ in (mixed, in_a_row)]
    assert abs(neighbors[0]) < 0.03
    assert neighbors[1] > 0.9


def test_random_order_is_closer_to_the_estimate_than_similar_requests_in_a_row(opt_estimator, summaries):
    expected = opt_estimator.estimate([RRA])
    errors = {}
    for mixed in (True, False):
        output, duration_s, rate_rps = in_window(
            opt_estimator, RRA, correlated(summaries, CORRELATION, COUNT, 3, mixed=mixed)
        )
        long = output == summaries.output_quantile(0.99)
        assert long.sum() > 10
        errors[mixed] = [expected.throughput_rps[0] / rate_rps - 1, expected.latency_s[0] / duration_s[long].mean() - 1]
    assert max(map(abs, errors[True])) < 0.05
    assert max(map(abs, errors[False])) > 2 * max(map(abs, errors[True]))
