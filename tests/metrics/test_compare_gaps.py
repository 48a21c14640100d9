"""Times between tokens by request: whose they are, and intervals by drawing requests with theirs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.metrics import compare
from lengthwise.metrics.bootstrap import Bootstrap, Sample
from lengthwise.metrics.comparison import Run, request_gaps
from lengthwise.schema.records import RunResult, TokenTimes
from lengthwise.schema.workload import Workload


@pytest.fixture(scope="module")
def run(toy) -> RunResult:
    records = toy.records(200, seed=3, odd=False)
    r = records.requests
    return RunResult(records, Workload(r.arrival_s, r.prompt_tokens, r.output_tokens), "simulate")


def complete(run: RunResult) -> Run:
    return Run(run, slice(0, len(run.workload)))


def as_pieces(run: RunResult, together: int = 1) -> RunResult:
    """The same run as a client sees it: the time of every token, reported in pieces of so many."""
    gaps, row = request_gaps(complete(run))
    r = run.records.requests
    at_s = [r.first_token_s[i] + np.concatenate([[0.0], np.cumsum(gaps[row == i])]) for i in range(len(r.status))]
    cut = [times[together - 1 :: together] if len(times) % together == 0 else times for times in at_s]
    each = [np.full(len(few), len(times) // len(few)) for few, times in zip(cut, at_s, strict=True)]
    start = np.concatenate([[0], np.cumsum([len(few) for few in cut])])
    return replace(run, tokens=TokenTimes(start, np.concatenate(cut), np.concatenate(each)))


def test_steps_identify_the_request_of_every_gap(run) -> None:
    gaps, row = request_gaps(complete(run))
    r = run.records.requests
    assert (np.bincount(row, minlength=200) == r.output_tokens - 1).all()
    assert np.bincount(row, gaps, 200) == pytest.approx(r.finished_s - r.first_token_s)
    assert np.sort(gaps) == pytest.approx(np.repeat(run.records.gaps.gap_s, run.records.gaps.count))


def test_chunks_yield_the_same_gaps_as_steps(run) -> None:
    gaps, row = request_gaps(complete(run))
    same, own = request_gaps(complete(as_pieces(run)))
    assert (own == row).all()
    assert same == pytest.approx(gaps)


def test_a_run_with_the_steps_of_another_is_rejected(run) -> None:
    r = run.records.requests
    late = replace(r, first_token_s=r.first_token_s * 2, finished_s=r.finished_s * 2)
    assert request_gaps(complete(replace(run, records=replace(run.records, requests=late)))) is None
    assert request_gaps(complete(replace(run, records=replace(run.records, steps=None)))) is None


def test_an_interval_holds_the_error_and_shrinks_with_pairs(run, toy) -> None:
    slow = toy.records(200, seed=3, odd=False, max_seqs=4)
    r = slow.requests
    other = RunResult(slow, Workload(r.arrival_s, r.prompt_tokens, r.output_tokens), "simulate")
    found = compare(other, as_pieces(run))
    for stat in ("mean", "p50", "p90", "p95", "p99"):
        one = found[f"tbt.{stat}"]
        assert one.low <= one.error <= one.high
        assert one.low < one.high or stat != "mean"
    same = compare(run, as_pieces(run))
    assert all(abs(one.low) < 1e-6 > abs(one.high) for one in same.errors if one.metric == "tbt")


def test_without_the_requests_of_gaps_there_is_an_error_value_but_no_interval(run) -> None:
    blind = replace(run, records=replace(run.records, steps=None))
    one = compare(blind, run)["tbt.p95"]
    assert one.error == 0
    assert not one.has_interval


def test_a_warm_up_is_left_out_where_gaps_are_known(run) -> None:
    half_s = float(np.median(run.records.requests.arrival_s))
    gaps, row = request_gaps(complete(run))
    late = run.records.requests.arrival_s[row] >= half_s
    assert compare(run, run, warmup_s=half_s)["tbt.mean"].a == pytest.approx(gaps[late].mean())


@pytest.mark.slow
def test_intervals_contain_the_truth_about_as_often_as_stated() -> None:
    """Requests of a pace of their own: drawing gaps one by one would be far too sure."""
    n, each, covered = 200, 30, []
    row = np.repeat(np.arange(n), each)
    for seed in range(80):
        rng = np.random.default_rng(seed)
        a, b = (by * np.exp(np.repeat(rng.normal(0, 0.5, n), each) + rng.normal(0, 0.1, n * each)) for by in (1.1, 1.0))
        drawn = Bootstrap(paired=False, draws=200, seed=seed, level=0.9)
        low, high = drawn.error_interval(Sample(a, row, n), Sample(b, row, n), np.array([0.5]))
        covered.append(low[0] <= 0.1 <= high[0])
    assert 0.78 <= np.mean(covered) <= 0.99


def in_bursts(run: RunResult, every: int) -> RunResult:
    """The run as a starved client reads it: about one gap in ``every`` is a wait, the others next to nothing."""
    rng, r = np.random.default_rng(5), run.records.requests
    at_s = []
    for i, n in enumerate(r.output_tokens):
        waits = np.where(rng.random(n - 1) < rng.uniform(0, 2 / every), 1.0, 1e-6)
        spread_s = np.concatenate([[0.0], np.cumsum(waits) / max(waits.sum(), 1.0)])
        at_s.append(r.first_token_s[i] + spread_s * (r.finished_s[i] - r.first_token_s[i]))
    start = np.concatenate([[0], np.cumsum([len(one) for one in at_s])])
    tokens = TokenTimes(start, np.concatenate(at_s), np.ones(start[-1], np.int64))
    gap_s, count = np.unique(np.concatenate([np.diff(one) for one in at_s]), return_counts=True)
    gaps = replace(run.records.gaps, gap_s=gap_s, count=count, max_s=float(gap_s[-1]))
    return replace(run, records=replace(run.records, gaps=gaps), tokens=tokens)


def test_an_error_relative_to_nearly_zero_has_no_interval(run) -> None:
    """P90 of gaps lies where a wait becomes none: relative to some draws the error is ten million percent."""
    found = compare(run, in_bursts(run, 10))
    one = found["tbt.p90"]
    assert not one.has_interval, (one.low, one.high)
    assert not found["tbt.p50"].has_interval
    assert found["tbt.mean"].has_interval
    assert found["jct.p90"].has_interval
    (reported,) = [warning for warning in found.warnings if "nearly 0" in warning]
    assert "TBT p50, TBT p90" in reported
    assert not [warning for warning in compare(run, run).warnings if "nearly 0" in warning]
