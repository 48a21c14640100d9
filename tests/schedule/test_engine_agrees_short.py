"""Estimates of RRA where few of the new requests decode at all, against the event engine: prefill is pipelined."""

from __future__ import annotations

import numpy as np
import pytest
from test_engine_agrees_rra import agree, played

from lengthwise.schedule import Controls, Estimator, Strategy, TaskLengths, explain

STAGES = 4


@pytest.fixture
def short_outputs(opt, four_a40, opt_tables, summaries):
    """An estimator of summaries whose outputs are one token, but for a share that is even up to the longest."""

    def estimator(decoding, longest):
        output_pmf = np.zeros(longest + 1)
        output_pmf[1] = 1 - decoding
        output_pmf[2:] = decoding / max(longest - 1, 1)
        task = TaskLengths(summaries.prompt_pmf, output_pmf)
        return Estimator(task, four_a40, opt, opt_tables)

    return estimator


@pytest.mark.parametrize(("decoding", "longest", "batch"), [(0.1, 4, 4), (0.05, 3, 8), (0.05, 3, 16), (0.2, 4, 4)])
def test_few_of_the_new_requests_decode(short_outputs, opt, four_a40, opt_tables, decoding, longest, batch):
    agree(short_outputs(decoding, longest), Controls(Strategy.RRA, batch, 2), 3, opt, four_a40, opt_tables)


@pytest.mark.parametrize("batch", [2, 4, 16])
def test_none_of_them_decodes(short_outputs, opt, four_a40, opt_tables, batch):
    estimator, controls = short_outputs(0.0, 1), Controls(Strategy.RRA, batch, 1)
    rate_rps, _ = played(controls, 3, estimator.setting.task, opt, four_a40, opt_tables)
    assert estimator.estimate([controls]).throughput_rps[0] == pytest.approx(rate_rps, rel=0.05)


@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (3, 3), (8, STAGES)])
def test_prefill_has_as_many_parts_as_stages_or_requests(short_outputs, batch, parts):
    estimator = short_outputs(0.05, 3)
    estimates = estimator.estimate([Controls(Strategy.RRA, batch, 2)])
    assert estimates.decode_batch[0] < 1
    assert estimates.micro_batches[0] == parts
    timeline = explain(estimator, Controls(Strategy.RRA, batch, 2), 1).timeline
    prefills = [visit for visit in timeline if visit.is_prefill]
    assert len(prefills) == parts * STAGES
