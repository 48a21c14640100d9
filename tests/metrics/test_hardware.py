from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lengthwise import catalog
from lengthwise.catalog import active_parameters, embedding_parameters, kv_bytes_per_token, weight_bytes
from lengthwise.engine import deploy, simulate
from lengthwise.metrics import gpu_power_w, model_flops, moved_bytes, summarize
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.specs import AttentionSpec, FfnSpec, ModelSpec
from lengthwise.schema.workload import Workload


@pytest.fixture(scope="module")
def records(toy):
    return toy.records(300)


def test_flops_are_counted_by_hand(toy, records) -> None:
    model, totals = toy.deployment().model, records.totals
    weights = 2 * (active_parameters(model) - embedding_parameters(model)) * totals.tokens[0]
    attention = 4 * 32 * 4096 * totals.attention_pairs[0]
    assert model_flops(totals, model) == pytest.approx(weights + attention)
    tied = dataclasses.replace(model, tied_embeddings=True)
    assert model_flops(totals, tied) == pytest.approx(2 * active_parameters(tied) * totals.tokens[0] + attention)


def test_bytes_are_counted_by_hand(toy, records) -> None:
    deployment, totals = toy.deployment(), records.totals
    expected = totals.steps[0] * weight_bytes(deployment.model, None)
    expected += totals.kv_read_tokens[0] * kv_bytes_per_token(deployment.model, None)
    assert moved_bytes(totals, deployment) == pytest.approx(expected)


def test_a_step_of_one_token_reads_only_the_experts_it_visits(toy, records) -> None:
    ffn = FfnSpec(14336, experts=8, experts_per_token=2, expert_intermediate=14336)
    model = ModelSpec("moe", 32, 4096, 32000, AttentionSpec(32, 8, 128), ffn, 4096)
    one = dataclasses.replace(records.totals, tokens=records.totals.steps, kv_read_tokens=np.zeros(1))
    many = dataclasses.replace(one, tokens=1000 * one.steps)
    steps = one.steps[0]
    deployment = toy.deployment(model=model)
    assert moved_bytes(one, deployment) == pytest.approx(steps * 2 * active_parameters(model), rel=1e-6)
    assert moved_bytes(many, deployment) == pytest.approx(steps * weight_bytes(model, None))


def test_one_long_prompt_does_not_let_every_decode_read_all_experts():
    """One request: a step with the prompt reads nearly all experts, each of its decodes those of one token."""
    model = catalog.model("qwen3-30b-a3b")
    deployment = deploy(model, "H100")
    records = simulate(Workload(np.zeros(1), np.array([1000]), np.array([101])), deployment)
    weights, active = weight_bytes(model, None), 2 * active_parameters(model)
    expected = weights + 100 * active + float(records.totals.kv_read_tokens.sum()) * kv_bytes_per_token(model, None)
    mbu = summarize(records, deployment).hardware.mbu.value
    assert mbu == pytest.approx(expected / (deployment.gpu.bandwidth_bytes_per_s * records.end_s), rel=0.02)
    assert mbu < 0.6


def test_utilisation_follows_from_flops_and_bytes(toy, records) -> None:
    deployment = toy.deployment()
    hardware = summarize(records, deployment).hardware
    assert hardware.mfu.value == pytest.approx(model_flops(records.totals, deployment.model) / 3e14 / records.end_s)
    assert hardware.mbu.value == pytest.approx(moved_bytes(records.totals, deployment) / 2e12 / records.end_s)
    assert hardware.busy_share.value == pytest.approx(records.totals.busy_s[0] / records.end_s)
    in_use = records.totals.kv_block_s[0] / records.end_s / toy.BLOCKS
    assert hardware.kv_utilization.value == pytest.approx(in_use)
    steps = records.steps
    length, seqs = steps.end_s - steps.start_s, steps.decode_seqs + steps.prefill_seqs
    assert hardware.batch_seqs.value == pytest.approx((seqs * length).sum() / length.sum())


