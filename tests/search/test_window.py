"""What is read of the steady state of a run."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from observers import LAW, may_get_stuck
from servers import deployment, step_costs
from worlds import deployments, workloads

from lengthwise.engine import simulate
from lengthwise.metrics import Slo, summarize
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.metric_names import PREFIX_CACHE
from lengthwise.schema.plan import Limit
from lengthwise.schema.records import Status
from lengthwise.schema.workload import SharedPrefixes, Workload
from lengthwise.search.limits import WAITS, SloLimits, good_share
from lengthwise.search.measurement import WARMUP_SHARE, Window, simulated_window, window_metrics

ONE = deployment(step_costs(0.0, 0.01), max_num_seqs=1)


def fields(columns):
    return {f.name: getattr(columns, f.name) for f in dataclasses.fields(columns)}


@pytest.mark.slow
@LAW
@given(workloads(), deployments())
def test_the_beginning_equals_the_beginning_of_the_complete_run(workload, deployment):
    assume(workload.concurrency is None and workload.arrival_s[-1] > 0 and not may_get_stuck(deployment))
    window = simulated_window(workload, deployment, seed=3)
    before, complete = window.before.requests, window.records.requests
    for name in ("scheduled_s", "first_token_s", "finished_s"):
        then, now = getattr(before, name), getattr(complete, name)
        known = ~np.isnan(then)
        np.testing.assert_array_equal(then[known], now[known])
        assert (now[~known & ~np.isnan(now)] >= window.start_s).all(), "the beginning has missed something"
    assert (window.gaps().histogram >= 0).all()
    assert window.gaps().total == window.gaps().histogram.sum() >= 0
    assert window.gaps().sum_s >= -1e-9
    for name, sums in fields(window.as_records().totals).items():
        assert (sums >= -1e-9 * np.maximum(1, getattr(window.records.totals, name))).all(), name


@pytest.mark.slow
@LAW
@given(workloads(), deployments())
def test_requests_and_gaps_are_conserved(workload, deployment):
    """Finished before, finished within and not finished are all; so are the gaps between tokens."""
    assume(workload.concurrency is None and workload.arrival_s[-1] > 0 and not may_get_stuck(deployment))
    window = simulated_window(workload, deployment, seed=0)
    before = window.before.requests.status == Status.FINISHED
    assert not (before & window.finished()).any()
    assert before.sum() + window.finished().sum() == (window.records.requests.status == Status.FINISHED).sum()
    assert window.before.gaps.total + window.gaps().total == window.records.gaps.total
    assert len(window.as_records().requests.arrival_s) == window.finished().sum()
    assert window.as_records().end_s == pytest.approx(workload.arrival_s[-1] - window.start_s)
    if workload.after is None:
        assert window.start_s == pytest.approx(WARMUP_SHARE * workload.arrival_s[-1])


def sharing(n, seed, *, is_on=True):
    """A queue of prompts of 48 to 95 tokens on one replica, of which two begin with the same 16, 32 or 48 tokens."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(1, 4, n)
    prefixes = SharedPrefixes(
        16, np.concatenate([[0], np.cumsum(blocks)]), np.concatenate(list(map(np.arange, blocks)))
    )
    workload = Workload(np.arange(n) * 0.01, rng.integers(48, 96, n), rng.integers(1, 9, n), prefixes=prefixes)
    limits = dataclasses.replace(ONE.limits, max_num_seqs=4, enable_prefix_caching=is_on)
    return workload, dataclasses.replace(ONE, limits=limits)


@given(st.integers(2, 60), st.integers(0, 2**32 - 1))
@LAW
def test_the_hit_rate_is_of_the_prompts_scheduled_in_the_window(n, seed):
    workload, cached = sharing(n, seed)
    window = simulated_window(workload, cached, 0)
    r = window.records.requests
    rows = [i for i in range(n) if window.start_s < r.scheduled_s[i] <= window.end_s]
    found = sum(r.cached_tokens[i] for i in rows) / max(1, sum(workload.prompt_tokens[i] for i in rows))
    assert window.prefix_cache() == {"hit_rate": pytest.approx(found) if rows else pytest.approx(np.nan, nan_ok=True)}
    complete = Window(cached, simulate(workload, cached), None, -1.0, 1e9, shares_prefixes=True)
    summary = summarize(complete.records, cached, workload=workload)
    assert complete.prefix_cache()["hit_rate"] == pytest.approx(summary.prefix_cache.hit_rate.value)


