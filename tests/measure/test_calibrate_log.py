"""One engine's log holds the runs that are held out as well: only steps of what is fitted to are fitted."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from planted_counters import SHIFT_S, logged, scraped, simulated
from planted_runs import TRUTH, measured, requests

from lengthwise.measure import read_records
from lengthwise.measure.calibration import Iterations, calibrate, read_iterations
from lengthwise.measure.calibration.calibration import mark_seen
from lengthwise.measure.calibration.iteration_log import SLACK_S, fitted_steps, merge_similar
from lengthwise.measure.calibration.measured_runs import holdout_start_s, run_of, split_of
from lengthwise.measure.calibration.step_evidence import step_evidence_of

SLOWER = {name: 1.6 * value for name, value in TRUTH.items()}
UNSEEN_S = TRUTH["host_step"] / 2
STARTED = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)
RETAINED = Path(__file__).parents[2] / "benchmarks" / "results" / "live" / "vllm"
FITTED, HELD_OUT, WARM = requests(n=60), requests(3.0, 60, seed=5), requests(3.0, 5, seed=9)


def together(*logs):
    """One log of several engines' steps, in order."""
    names = [f.name for f in fields(Iterations)]
    columns = {name: [getattr(log, name) for log in logs] for name in names}
    return Iterations(**{name: None if each[0] is None else np.concatenate(each) for name, each in columns.items()})


def run(workload, deployment, truth=TRUTH, started=None, validation=0.0):
    """As a calibration sees it; its records tell when it began, if that is given."""
    one = measured(workload, deployment, truth)
    start = {} if started is None else {"start": (started - timedelta(seconds=SHIFT_S)).isoformat()}
    return run_of(replace(one, metadata=start), "run", validation)


def cached(log):
    """Where a prefix cache spares a part, no tokens of prompts add up to those of a run."""
    return replace(log, prefill_tokens=np.ceil(0.7 * log.prefill_tokens))


def log_of(deployment, *served, zone_s=0.0):
    """What an engine logs that serves workloads so many seconds after ``BEGAN``; without, lines tell no time."""
    reported = []
    for workload, truth, after_s in served:
        started = None if after_s is None else STARTED + timedelta(seconds=after_s + zone_s)
        reported.append(logged(workload, deployment, truth, UNSEEN_S, started))
    return together(*reported), np.concatenate([np.full(len(log), i) for i, log in enumerate(reported)])


def slow_held_out(deployment):
    """A run, one of its engine that is held out and slower in work and host, its own log and that of both."""
    served = [(FITTED, TRUTH, None), (HELD_OUT, SLOWER, None)]
    logs = [log_of(deployment, *served[:n])[0] for n in (1, 2)]
    return measured(FITTED, deployment), measured(HELD_OUT, deployment, SLOWER), *logs


def test_of_a_log_with_a_slow_held_out_run_only_the_fitted_runs_steps_are_used(deployment):
    fitted, held_out, own, every = slow_held_out(deployment)
    runs = [run_of(fitted, "fit_result", 0.0), run_of(held_out, "validation", 1.0)]
    alone, found = (step_evidence_of(runs, deployment, log, counters=False) for log in (own, every))
    np.testing.assert_array_equal(found.evidence.seconds, alone.evidence.seconds)
    np.testing.assert_array_equal(found.evidence.weight, alone.evidence.weight)
    for name, part in alone.evidence.parts.items():
        np.testing.assert_array_equal(found.evidence.parts[name], part)
    assert not found.seen
    (note,) = found.notes
    assert f"of the {len(every):,} steps of the log, {len(own):,} certainly belong" in note


@pytest.mark.slow
def test_a_slow_held_out_run_in_the_log_moves_no_parameter(deployment):
    fitted, held_out, own, every = slow_held_out(deployment)
    alone, found = (
        calibrate([fitted], deployment, holdout=[held_out], fit=["work"], iterations=log) for log in (own, every)
    )
    assert found.parameters == alone.parameters
    assert "seen" not in found.split
    assert {score.run for score in found.scores} == {"3.0 a second"}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_without_times_a_runs_steps_are_those_that_add_up_to_its_tokens(deployment, order):
    served = [(WARM, TRUTH, None), (FITTED, TRUTH, None), (HELD_OUT, SLOWER, None)]
    log, of = log_of(deployment, *(served[i] for i in order))
    found = fitted_steps(log, [run(FITTED, deployment), run(HELD_OUT, deployment, SLOWER, validation=1.0)])
    np.testing.assert_array_equal(found, of == order.index(1))


@pytest.mark.parametrize("zone_h", [0.0, -7.0, 5.75])
@pytest.mark.parametrize("gap_s", [0.2, 30.0])
def test_where_a_cache_computes_less_steps_are_those_of_the_runs_time(deployment, zone_h, gap_s):
    """Whatever the engine's zone; of a run next to it a second or two are lost, and none of that run's is taken."""
    first = run(FITTED, deployment, TRUTH, STARTED)
    next_s = first.measured.records.end_s - SHIFT_S + gap_s
    second = run(HELD_OUT, deployment, SLOWER, STARTED + timedelta(seconds=next_s), validation=1.0)
    served = [(FITTED, TRUTH, 0.0), (HELD_OUT, SLOWER, next_s)]
    log, of = log_of(deployment, *served, zone_s=3600 * zone_h)
    found = fitted_steps(cached(log), [first, second])
    assert not found[of == 1].any()
    assert found[of == 0].mean() > (0.99 if gap_s > 2 * SLACK_S else 0.7)


