from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lengthwise.schema.workload import UNCAPPED, After, Workload
from lengthwise.workload import (
    AllAtOnce,
    ClosedLoop,
    Delay,
    Fixed,
    Gamma,
    Joint,
    LogNormal,
    Poisson,
    Sessions,
    Tools,
    describe,
    generate,
    generate_sessions,
)

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


AGENTS = Sessions(
    turns=2, think_time=Delay(20, 1), tools=Tools(calls=2, time=Delay(3, 1), fan_out=3, fan_out_share=0.3)
)


@pytest.mark.parametrize("sessions", [Sessions(turns=4, think_time=Delay(30, 1)), AGENTS], ids=["chats", "agents"])
def test_sessions_arrive_at_their_starts_and_their_turns_after_the_delays(sessions):
    drawn = generate_sessions(3000, sessions, Joint(Fixed(50), Fixed(20)), Poisson(0.5), 3)
    got = describe(drawn)
    sizes = np.bincount(drawn.extra["session"])
    assert (got.sessions.count, got.sessions.max_requests) == (len(sizes), sizes.max())
    assert got.sessions.mean_requests == pytest.approx(sizes.mean())
    assert got.sessions.single_share == pytest.approx((sizes == 1).mean())
    assert got.sessions.starts_per_s == pytest.approx(0.5, rel=0.1)
    assert got.rate_rps == pytest.approx(0.5 * sizes.mean(), rel=0.1)
    assert got.interarrival_cv == pytest.approx(1, rel=0.1)
    delays_s = [drawn.after.delay_s[i] for i in range(3000) if drawn.after.start[i] < drawn.after.start[i + 1]]
    assert (got.sessions.delay_s, got.sessions.delay_p90_s) == pytest.approx(np.quantile(delays_s, [0.5, 0.9]))
    sent_s = []  # of requests that take no time
    for i in range(3000):
        parents = drawn.after.parent[drawn.after.start[i] : drawn.after.start[i + 1]]
        sent_s.append(max((sent_s[p] + drawn.after.delay_s[i] for p in parents), default=drawn.arrival_s[i]))
    assert got.duration_s == pytest.approx(max(sent_s) - min(sent_s))
    assert np.ptp(drawn.arrival_s) < got.duration_s


def test_requests_that_wait_for_others_are_sessions_without_a_column():
    after = After(np.array([0, 0, 1, 1, 2]), np.array([0, 2]), np.array([0, 5.0, 0, 7.0]))
    got = describe(Workload(np.array([0.0, 0, 4, 4]), np.full(4, 9), np.full(4, 9), after=after))
    assert (got.sessions.count, got.sessions.max_requests, got.duration_s) == (2, 2, 11)
    assert (got.sessions.starts_per_s, got.rate_rps) == (pytest.approx(0.25), pytest.approx(0.5))
    single = describe(Workload(np.array([0.0, 4]), np.full(2, 9), np.full(2, 9)))
    assert single.sessions is None


def test_limits_are_those_of_the_requests_that_have_one():
    limits = np.array([9, 20, UNCAPPED, 9])
    got = describe(Workload(np.arange(4.0), np.full(4, 5), np.array([9, 8, 900, 9]), max_tokens=limits)).limits
    assert (got.share, got.reached_share, got.tokens.max) == (0.75, 0.5, 20)
    for none in (None, np.full(4, UNCAPPED)):
        assert describe(Workload(np.arange(4.0), np.full(4, 5), np.full(4, 9), max_tokens=none)).limits is None