def test_there_is_no_hit_rate_without_a_cache_or_shared_prefixes():
    workload, cached = sharing(9, 0)
    values = window_metrics(simulated_window(workload, cached, 0), 0.0)
    assert {"hit_rate"} == values.keys() & PREFIX_CACHE.keys()
    alone = dataclasses.replace(workload, prefixes=None)
    for other, deployed in ((alone, cached), sharing(9, 0, is_on=False)):
        assert not window_metrics(simulated_window(other, deployed, 0), 0.0).keys() & PREFIX_CACHE.keys()


def test_without_sums_the_beginning_is_not_run():
    workload = Workload(np.arange(10.0), np.ones(10, int), np.ones(10, int))
    assert simulated_window(workload, ONE, 0, sums=False).before is None


def queue(n=100, every_s=1.0, tokens=110):
    """A queue that grows by a tenth of a second a request, each of which takes 1.1 s."""
    return Workload(np.arange(n) * every_s, np.full(n, tokens), np.ones(n, int))


def test_waits_are_of_arrivals_in_the_window_but_for_the_guard():
    window = simulated_window(queue(), ONE, 0)
    waits = window.waits_s("queueing_delay_s", 15.0)
    arrival_count = np.arange(100.0)
    counted = arrival_count[(arrival_count >= 0.2 * 99) & (arrival_count < 99 - 15.0)]
    expected = 0.1 * counted
    started = counted + expected <= 99
    np.testing.assert_allclose(waits[started], expected[started])
    assert len(waits) == len(counted)
    assert np.isinf(waits[~started]).all()


def test_a_waiting_request_has_waited_until_the_end():
    window = simulated_window(queue(every_s=0.5), ONE, 0)
    waited, waits = window.censored_waits_s("queueing_delay_s", 5.0), window.waits_s("queueing_delay_s", 5.0)
    served = np.isfinite(waits)
    assert not served.all()
    np.testing.assert_array_equal(waited[served], waits[served])
    assert (waited[~served] >= 5.0).all()
    assert (waited[~served] <= window.end_s - window.start_s).all()


def strained(window, *limits, slo=None):
    return SloLimits(limits, slo).usage(window)


@pytest.mark.parametrize("statistic", ["p50", "p99", "mean"])
@pytest.mark.parametrize("metric", WAITS)
def test_refused_requests_break_every_limit_on_waits(metric, statistic):
    """Each second request can never run."""
    short = dataclasses.replace(ONE, max_model_len=100)
    n = 200
    workload = Workload(np.arange(n) * 1.0, np.tile([1, 500, 500], n)[:n], np.ones(n, int))
    window = simulated_window(workload, short, 0)
    assert (window.records.requests.status == Status.REJECTED).sum() > n / 2
    limit = Limit(f"{metric}.{statistic}", 50.0)
    assert strained(window, limit)[limit.metric] > 1


@pytest.mark.parametrize("statistic", ["p90", "mean"])
@pytest.mark.parametrize("metric", WAITS)
def test_starved_requests_break_every_limit_on_waits(metric, statistic):
    """Short ones fill the server; shortest first never comes to the long ones, a fifth of all."""
    n = 2000
    prompt = np.tile([100, 100, 100, 100, 1000], n)[:n]
    one = deployment(step_costs(0.0, 0.01), Scheduler(rank="shortest_prompt"), max_num_seqs=1)
    workload = Workload(np.arange(n) * 0.8, prompt, np.ones(n, int), predicted_tokens=prompt)
    window = simulated_window(workload, one, 0)
    limit = Limit(f"{metric}.{statistic}", 60.0)
    assert strained(window, limit)[limit.metric] > 1
    idle = simulated_window(dataclasses.replace(workload, arrival_s=np.arange(n) * 20.0), one, 0)
    assert strained(idle, limit)[limit.metric] <= 1


