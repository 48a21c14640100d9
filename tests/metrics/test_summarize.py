from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lengthwise.metrics import Slo, request_columns, summarize
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import After, Workload

REFUSED = r"warm-up must leave requests"


@pytest.fixture(scope="module")
def records(toy):
    return toy.records(800)


def test_buckets_add_up_to_what_arrived(records) -> None:
    counts = summarize(records).counts
    assert counts.finished + counts.rejected + counts.timed_out + counts.unfinished == counts.arrivals
    assert counts.arrivals == len(records.requests.arrival_s)
    assert min(counts.finished, counts.rejected, counts.timed_out, counts.unfinished) >= 1
    assert counts.preemptions == records.requests.preemptions.sum()


def test_latencies_are_those_of_the_columns(records) -> None:
    summary, columns = summarize(records), request_columns(records)
    for name in ("ttft_s", "tpot_s", "jct_s", "queueing_delay_s", "normalized_latency_s"):
        made = getattr(summary, name)
        assert made.p95.value == pytest.approx(np.nanquantile(columns[name], 0.95))
        assert made.count == np.isfinite(columns[name]).sum()
    gaps = np.repeat(records.gaps.gap_s, records.gaps.count)
    assert summary.tbt_s.p99.value == pytest.approx(np.quantile(gaps, 0.99))
    assert summary.tbt_s.mean.has_interval


def test_rates_count_what_was_delivered(records) -> None:
    summary, r = summarize(records), records.requests
    finished = r.status == Status.FINISHED
    span = records.end_s - r.arrival_s[0]
    assert summary.window_s.value == pytest.approx(span)
    assert summary.rates.requests_per_s.value == pytest.approx(finished.sum() / span)
    assert summary.rates.output_tokens_per_s.value == pytest.approx(r.output_tokens[finished].sum() / span)
    assert summary.rates.prompt_tokens_per_s.value == pytest.approx(r.prompt_tokens[finished].sum() / span)
    assert summary.rates.requests_per_s.half_width > 0


def test_warmup_leaves_out_the_first_requests(records) -> None:
    r = records.requests
    for warm in (summarize(records, warmup_requests=100), summarize(records, warmup_s=r.arrival_s[100])):
        assert warm.counts.arrivals == len(r.arrival_s) - 100
        assert warm.jct_s.mean.value == pytest.approx(np.nanmean((r.finished_s - r.arrival_s)[100:]))
        late = r.finished_s >= r.arrival_s[100]
        span = records.end_s - r.arrival_s[100]
        assert warm.rates.requests_per_s.value == pytest.approx(late.sum() / span)
    both = summarize(records, warmup_requests=100, warmup_s=r.arrival_s[200])
    assert both.counts.arrivals == len(r.arrival_s) - 200


def test_requests_that_never_arrived_are_not_counted(records) -> None:
    r = records.requests
    released = dataclasses.replace(r, arrival_s=np.where(np.arange(800) < 700, r.arrival_s, np.nan))
    assert summarize(dataclasses.replace(records, requests=released)).counts.arrivals == 700
    later = dataclasses.replace(r, arrival_s=np.where(np.arange(800) < 750, r.arrival_s, records.end_s + 1))
    assert summarize(dataclasses.replace(records, requests=later)).counts.arrivals == 750


def test_goodput_counts_requests_that_meet_every_limit(records) -> None:
    slo = Slo(ttft_s=0.05, tpot_s=0.02, jct_s=1.0)
    summary, columns = summarize(records, slo=slo), request_columns(records)
    tpot = np.nan_to_num(columns["tpot_s"], nan=0.0)
    good = (columns["ttft_s"] <= 0.05) & (tpot <= 0.02) & (columns["jct_s"] <= 1.0)
    goodput = summary.goodput
    assert 0.05 < goodput.share.value < 0.95
    assert goodput.share.value == pytest.approx(good.mean())
    assert goodput.requests_per_s.value == pytest.approx(good.sum() / summary.window_s.value)
    assert goodput.share.half_width > 0
    assert set(goodput.met) == {"ttft_s", "tpot_s", "jct_s"}
    assert min(share.value for share in goodput.met.values()) >= goodput.share.value


def test_without_limits_every_finished_request_is_good(records) -> None:
    summary = summarize(records, slo=Slo())
    assert summary.goodput.share.value == summary.counts.finished / summary.counts.arrivals
    assert summary.goodput.requests_per_s == summary.rates.requests_per_s


def test_all_or_none_yields_no_interval(records) -> None:
    never = summarize(records, slo=Slo(ttft_s=1e-9)).goodput
    assert never.share.value == 0
    assert not never.share.has_interval


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_requests": 800}, REFUSED),
        ({"warmup_s": 1e9}, REFUSED),
        ({"level": 1.0}, "between 0 and 1"),
        ({"level": float("nan")}, "between 0 and 1"),
    ],
)
def test_invalid_options_are_reported(records, options, message) -> None:
    with pytest.raises(InputError, match=message):
        summarize(records, **options)


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(InputError, match="tpot_s is -1"):
        Slo(tpot_s=-1)


def test_a_run_in_which_nothing_finished(toy, records) -> None:
    r, nan = records.requests, np.full(len(records.requests.arrival_s), np.nan)
    never = dataclasses.replace(
        r,
        scheduled_s=nan,
        first_token_s=nan,
        finished_s=nan,
        status=np.full(len(nan), Status.UNFINISHED, np.int8),
        output_tokens=np.zeros(len(nan), np.int64),
    )
    summary = summarize(dataclasses.replace(records, requests=never), toy.deployment(), slo=Slo(ttft_s=1))
    assert summary.counts.unfinished == summary.counts.arrivals
    assert summary.jct_s.count == 0
    assert summary.goodput.share.value == 0
    assert summary.rates.requests_per_s.value == 0
    assert np.isnan(summary.hardware.cost.usd_per_million_tokens.value)


@pytest.mark.slow
@pytest.mark.parametrize("sessions", [101, 300, 2000])
def test_a_run_of_sessions_is_steady_between_its_first_later_turns_and_its_last_start(toy, sessions: int) -> None:
    """Each session has a second turn 100 s after its start, so that the load rises for 100 s, and falls as long."""
    made = toy.records(2 * sessions, odd=False)
    start_s, is_second = np.repeat(np.arange(float(sessions)), 2), np.arange(2 * sessions) % 2 == 1
    after = After(np.concatenate([[0], np.cumsum(is_second)]), 2 * np.arange(sessions), 99.0 * is_second)
    workload = Workload(start_s, made.requests.prompt_tokens, made.requests.output_tokens, after=after)
    requests = dataclasses.replace(made.requests, arrival_s=start_s + 100.0 * is_second)
    records = dataclasses.replace(made, requests=requests, end_s=sessions + 99.0)
    share = summarize(records, workload=workload).rates.steady_share
    last_s = sessions - 1.0
    assert share.value == pytest.approx((last_s - 100) / (last_s + 100))
    assert summarize(records, workload=workload).is_steady == (share.value >= 0.8)
    assert np.isnan(summarize(records).rates.steady_share.value)
