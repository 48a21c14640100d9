from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lengthwise.schema.workload import Workload
from lengthwise.workload import AllAtOnce, ClosedLoop, Fixed, Gamma, Joint, LogNormal, describe, generate

lengths = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=60)


@given(lengths)
def test_numbers_are_those_of_numpy_and_scipy(pairs):
    prompt, output = (np.array(side) for side in zip(*pairs, strict=True))
    got = describe(Workload(np.arange(len(pairs)) * 0.5, prompt, output))
    assert got.requests == len(pairs)
    assert got.total_tokens == prompt.sum() + output.sum()
    assert got.pd_ratio == pytest.approx(prompt.sum() / output.sum())
    assert got.pd_ratio_median == pytest.approx(np.median(prompt / output))
    for summary, tokens in ((got.prompt, prompt), (got.output, output)):
        assert (summary.mean, summary.sd) == pytest.approx((tokens.mean(), tokens.std()))
        assert (summary.min, summary.max, summary.total) == (tokens.min(), tokens.max(), tokens.sum())
        assert summary.quantiles["p90"] == pytest.approx(np.quantile(tokens, 0.9))
        assert sum(summary.histogram.counts) == len(tokens)
        assert len(summary.histogram.edges) == len(summary.histogram.counts) + 1
    assert sum(got.arrivals.counts) == len(pairs)
    if len(set(prompt)) > 1 and len(set(output)) > 1:
        assert got.rank_correlation == pytest.approx(stats.spearmanr(prompt, output).statistic)
    else:
        assert got.rank_correlation is None
    if len(pairs) > 1:
        assert (got.rate_rps, got.interarrival_cv) == (pytest.approx(2), pytest.approx(0, abs=1e-9))


def test_rate_and_cv_of_bursts():
    got = describe(generate(50_000, Joint(LogNormal(90, 1), LogNormal(50, 1)), Gamma(5, 2)))
    assert got.rate_rps == pytest.approx(5, rel=0.05)
    assert got.interarrival_cv == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(("arrivals", "concurrency"), [(AllAtOnce(), None), (ClosedLoop(3), 3)])
def test_without_times_there_is_no_rate(arrivals, concurrency):
    got = describe(generate(20, Joint(Fixed(5), Fixed(6)), arrivals, name="all"))
    assert (got.name, got.concurrency, got.duration_s) == ("all", concurrency, 0)
    assert got.rate_rps is None
    assert got.interarrival_cv is None
    assert sum(got.arrivals.counts) == 20


def test_a_description_is_plain_enough_for_json():
    got = describe(generate(20, Joint(Fixed(5), LogNormal(6, 1)), Gamma(1, 1)))
    assert json.loads(json.dumps(asdict(got)))["prompt"]["max"] == 5