def test_a_mean_is_not_distorted_by_one_waiting_request():
    """At 60 % of its speed a server holds a mean wait that is far above its own, wherever the run ends."""
    rng = np.random.default_rng(0)
    n = 4000
    arrival_s = np.cumsum(rng.exponential(1.0, n))
    tokens = np.maximum(rng.exponential(60.0, n), 1).astype(int)
    limit = Limit("queueing_delay.mean", 1.5)
    for cut in range(3900, 4000, 5):
        workload = Workload(arrival_s[:cut], tokens[:cut], np.ones(cut, int))
        assert 0.4 < strained(simulated_window(workload, ONE, 0), limit)[limit.metric] < 0.8


METRICS = st.sampled_from(["ttft", "jct", "queueing_delay", "tpot", "tbt"])
STATISTICS = st.sampled_from(["mean", "p50", "p90", "p99"])


@pytest.mark.slow
@LAW
@given(workloads(), deployments(), METRICS, STATISTICS, st.lists(st.floats(1e-4, 3.0), min_size=2))
def test_strains_fall_with_the_bound(workload, deployment, metric, statistic, bounds):
    """But for the guard: requests of the last part of a window, as long as the bound, are not judged."""
    assume(workload.concurrency is None and workload.arrival_s[-1] > 0 and not may_get_stuck(deployment))
    records = simulated_window(workload, deployment, 0).records
    window = Window(deployment, records, None, -1.0, 1e9)
    name = f"{metric}.{statistic}"
    strains = [strained(window, Limit(name, bound))[name] for bound in sorted(bounds)]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(strains) if not np.isnan(a))


@pytest.mark.slow
@LAW
@given(workloads(), deployments(), st.floats(1e-3, 1.0), st.floats(1e-3, 0.1), st.floats(1e-3, 3.0))
def test_goodput_of_a_complete_run_is_that_of_the_metrics(workload, deployment, ttft_s, tpot_s, jct_s):
    from lengthwise import engine

    assume(workload.concurrency is None and not may_get_stuck(deployment))
    records = engine.simulate(workload, deployment, max_log_steps=0)
    slo = Slo(ttft_s, tpot_s, jct_s)
    window = Window(deployment, records, None, -1.0, 1e9)
    assert good_share(window, slo, 0.0) == pytest.approx(slo.met(records.requests)["all"].mean())


def test_what_cannot_be_measured_hides_no_broken_limit():
    """Requests of one token have no TPOT, and here wait too long."""
    window = simulated_window(queue(every_s=0.5), ONE, 0)
    tpot, ttft = Limit("tpot.mean", 0.1), Limit("ttft.p90", 2.0)
    strains = strained(window, tpot, ttft)
    assert strains[tpot.metric] == 0
    assert max(strains.values()) == strains[ttft.metric] > 1


def test_goodput_does_not_take_requests_under_way_for_bad():
    """Decodes of 20 s in a run of 100 s: all are good, the last ones not least."""
    n = 100
    fast = deployment(step_costs(0.001, 0.0), max_num_seqs=100)
    workload = Workload(np.arange(n) * 1.0, np.ones(n, int), np.full(n, 20_000))
    window = simulated_window(workload, fast, 0)
    assert (window.records.requests.status == Status.UNFINISHED).sum() > 15
    assert good_share(window, Slo(tpot_s=0.0011), 0.0) >= 0.98
    assert good_share(window, Slo(tpot_s=0.0009), 0.0) == 0.0


@pytest.mark.parametrize("quantile", ["p50", "p90", "p99"])
def test_strains_are_at_1_where_the_quantile_is(quantile):
    rng = np.random.default_rng(1)
    n = 5000
    workload = Workload(np.cumsum(rng.exponential(1.0, n)), rng.integers(1, 140, n), np.ones(n, int))
    window = simulated_window(workload, ONE, 0)
    waits = window.waits_s("ttft_s", 0.0)
    at = float(np.quantile(waits[np.isfinite(waits)], float(quantile[1:]) / 100))
    name = f"ttft.{quantile}"
    assert strained(window, Limit(name, at * 1.05))[name] <= 1
    assert strained(window, Limit(name, at * 0.95))[name] > 1
