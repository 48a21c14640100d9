"""The whole circle on a real vLLM: profile, serve, measure, calibrate, simulate the same requests, compare.

The model is so small that bounds are wide: HTTP and a busy machine are a good part of every step.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import Status
from lengthwise.backend.openai import Server
from lengthwise.cost.estimators import fit_profile
from lengthwise.measure import bench, read_records, write_records
from lengthwise.measure.calibrate import calibrate, read_iterations
from lengthwise.metrics.compare import compare

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine_python", "torch")]

WITHIN = 0.35
"""Of the measured median, and as much again as the engine's own repeats lie apart."""
LIGHT, HEAVY = 0.4, 0.75
REPEATS = 3


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, engine_python, torch):
    import _circle
    import _device
    import _vllm

    model = _vllm.make_model(tmp_path_factory.mktemp("live") / "tiny", "tiny")
    limits = replace(
        _circle.Setting("live", 16, 512).limits(512, 32), weight_dtype="float32", kv_dtype="float32"
    )
    return _circle.deployment_of(str(model / "config.json"), _device.this_thread(), limits, 256), model


@pytest.fixture(scope="module")
def priced(deployment):
    """The deployment, priced by a profile of this machine."""
    from lengthwise.measure.operators import measure_profile

    d, _ = deployment
    reach = {"max_tokens": 512, "max_seqs": 16, "max_context": 512}
    profile = measure_profile(d.model, device="cpu", dtype="float32", threads=1, budget_s=25.0, **reach)
    tables, _ = fit_profile(profile, d.model, d.gpu, d.node, d.parallel, d.limits, d.max_model_len)
    return replace(d, cost=tables)


@pytest.fixture(scope="module")
def measured(deployment, tmp_path_factory):
    """Runs at two loads in turns, and the engine's log of them."""
    import _circle
    import _vllm

    d, model = deployment
    log = tmp_path_factory.mktemp("vllm") / "engine.log"
    lengths = _circle.Lengths(prompt=(48, 0.6, 8, 300), output=(24, 0.5, 8, 80))
    with _vllm.served(d, model, log) as engine:
        server = Server(engine.url, model.name, body={"temperature": 0})
        bench(server, lengths.workload(16, 0, None))
        full = bench(server, lengths.workload(64, 1, None, "full"))
        capacity_rps = _circle.capacity_rps(full)
        loads = {
            share: lengths.workload(80, 2 + k, share * capacity_rps, f"load {share}")
            for k, share in enumerate((LIGHT, HEAVY))
        }
        runs = {share: [] for share in loads}
        for _ in range(REPEATS):
            for share, workload in loads.items():
                runs[share].append(bench(server, workload))
        engine.check()
    return full, runs, log


def test_every_request_is_answered_to_the_token(measured):
    full, runs, _ = measured
    for one in (full, *runs[LIGHT], *runs[HEAVY]):
        r = one.records.requests
        assert (r.status == Status.FINISHED).all(), one.errors
        np.testing.assert_array_equal(r.prompt_tokens, one.workload.prompt_tokens)
        np.testing.assert_array_equal(r.output_tokens, one.workload.output_tokens)
        assert (r.first_token_s > r.arrival_s).all()
        assert (r.finished_s >= r.first_token_s).all()


def test_the_log_tells_the_tokens_that_were_computed(measured):
    """As many prompt tokens as were sent, and a decode for each token but the first."""
    full, runs, log = measured
    steps = read_iterations(log)
    every = [full, *runs[LIGHT], *runs[HEAVY]]
    prompts = sum(int(one.workload.prompt_tokens.sum()) for one in every)
    decodes = sum(int((one.workload.output_tokens - 1).sum()) for one in every)
    assert steps.prefill_tokens.sum() >= prompts
    assert steps.prefill_tokens.sum() < 1.2 * prompts  # and those of warm-up and probing
    assert decodes <= steps.decode_seqs.sum() < 1.2 * decodes


def test_records_of_a_real_engine_are_read_as_written(measured, tmp_path):
    one = measured[1][LIGHT][0]
    write_records(one, tmp_path / "run.parquet")
    again = read_records(tmp_path / "run.parquet")
    np.testing.assert_array_equal(again.records.requests.finished_s, one.records.requests.finished_s)
    assert again.facts["engine"] == "vllm"


def test_calibrated_to_one_load_the_simulation_tells_the_other(priced, measured):
    import _circle

    _, runs, log = measured
    found = calibrate(
        runs[LIGHT], priced, holdout=runs[HEAVY], iterations=read_iterations(log), allow=("doubts",)
    )
    held = [_circle.Run("live", "high", k, one) for k, one in enumerate(runs[HEAVY])]
    told = _circle.quantiles(_circle.simulated(replace(priced, cost=found.tables), held[0]), found.client_s)
    real = [_circle.quantiles(run.measured.records) for run in held]
    apart = _circle.spread(held)["live-high"]
    for metric in ("jct_p50", "tpot_p50"):
        middle = statistics.median(one[metric] for one in real)
        error = abs(told[metric] / middle - 1)
        assert error < WITHIN + apart[metric], f"{metric}: {error:.0%} off, repeats {apart[metric]:.0%} apart"


def test_two_runs_of_the_same_requests_are_compared_pair_by_pair(measured):
    first, second = measured[1][HEAVY][:2]
    found = compare(first, second)
    assert found.paired
    (jct,) = [e for e in found.errors if e.metric == "jct" and e.stat == "p50"]
    r = first.records.requests
    assert jct.a == pytest.approx(np.median(r.finished_s - r.arrival_s), rel=0.02)
