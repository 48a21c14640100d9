"""Laws that hold between the numbers of real runs."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise.engine import deploy, simulate
from lengthwise.metrics import Slo, request_columns, summarize
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload

CASES = {
    "plain": ({}, {}, {}),
    "pipeline and replicas": ({"pp": 2, "replicas": 2}, {}, {}),
    "little memory": ({"num_blocks": 300}, {}, {}),
    "impatient": ({"limits": EngineLimits(timeout_s=3.0)}, {}, {}),
    "closed loop, cut short": ({}, {"concurrency": 8}, {"time_limit_s": 2.0}),
}


def workload(**options) -> Workload:
    rng = np.random.default_rng(3)
    arrival_s = np.zeros(80) if options else np.cumsum(rng.exponential(1 / 20, 80))
    return Workload(arrival_s, rng.integers(20, 1500, 80), rng.integers(1, 80, 80), **options)


@pytest.fixture(scope="module", params=CASES)
def run(request):
    build, arrive, how = CASES[request.param]
    limits = {"limits": EngineLimits(max_model_len=2048)} | build
    deployment = deploy("llama-2-7b", "A100-80GB", **limits)
    records = simulate(workload(**arrive), deployment, engine="reference", **how)
    return records, deployment, summarize(records, deployment, slo=Slo(ttft_s=1.0, tpot_s=0.05))


def test_shares_and_utilisations_are_shares(run) -> None:
    _, _, summary = run
    h = summary.hardware
    for share in (h.busy_share, h.mfu, h.mbu, h.kv_utilization, summary.goodput.share):
        assert 0 <= share.value <= 1
    assert sum(s.value for s in h.time_shares.values()) == pytest.approx(1)
    assert h.time_shares["idle"].value >= 1 - h.busy_share.value - 1e-6


def test_every_token_but_a_requests_first_has_a_gap(run) -> None:
    records, _, summary = run
    produced = records.requests.output_tokens
    assert summary.tbt_s.count == (produced[produced > 0] - 1).sum()
    spent = records.gaps.gap_s @ records.gaps.count
    assert summary.tbt_s.mean.value == pytest.approx(spent / summary.tbt_s.count)


def test_times_of_a_request_add_up(run) -> None:
    records, _, summary = run
    c = request_columns(records)
    assert (c["queueing_delay_s"][~np.isnan(c["ttft_s"])] < c["ttft_s"][~np.isnan(c["ttft_s"])]).all()
    several = ~np.isnan(c["tpot_s"])
    total = c["ttft_s"] + c["tpot_s"] * (c["output_tokens"] - 1)
    assert total[several] == pytest.approx(c["jct_s"][several])
    assert summary.jct_s.count == (c["status"] == Status.FINISHED).sum() == summary.counts.finished
    assert c["output_tokens"].sum() >= summary.rates.output_tokens_per_s.value * summary.window_s.value - 1e-6


def test_power_and_price_follow_the_gpus(run) -> None:
    _, deployment, summary = run
    gpus, gpu = deployment.parallel.gpus, deployment.gpu
    assert gpus * gpu.idle_w <= summary.hardware.power_w.value <= gpus * gpu.tdp_w
    assert summary.hardware.cost.usd_per_million_tokens.value > 0
