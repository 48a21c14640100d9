"""deploy(): names and knobs, and what cannot be deployed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from worlds import cost_tables

from lengthwise import catalog, cost, policy
from lengthwise.cost.operator_work import launched_kernels
from lengthwise.cost.roofline_tables import FRONT_SLOW_S, slow_front_log_sd
from lengthwise.engine import deploy, simulate
from lengthwise.schema.cost_tables import CostEvidence, Front, PartError
from lengthwise.schema.deployment import EngineLimits, Scheduler
from lengthwise.schema.errors import DoesNotFitError, InputError, PolicyError, UnknownNameError
from lengthwise.schema.speculation import Speculation
from lengthwise.schema.workload import Workload

MODEL, GPU = "llama-3-8b", "H100"


def test_names_become_a_deployment_that_runs():
    deployment = deploy(MODEL, GPU, replicas=2, scheduler="sarathi", limits=EngineLimits(max_num_seqs=32))
    assert deployment.name == "llama-3-8b on 2 x H100"
    assert deployment.parallel.gpus == 2
    assert deployment.scheduler == policy.scheduler("sarathi")
    assert deployment.kv.num_blocks * deployment.kv.block_size >= deployment.max_model_len
    assert deployment.price_per_hour_usd == pytest.approx(2 * catalog.gpu(GPU).price_per_hour_usd)
    r = simulate(Workload(np.zeros(4), np.full(4, 100), np.full(4, 20)), deployment).requests
    assert (r.first_token_s > 0).all()
    assert (r.first_token_s < r.finished_s).all()


def test_specs_and_tables_are_taken_as_they_are():
    model, tables = catalog.model(MODEL), cost_tables([16, 16])
    deployment = deploy(model, catalog.gpu(GPU), pp=2, cost=tables, num_blocks=4096)
    assert deployment.model is model
    assert deployment.cost is tables
    assert deployment.kv.num_blocks == 4096


@pytest.mark.parametrize(
    ("scheduler", "share"),
    [("vllm_v1", 0.0), ("srtf", 0.0), ("vllm_v0", 0.01), ("sarathi", 0.01), ("vidur_vllm", 0.01), ("orca", 0.0)],
)
def test_the_watermark_is_that_of_the_engine_unless_it_is_given(scheduler, share):
    assert deploy(MODEL, GPU, scheduler=scheduler).watermark == pytest.approx(share)
    own = deploy(MODEL, GPU, scheduler=scheduler, limits=EngineLimits(watermark=0.05))
    assert own.watermark == pytest.approx(0.05)


def test_a_prompt_may_take_the_last_block_under_vllm_v1():
    """Of 100 blocks, two requests of 50 each run at once, as vLLM v1 lets them; v0 holds one block back."""
    two = Workload(np.zeros(2), np.full(2, 50 * 16 - 1), np.full(2, 1))
    limits = EngineLimits(max_num_batched_tokens=4096, max_model_len=1600)
    started = {
        scheduler: simulate(two, deploy(MODEL, GPU, scheduler=scheduler, limits=limits, num_blocks=100)).requests
        for scheduler in ("vllm_v1", "vllm_v0")
    }
    assert started["vllm_v1"].scheduled_s[1] == pytest.approx(started["vllm_v1"].scheduled_s[0])
    assert started["vllm_v0"].scheduled_s[1] > started["vllm_v0"].scheduled_s[0]


@pytest.mark.parametrize(
    ("wrong", "report"),
    [
        ({"model": "lama-3-8b"}, "no model named 'lama-3-8b'. Did you mean: .*llama-3-8b"),
        ({"gpu": "H10"}, "no GPU named 'H10'. Did you mean: .*H100"),
        ({"node": "dgx-h10"}, "no node named 'dgx-h10'"),
        ({"scheduler": "vllm_v2"}, "no scheduler named 'vllm_v2'. Did you mean: .*vllm_v1"),
        ({"scheduler": Scheduler(rank="sfj")}, "no rank policy named 'sfj'. Did you mean: .*sjf"),
        ({"scheduler": Scheduler(victim="latest")}, "no victim policy named 'latest'"),
        (
            {"scheduler": Scheduler(preemption_mode="drop")},
            "no preemption mode named 'drop'. Known are: recompute, swap",
        ),
        ({"cost": "rofline"}, "no cost source named 'rofline'. Did you mean: roofline"),
        ({"cost": "tables:"}, "no cost source named 'tables:'"),
        ({"cost": "vidur"}, "no cost source named 'vidur'"),
        ({"host": "vlm"}, "no host named 'vlm'. Did you mean: vllm"),
        ({"memory_planner": "vidor"}, "named 'vidor'. Did you mean: vidur"),
    ],
    ids=str,
)
def test_unknown_names(wrong, report):
    arguments = {"model": MODEL, "gpu": GPU} | wrong
    with pytest.raises(UnknownNameError, match=report):
        deploy(arguments.pop("model"), arguments.pop("gpu"), **arguments)


@pytest.mark.parametrize("size", ["tp", "pp", "replicas"])
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_below_one(size, value):
    with pytest.raises(InputError, match=f"{size} must be a whole number of at least 1; it is {value}"):
        deploy(MODEL, GPU, **{size: value})


def test_a_model_that_does_not_fit_is_reported_with_the_remedy():
    with pytest.raises(DoesNotFitError, match=r"tp"):
        deploy("llama-2-70b", "A100-80GB")
    assert deploy("llama-2-70b", "A100-80GB", tp=4).kv.num_blocks > 0


@pytest.mark.parametrize(
    ("length", "report"),
    [(1, "max_model_len must be a whole number of at least 2; it is 1"), (1 << 30, "must be at most")],
)
def test_lengths_that_cannot_be(length, report):
    with pytest.raises(InputError, match=report):
        deploy(MODEL, GPU, limits=EngineLimits(max_model_len=length))


def test_too_few_blocks():
    limits = EngineLimits(max_model_len=1000)
    with pytest.raises(InputError, match="max_model_len must be at most 160 tokens"):
        deploy(MODEL, GPU, limits=limits, num_blocks=10)
    assert deploy(MODEL, GPU, num_blocks=10).max_model_len == 160


def test_policies_are_checked_before_anything_is_built():
    with pytest.raises(PolicyError, match="router must be a name or a function decorated with"):
        deploy(MODEL, GPU, scheduler=Scheduler(router=lambda waiting: 0))
    known = policy.known("rank")["sjf"]
    with pytest.raises(PolicyError, match="got one of axis 'rank'"):
        deploy(MODEL, GPU, scheduler=dataclasses.replace(policy.scheduler("orca"), memory=known))


def test_faster_hardware_is_faster():
    """Not a theorem of scheduling, but of one request alone."""
    one = Workload(np.zeros(1), np.array([1000]), np.array([50]))
    end_s = [simulate(one, deploy(MODEL, gpu)).end_s for gpu in ("A100-80GB", "H100", "B200")]
    assert end_s == sorted(end_s, reverse=True)


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_a_host_by_name_is_that_of_the_engine(name):
    given, own = cost.ENGINE_HOSTS[name], deploy(MODEL, GPU).cost
    tables = deploy(MODEL, GPU, host=name).cost
    seqs = np.arange(len(own.host_s))
    assert np.allclose(tables.host_s, given.step_s + given.sequence_s * seqs, rtol=1e-15)
    assert name in tables.evidence.source
    assert tables.front == Front(given.request_s, given.serial_s) != own.front == Front()
    launches_s = tables.layer_s - own.layer_s
    assert np.allclose(launches_s[: len(seqs)], 0.0)
    kernels = launched_kernels(catalog.model(MODEL), None, 1)
    assert np.allclose(launches_s[len(seqs) :], given.launch_s * kernels)
    for part in ("comm_s", "embedding_s", "head_s", "prefill_s", "decode_s"):
        assert np.array_equal(getattr(tables, part), getattr(own, part))
    slow_log_sd = slow_front_log_sd(tables.front, FRONT_SLOW_S)
    assert tables.evidence.errors == (*own.evidence.errors, PartError("front", 0.7, slow_log_sd))


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_only_requests_of_models_with_mla_wait_longer_before_a_named_engine(name):
    """A delay by the number of experts, fitted to DeepSeek, predicted twice the TTFT of Qwen3."""
    dense, experts, latent = (
        deploy(model, GPU, tp=8, host=name, limits=EngineLimits(weight_dtype="fp4")).cost.front
        for model in (MODEL, "qwen3-235b-a22b", "deepseek-v3")
    )
    assert experts == dense
    assert latent.request_s > dense.request_s > 0
    given = cost.HostOverhead(request_s=0.01, serial_s=0.001)
    assert deploy("deepseek-v3", "B200", tp=8, host=given).cost.front == Front(0.01, 0.001)


def test_the_slow_end_of_a_front_is_as_many_seconds_late_whatever_the_front():
    late_s = [front * math.exp(1.645 * slow_front_log_sd(Front(front), 0.3)) - front for front in (3e-3, 0.02, 0.12)]
    assert np.allclose(late_s, 0.3, rtol=2e-3)
    assert slow_front_log_sd(Front(serial_s=0.1), 0.3) is None


def test_a_step_with_a_prompt_is_launched_once_however_many_prompts_it_has():
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048)
    bare, launched = (deploy(MODEL, GPU, limits=limits, host=cost.HostOverhead(launch_s=s)) for s in (0.0, 1e-3))
    layers = catalog.model(MODEL).layers
    for prompts in (1, 8):
        burst = Workload(np.zeros(prompts), np.full(prompts, 128), np.full(prompts, 2))
        first_s = [simulate(burst, one).requests.first_token_s.max() for one in (bare, launched)]
        kernels = launched_kernels(catalog.model(MODEL), None, 1)
        assert first_s[1] - first_s[0] == pytest.approx(layers * kernels * 1e-3)


def test_decodes_with_proposed_tokens_are_in_a_cuda_graph():
    """Without, every verification was launched kernel by kernel, and MTP predicted twice as slow as measured."""
    limits = EngineLimits(max_num_seqs=16, max_num_batched_tokens=2048)
    drafted = {"limits": limits, "speculation": Speculation("mtp", 3, 0.7)}
    bare, launched = (deploy(MODEL, GPU, host=cost.HostOverhead(launch_s=s), **drafted).cost for s in (0.0, 1e-3))
    differs = launched.layer_s > bare.layer_s
    assert not differs[: 16 * 4 + 1].any()
    assert differs[16 * 4 + 1 :].all()


def test_models_with_experts_launch_more_kernels_and_narrow_weights_quantize_inputs():
    dense, experts, latent = map(catalog.model, (MODEL, "qwen3-235b-a22b", "deepseek-v3"))
    counts = [launched_kernels(model, "fp8", 8) for model in (dense, experts, latent)]
    assert counts == sorted(counts)
    assert counts[0] < counts[1]
    assert launched_kernels(dense, "fp8", 8) - launched_kernels(dense, "bfloat16", 8) == 4  # its four products
    assert launched_kernels(dense, "fp8", 8) - launched_kernels(dense, "fp8", 1) == 2  # all-reduces


def test_a_front_moves_the_first_token_and_no_other():
    requests = Workload(np.zeros(4), np.full(4, 100), np.full(4, 20))
    bare, late = (
        simulate(requests, deploy(MODEL, GPU, host=cost.HostOverhead(request_s=s))).requests for s in (0.0, 0.5)
    )
    assert np.allclose(late.first_token_s - bare.first_token_s, 0.5)
    assert np.allclose(late.finished_s - late.first_token_s, bare.finished_s - bare.first_token_s)


def test_the_default_host_leaves_every_source_as_it_is():
    tables = cost_tables([16, 16])
    assert deploy(MODEL, GPU, pp=2, cost=tables, host="default").cost is tables
    own = deploy(MODEL, GPU).cost
    assert own.host_s[0] == cost.HostOverhead().step_s
    assert own.evidence.source == "roofline of llama-3-8b on H100"


def test_a_slower_host_moves_every_token():
    requests = Workload(np.zeros(4), np.full(4, 100), np.full(4, 20))
    bare, slow = (
        simulate(requests, deploy(MODEL, GPU, host=cost.HostOverhead(step_s, 0.0))).requests for step_s in (0.0, 1e-3)
    )
    assert np.allclose(slow.first_token_s - bare.first_token_s, 1e-3)
    assert np.allclose(slow.finished_s - bare.finished_s, 20e-3)


def test_an_explicit_host_over_measured_tables_has_its_own_error():
    evidence = CostEvidence(errors=(PartError("host", 0.01), PartError("layer", 0.02)))
    known = dataclasses.replace(cost_tables([16, 16]), evidence=evidence)
    errors = deploy(MODEL, GPU, pp=2, cost=known, host="vllm").cost.evidence.errors
    assert errors[:2] == (PartError("host", 0.5), PartError("layer", 0.02))
    assert errors[2] == PartError(
        "front", 0.7, slow_front_log_sd(Front(cost.ENGINE_HOSTS["vllm"].request_s), FRONT_SLOW_S)
    )


@pytest.mark.parametrize("name", ["step_s", "sequence_s", "request_s", "serial_s", "launch_s"])
@pytest.mark.parametrize("seconds", [-1e-6, float("nan"), float("inf")])
def test_a_host_takes_finite_seconds(name, seconds):
    with pytest.raises(InputError, match=f"finite seconds from 0.*{name} {seconds!r}"):
        deploy(MODEL, GPU, host=cost.HostOverhead(**{name: seconds}))


def test_a_calibrated_host_is_not_replaced_in_silence(tmp_path):
    cost.save(deploy(MODEL, GPU).cost, tmp_path / "cost.npz")
    with pytest.raises(InputError, match="have a host overhead of their own; it is 'vllm'"):
        deploy(MODEL, GPU, cost=f"tables:{tmp_path / 'cost.npz'}", host="vllm")