def test_more_gpus_share_the_same_work(toy, records) -> None:
    one = summarize(records, toy.deployment()).hardware
    four = summarize(records, toy.deployment(parallel=Parallelism(tp=4))).hardware
    assert four.mfu.value == pytest.approx(one.mfu.value / 4)
    assert four.mbu.value == pytest.approx(one.mbu.value / 4)
    prices = [h.cost.usd_per_million_output_tokens.value for h in (one, four)]
    assert prices[1] == pytest.approx(4 * prices[0])


def test_a_narrower_dtype_has_its_own_peak_and_bytes(toy, records) -> None:
    gpu = dataclasses.replace(toy.deployment().gpu, peak_flops={"bfloat16": 3e14, "fp8": 6e14})
    wide = summarize(records, toy.deployment(gpu=gpu)).hardware
    narrow = summarize(records, toy.deployment(gpu=gpu, limits=EngineLimits(weight_dtype="fp8"))).hardware
    assert narrow.mfu.value == pytest.approx(wide.mfu.value / 2)
    assert narrow.mbu.value < wide.mbu.value


def test_time_shares_add_up_to_one(toy, records) -> None:
    for pp in (1, 2):
        deployment = toy.deployment(parallel=Parallelism(pp=pp))
        shares = {k: v.value for k, v in summarize(records, deployment).hardware.time_shares.items()}
        assert sum(shares.values()) == pytest.approx(1)
        assert shares["host"] == pytest.approx(records.totals.host_s[0] / records.end_s / pp)


def test_a_step_beyond_the_end_leaves_shares_that_add_up(toy, records) -> None:
    cut = dataclasses.replace(records, end_s=0.9 * records.totals.busy_s[0])
    hardware = summarize(cut, toy.deployment()).hardware
    assert hardware.busy_share.value == 1
    assert sum(share.value for share in hardware.time_shares.values()) == pytest.approx(1)
    assert hardware.time_shares["idle"].value == 0


def test_cost_is_price_over_tokens(toy, records) -> None:
    cost = summarize(records, toy.deployment()).hardware.cost
    r = records.requests
    finished = np.isfinite(r.finished_s)
    usd = 2.0 * records.end_s / 3600
    prompt, output = r.prompt_tokens[finished].sum(), r.output_tokens[finished].sum()
    assert cost.usd_per_million_prompt_tokens.value == pytest.approx(1e6 * usd / prompt)
    assert cost.usd_per_million_output_tokens.value == pytest.approx(1e6 * usd / output)
    assert cost.usd_per_million_tokens.value == pytest.approx(1e6 * usd / (prompt + output))


def test_power_lies_between_idle_and_full(toy) -> None:
    gpu = toy.deployment().gpu
    assert gpu_power_w(gpu, 0.0, 0.0, 0.0) == 60
    assert gpu_power_w(gpu, 1.0, 0.45, 0.1) == pytest.approx(400)
    assert gpu_power_w(gpu, 1.0, 0.9, 0.1) == 400
    assert gpu_power_w(gpu, 0.5, 0.225, 0.0) == pytest.approx(60 + 340 * 0.5)
    assert gpu_power_w(gpu, 1.0, 0.0, 1.0) == pytest.approx(60 + 340 * 0.4)


def test_energy_is_power_over_tokens(toy, records) -> None:
    hardware = summarize(records, toy.deployment(parallel=Parallelism(tp=2))).hardware
    one_gpu_w = gpu_power_w(toy.deployment().gpu, hardware.busy_share.value, hardware.mfu.value, hardware.mbu.value)
    assert hardware.power_w.value == pytest.approx(2 * one_gpu_w)
    finished = np.isfinite(records.requests.finished_s)
    tokens = records.requests.output_tokens[finished].sum()
    assert hardware.energy_j_per_output_token.value == pytest.approx(hardware.power_w.value * records.end_s / tokens)
