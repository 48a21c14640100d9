"""A real vLLM's counters against its own log of steps, and a calibration to the one against one to the other.

Nobody else's load moves these bounds: both tell of the same steps.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest
from judging import lasting, served_rps

from lengthwise.backend.openai_protocol import Server
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.measure.calibration import calibrate, read_iterations
from lengthwise.measure.calibration.busy_periods import busy_periods_of, counters_of, timed_by
from lengthwise.measure.calibration.iteration_log import fitted_steps
from lengthwise.measure.calibration.measured_runs import run_of
from lengthwise.measure.load import LoadSettings, bench

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.usefixtures("engine_python", "torch")]

FIT = ("work", "host_step", "host_sequence", "client")
METRICS = ("jct_p50", "ttft_p50", "tpot_p50")
LOADS = {"static": (1.0, None), "half": (0.5, 0.5), "high": (0.85, 0.85)}
"""Requests, of those that the engine serves in ``LASTS_S``, and their rate, of its most; the last is held out."""
LASTS_S = 12.0
"""A server is looked at once a second."""
EXACT, SECONDS_SEEN = 0.8, (0.5, 1.02)
"""Stretches whose tokens are the log's to the token; which share of their seconds the log's clock sees."""
APART = 0.25
NEAR = 0.1
"""In log. Where a machine drifts between runs a profile may be right by luck, and the log's calibration as far off."""


@pytest.fixture(scope="module")
def model(tmp_path_factory, engine_python, torch):
    import _vllm

    return _vllm.make_model(tmp_path_factory.mktemp("counters") / "tiny", "tiny")


@pytest.fixture(scope="module")
def deployment(model):
    """Priced by the roofline."""
    import _circle

    return _circle.Setting("wide", 16, 512).deployment(str(model / "config.json"), _circle.this_thread(), 512, 256)


@pytest.fixture(scope="module")
def measured(deployment, model, tmp_path_factory):
    """Runs by load with the server's counters, and the engine's log of them all."""
    import _circle
    import _vllm

    log, runs = tmp_path_factory.mktemp("vllm") / "engine.log", {}
    lengths = _circle.Lengths(prompt=(48, 0.6, 8, 300), output=(24, 0.5, 8, 80))
    with _vllm.served(deployment, model, log) as engine:
        server = Server(engine.url, model.name, body={"temperature": 0})
        bench(server, lengths.workload(16, 0, None))
        most_rps = served_rps(bench(server, lengths.workload(96, 0, None)))
        for k, (load, (n, share)) in enumerate(LOADS.items()):
            rate_rps = None if share is None else share * most_rps
            work = lengths.workload(lasting(n * most_rps, LASTS_S), 1 + k, rate_rps, load)
            runs[load] = bench(server, work, LoadSettings(scrape=True))
        engine.check()
    return runs, read_iterations(log)


def test_of_the_log_only_steps_of_the_fitted_runs_are_taken(measured):
    """To the token, or by the clock: then of the run before the one held out a second or two are lost."""
    runs, log = measured
    fitted = [run_of(runs[load], load, 0.0) for load in ("static", "half")]
    found = fitted_steps(log, [*fitted, run_of(runs["high"], "high", 1.0)])
    decodes = sum(int((one.workload.output_tokens - 1).sum()) for one in fitted)
    assert 0.7 * decodes <= log.decode_seqs[found].sum() <= 1.1 * decodes


def test_counters_tell_the_tokens_and_seconds_of_the_steps_that_the_log_tells(measured, deployment):
    runs, log = measured
    told, logged_s, stretch_s = [], 0.0, 0.0
    for load, run in runs.items():
        counters = counters_of(run.metadata["metrics"])
        found = busy_periods_of(run_of(run, "run", 0.0), counters, deployment.limits)
        if isinstance(found, str):  # A quick machine idles between requests where they come one by one.
            assert load != "static"
            assert "never between two looks was it busy throughout" in found or "late to read" in found
            continue
        timed = timed_by(counters, run.tokens)
        last = timed.steps[np.searchsorted(timed.at_s, found.end_s)].astype(int)
        first = last - found.steps.astype(int)
        for i, (a, b) in enumerate(zip(first, last, strict=True)):
            told.append(
                log.prefill_tokens[a:b].sum() == found.prompt_tokens[i]
                and log.decode_seqs[a:b].sum() == found.decodes[i]
            )
            logged_s += log.seconds[a:b].sum()
            stretch_s += found.seconds[i]
    assert len(told) >= 4
    assert np.mean(told) >= EXACT
    assert SECONDS_SEEN[0] < logged_s / stretch_s < SECONDS_SEEN[1]


@pytest.fixture(scope="module")
def tables(measured, deployment):
    """By where they come from: a profile of this machine, and what it becomes by the counters and by the log."""
    from lengthwise.measure.operators import MeasurementSettings, measure_operators

    d, (runs, log) = deployment, measured
    settings = MeasurementSettings("cpu", "float32", threads=1, max_tokens=512, max_seqs=16, max_context=512)
    profile = measure_operators(d.model, settings, budget_s=20.0).profile
    made = fit_profile(profile, Target(d.model, d.gpu, d.node, d.parallel, d.limits, d.max_model_len))[0]
    found = {"profile": made}
    for kind, more in (("counters", {}), ("log", {"iterations": log})):
        calibration = calibrate(
            [runs["static"], runs["half"]],
            replace(d, cost=made),
            fit=FIT,
            holdout=[runs["high"]],
            allow=("warnings",),
            **more,
        )
        assert any("counters were fitted" in note for note in calibration.notes) is (kind == "counters")
        assert any("only these were fitted" in note for note in calibration.notes) is (kind == "log")
        found[kind] = calibration.tables
    return found


def test_counters_calibrate_as_the_log_does_or_better_than_the_profile_alone(tables, measured, deployment):
    import _circle

    held = _circle.Run("wide", "high", 0, measured[0]["high"])
    real = _circle.quantiles(held.measured.records)
    said = {
        kind: _circle.quantiles(_circle.simulated(replace(deployment, cost=cost), held))
        for kind, cost in tables.items()
    }
    off = {kind: statistics.median(abs(np.log(of[name] / real[name])) for name in METRICS) for kind, of in said.items()}
    assert off["counters"] < max(off["profile"], off["log"] + NEAR), off
    apart = {name: said["counters"][name] / said["log"][name] - 1 for name in METRICS}
    assert abs(apart["tpot_p50"]) < APART, (apart, off)
    assert abs(apart["jct_p50"]) < 2 * APART, (apart, off)
