"""The circle on transformers' continuous batching: another engine, another scheduler, no HTTP."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from judging import MIN_COUNT, TOO_NOISY, arriving, drift, judged, lasting, of_median_repeat, seen_steps, served_rps

from lengthwise import Status
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.measure import read_records, write_records

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.usefixtures("engine_python", "torch")]

JUDGED = ("jct_p50", "tpot_p50")
LIGHT, HEAVY = 0.4, 0.75
REPEATS = 2
FLAGS = {"batch-tokens": 256, "seqs": 16, "blocks": 256, "block-size": 32}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    import json

    import _circle
    import gpu_campaign

    config = tmp_path_factory.mktemp("transformers") / "tiny.json"
    config.write_text(json.dumps(gpu_campaign.TINY))
    return _circle.Setting("live", 16, 256).deployment(str(config), _circle.this_thread(), 512, 256), config


@pytest.fixture(scope="module")
def profiled(deployment):
    """The deployment, priced by a profile of this machine."""
    from lengthwise.measure.operators import MeasurementSettings, measure_operators

    d, _ = deployment
    settings = MeasurementSettings("cpu", "float32", threads=1, max_tokens=256, max_seqs=16, max_context=512)
    profile = measure_operators(d.model, settings, budget_s=15.0).profile
    tables, _ = fit_profile(profile, Target(d.model, d.gpu, d.node, d.parallel, d.limits, d.max_model_len))
    return replace(d, cost=tables)


@pytest.fixture(scope="module")
def measured(deployment, engine_python):
    import _circle
    import _continuous

    _, config = deployment
    lengths = _circle.Lengths(prompt=(48, 0.6, 8, 300), output=(16, 0.5, 8, 60))
    with _continuous.started(engine_python, Path(config), FLAGS) as engine:
        engine.run(lengths.workload(16, 0, None))
        max_rps = served_rps(engine.run(lengths.workload(MIN_COUNT, 0, None)))
        full = engine.run(lengths.workload(lasting(max_rps), 1, None, "full"))
        max_tokens_s = _circle.capacity_tokens_s(full)
        runs = {LIGHT: [], HEAVY: []}
        for _ in range(REPEATS):
            for k, share in enumerate(runs):
                work = arriving(lengths, share * max_tokens_s, 2 + k)
                runs[share].append(engine.run(work))
    return full, runs


def test_every_request_is_answered_to_the_token_and_every_step_is_seen(measured, tmp_path):
    full, runs = measured
    for one in (full, *runs[LIGHT], *runs[HEAVY]):
        r, steps = one.records.requests, one.records.steps
        assert (r.status == Status.FINISHED).all(), one.errors
        np.testing.assert_array_equal(r.output_tokens, one.workload.output_tokens)
        assert steps.prefill_tokens.sum() == one.workload.prompt_tokens.sum()
        assert steps.decode_seqs.sum() == (one.workload.output_tokens - 1).sum()
        assert (steps.prefill_tokens + steps.decode_seqs).max() <= FLAGS["batch-tokens"]
        assert (steps.prefill_seqs + steps.decode_seqs).max() <= FLAGS["seqs"]
    write_records(full, tmp_path / "run.parquet")
    again = read_records(tmp_path / "run.parquet")
    np.testing.assert_array_equal(again.records.steps.end_s, full.records.steps.end_s)


@pytest.fixture(scope="module")
def report(deployment, profiled, measured):
    """Errors at the load that was held out, by run: calibrated to the two others, and by the plain roofline."""
    import _circle

    full, runs = measured
    learnt = [_circle.Run("live", "static", 0, full)]
    learnt += [_circle.Run("live", "half", k, one) for k, one in enumerate(runs[LIGHT])]
    held_out = [_circle.Run("live", "high", k, one) for k, one in enumerate(runs[HEAVY])]
    tables = _circle.calibrated(learnt, held_out, profiled).tables
    errors = {"calibrated": _circle.errors(profiled, tables, held_out)}
    return errors | {"roofline": _circle.errors(profiled, deployment[0].cost, held_out)}, held_out


@pytest.fixture(scope="module")
def drifted(measured):
    """How much faster or slower the machine did the same steps under the load that was held out, relative."""
    full, runs = measured
    return drift(seen_steps([full, *runs[LIGHT]]), seen_steps(runs[HEAVY]), FLAGS["seqs"])


def test_calibrated_to_two_loads_the_simulation_predicts_the_third(report, drifted, capsys):
    """Bounds on errors; where the machine was too noisy they are not judged, which is printed."""
    import _circle

    errors, held_out = report
    off = {metric: of_median_repeat(errors["calibrated"], held_out, metric) for metric in JUDGED}
    spreads = {metric: spread + drifted for metric, spread in _circle.spread(held_out)["live-high"].items()}
    wrong, noisy = judged({"high": off}, {"high": spreads}, "high", JUDGED)
    assert not wrong, "; ".join(wrong + noisy)
    if noisy:
        with capsys.disabled():
            print(f"\nTHESE BOUNDS WERE NOT JUDGED, the machine was too noisy: {'; '.join(noisy)}")


def test_a_calibration_is_better_than_the_roofline(report, drifted, capsys):
    errors, _ = report
    middle = {
        kind: statistics.median(abs(e) for one in of.values() for e in one.values()) for kind, of in errors.items()
    }
    if drifted > TOO_NOISY:
        with capsys.disabled():
            print(f"\nNOT JUDGED, the same steps took {drifted:.0%} more or less under the load held out: {middle}")
    else:
        assert middle["calibrated"] < middle["roofline"], middle