def test_a_year_ends_and_a_zone_is_ahead_within_a_run(deployment):
    started = datetime(2026, 12, 31, 23, 59, 55, tzinfo=UTC)
    log = logged(FITTED, deployment, TRUTH, UNSEEN_S, started + timedelta(hours=9))
    log = cached(log)
    assert fitted_steps(log, [run(FITTED, deployment, TRUTH, started)]).all()
    assert fitted_steps(log, [run(FITTED, deployment, TRUTH, started + timedelta(seconds=777))]) is None


def test_times_identify_which_of_several_repeats_is_held_out(deployment):
    served = [(FITTED, TRUTH, 0.0), (FITTED, SLOWER, 60.0)]
    runs = [
        run(FITTED, deployment, TRUTH, STARTED),
        run(FITTED, deployment, SLOWER, STARTED + timedelta(seconds=60), validation=1.0),
    ]
    log, of = log_of(deployment, *served)
    np.testing.assert_array_equal(fitted_steps(log, runs), of == 0)
    assert fitted_steps(replace(log, at_s=None), runs) is None
    both = [run(FITTED, deployment), run(FITTED, deployment, SLOWER)]
    assert fitted_steps(replace(log, at_s=None), both).all()


@pytest.mark.parametrize("by", ["tokens", "clock"])
def test_of_a_run_whose_last_requests_are_held_out_only_earlier_steps_are_used(deployment, by):
    part = run(FITTED, deployment, TRUTH, STARTED, validation=0.3)
    log, _ = log_of(deployment, (FITTED, TRUTH, 0.0))
    finished_s = simulated(FITTED, deployment, TRUTH).steps.end_s
    log = replace(log, at_s=None) if by == "tokens" else cached(log)
    found = fitted_steps(log, [part])
    before = finished_s <= holdout_start_s(part) - SHIFT_S
    assert not found[~before].any()
    assert found.sum() > 0.4 * before.sum()


def test_what_a_log_may_have_seen_is_called_so(deployment):
    """Cells of a log name no request: all are fitted to, and no score is reported as one of held-out requests alone."""
    fitted, held_out, _, every = slow_held_out(deployment)
    split = split_of([fitted], deployment, [held_out], ())
    reported = step_evidence_of(split.runs, deployment, merge_similar(every), counters=True)
    assert reported.seen
    assert reported.is_log
    (note,) = reported.notes
    assert "neither tokens nor times show" in note
    shown = mark_seen(split)
    assert [run.name for run in shown.validation] == ["3.0 a second (seen by the log)"]
    assert [run.name for run in shown.fitted] == ["6.0 a second"]
    assert "seen by the log" in shown.words


def test_with_all_requests_due_at_once_counters_and_log_are_reported_as_not_fitted(deployment):
    static = replace(FITTED, arrival_s=np.zeros(len(FITTED)))
    one = run_of(scraped(static, deployment, TRUTH, 0.25), "run", 0.3)
    log, _ = log_of(deployment, (static, TRUTH, None))
    reported = step_evidence_of([one], deployment, log, counters=True)
    assert reported.evidence is None
    assert not reported.seen
    of_log, of_counters = reported.notes
    assert "the log of steps was not fitted" in of_log
    assert "hold out a separate run" in of_log
    assert "first held-out request was due before the second scrape" in of_counters


def test_a_log_of_other_runs_leaves_it_to_the_counters(deployment):
    one = scraped(FITTED, deployment, TRUTH, 0.25)
    start = {"start": (STARTED - timedelta(seconds=SHIFT_S)).isoformat()}
    one = run_of(replace(one, metadata={**one.metadata, **start}), "run", 0.0)
    held_out = run(HELD_OUT, deployment, SLOWER, STARTED + timedelta(seconds=60), validation=1.0)
    log, _ = log_of(deployment, (HELD_OUT, SLOWER, 60.0))
    reported = step_evidence_of([one, held_out], deployment, log, counters=True)
    assert not reported.is_log
    assert reported.evidence is not None
    assert "the log of steps was not fitted" in reported.notes[0]
    assert "counters were fitted" in reported.notes[1]


def test_in_a_real_log_tokens_and_the_clock_identify_the_same_steps():
    """Of vLLM 0.32; in front of the run's steps are those with which its client found out what the server can do."""
    log = read_iterations(RETAINED / "wide-half-0.iterations.log")
    one = run_of(read_records(RETAINED / "wide-half-0.measured.parquet"), "run", 0.0)
    found = fitted_steps(log, [one])
    assert log.prefill_tokens[found].sum() == one.workload.prompt_tokens.sum()
    assert log.decode_seqs[found].sum() == (one.workload.output_tokens - 1).sum()
    assert 0 < (~found).sum() < 0.1 * len(log)
    assert fitted_steps(cached(log), [one])[found].all()


@pytest.mark.parametrize("times", [False, True])
def test_a_log_whose_clock_starts_when_steps_are_done_is_not_fitted(deployment, times):
    """As a vLLM with model and scheduler in one process writes it: under a millisecond, whatever a step took."""
    log, _ = log_of(deployment, (FITTED, TRUTH, 0.0 if times else None))
    one = run(FITTED, deployment, TRUTH, STARTED if times else None)
    good = step_evidence_of([one], deployment, log, counters=False)
    assert good.is_log
    found = step_evidence_of([one], deployment, replace(log, seconds=0.02 * log.seconds), counters=False)
    assert (found.evidence, found.is_log, found.seen) == (None, False, False)
    (note,) = found.notes
    assert "was not fitted" in note
    assert "--distributed-executor-backend mp" in note
