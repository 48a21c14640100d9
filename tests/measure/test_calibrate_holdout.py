"""What a calibration holds out: never looked at, whole loads where it can, and honest where it is no new load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_runs import MIN_COUNT, TRUTH, errors, measured, requests

from lengthwise.measure.calibration import calibrate
from lengthwise.measure.calibration.measured_runs import split_of


@pytest.mark.slow
def test_held_out_requests_are_never_used(run, found, deployment):
    """Times of held-out requests change no parameter and no table, to the bit; errors tell of them."""
    r = run.records.requests
    late = np.arange(len(r.arrival_s)) >= len(r.arrival_s) - found.held_out
    stretched = np.where(late, 3.0, 1.0)
    moved = replace(
        r,
        first_token_s=r.arrival_s + stretched * (r.first_token_s - r.arrival_s),
        finished_s=r.arrival_s + stretched * (r.finished_s - r.arrival_s),
    )
    records = replace(run.records, requests=moved, end_s=float(moved.finished_s.max()))
    other = calibrate([replace(run, records=records)], deployment, fit=MIN_COUNT)
    assert other.parameters == found.parameters
    for name in ("layer_s", "decode_s", "prefill_s", "host_s", "head_s"):
        np.testing.assert_array_equal(getattr(other.tables, name), getattr(found.tables, name))
    assert other.tables.evidence.reach == found.tables.evidence.reach
    assert errors(other, "jct", "mean")[0].after < -0.5


@pytest.mark.slow
def test_of_several_loads_a_middle_one_is_held_out_completely(deployment):
    runs = [measured(requests(rate, 90, seed), deployment, seed=seed) for seed, rate in enumerate((8.0, 1.0, 4.0))]
    calibration = calibrate(runs, deployment, fit=MIN_COUNT)
    assert {s.run for s in calibration.scores} == {"4.0 a second"}
    assert (calibration.fitted, calibration.held_out) == (180, 90)
    for name, value in TRUTH.items():
        assert calibration[name].low <= value <= calibration[name].high


def test_runs_may_be_held_out_by_name(run, deployment):
    other = measured(requests(3.0, 100, seed=5), deployment, seed=5)
    calibration = calibrate([run], deployment, holdout=[other], fit=["work"])
    assert {s.run for s in calibration.scores} == {"3.0 a second"}
    assert calibration.fitted == len(run.workload)
    assert errors(calibration, "tpot", "each")[0].after < errors(calibration, "tpot", "each")[0].before


def test_a_change_is_reported_as_worse_where_held_out_requests_show_it(run, deployment):
    """Held-out times are those of the tables given, the fitted ones are not: an honest score must notice."""
    workload = requests(n=100, seed=3)
    right = measured(workload, deployment, {}, seed=3)
    calibration = calibrate([run], deployment, holdout=[right], fit=["work"])
    assert calibration["work"].value > 1.2
    assert not calibration.is_improvement
    assert calibration.warnings[0].startswith("WORSE than the tables given: TTFT")
    (change,) = [c for c in calibration.changes if c.metric == "tpot"]
    assert 0 < change.low < change.after - change.before < change.high
    assert calibrate([run], deployment, fit=["work"]).is_improvement


def test_repeats_of_a_load_are_held_out_together(deployment):
    runs = [
        measured(requests(rate, 60, seed=int(rate)), deployment, seed=repeat)
        for repeat in range(2)
        for rate in (8.0, 1.0, 4.0)
    ]
    split = split_of(runs, deployment, 0.3, ())
    assert [run.validation.all() for run in split.runs] == [False, False, True] * 2
    assert not any(run.validation.any() for run in split.fitted)
    two = split_of([runs[0], runs[1], runs[3]], deployment, 0.3, ())
    assert "the last ones" in two.words
    np.testing.assert_array_equal(two.runs[0].validation, two.runs[2].validation)


def test_a_held_out_repeat_is_reported_as_one(run, deployment):
    again, other = (measured(run.workload, deployment, seed=9), measured(requests(3.0, 100, seed=5), deployment))
    (note,) = split_of([run], deployment, [again, other], ()).notes
    assert "is a repeat of a run that was fitted" in note
    assert "measures noise, not a new load" in note
