"""This machine measured: every operator that a model's shapes name, in sane times."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lengthwise import catalog
from lengthwise.measure.operators import MeasurementSettings, measure_operators
from lengthwise.measure.operators import measure as collectives
from lengthwise.measure.operators.device import torch_module
from lengthwise.measure.operators.points import Reach, operators_of
from lengthwise.schema.errors import InputError, ProfileError

pytestmark = pytest.mark.torch

SMALL = {"max_tokens": 128, "max_seqs": 8, "max_context": 256, "threads": 1, "device": "cpu"}
BUDGET_S = 12
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny():
    return catalog.model_from_config(LLAMA, "tiny")


@pytest.fixture(scope="module")
def measured():
    torch_module()  # its import takes seconds of its own
    started = time.perf_counter()
    got = measure_operators(tiny(), MeasurementSettings(**SMALL), budget_s=BUDGET_S, target=0.0)
    return got, time.perf_counter() - started


def test_every_operator_of_the_model_has_rows(measured):
    profile = measured[0].profile
    named = {one.name for one in operators_of(tiny(), (1,), Reach(128, 8, 256, 2048))}
    assert set(profile.operators) == named
    assert profile.tensor_parallel == (1,)


def test_budget_is_met_within_a_few_seconds(measured):
    assert 0.9 * BUDGET_S < measured[1] < BUDGET_S + 5


def test_seconds_grow_with_tokens_and_flops_are_sane(measured):
    up = measured[0].profile.of("mlp up", 1)
    seconds = dict(zip(up["tokens"].tolist(), up["seconds"].tolist(), strict=True))
    assert seconds[128] > 2 * seconds[1]
    flops = 2 * up["tokens"] * up["n"] * up["k"] / up["seconds"]
    assert 1e8 < flops.max() < 5e11  # one core: 32 multiply-adds a cycle of 4 GHz are 2.6e11


def test_prompts_cost_more_with_context_and_decodes_with_cached_tokens(measured):
    prompts = measured[0].profile.of("prefill attention", 1)
    chunk = np.flatnonzero((prompts["chunk"] == 64) | (prompts["chunk"] == 128))
    assert prompts["seconds"][chunk].max() > prompts["seconds"][prompts["chunk"] == 1].min()
    decodes = measured[0].profile.of("decode attention", 1)
    few, many = decodes["kv_tokens"].argmin(), decodes["kv_tokens"].argmax()
    assert decodes["seconds"][many] > 2 * decodes["seconds"][few]


def test_profile_describes_the_machine(measured):
    metadata = measured[0].profile.metadata
    assert metadata.machine["threads"] == 1
    assert {"processor", "cores", "torch"} <= set(metadata.machine)
    assert metadata.source == "lengthwise"
    assert any("no TP degree above 1" in note for note in metadata.notes)
    assert (measured[0].profile["spread_s"] >= 0).all()
    json.dumps(metadata.machine)


def config(**changes):
    return catalog.model_from_config({**LLAMA, **changes}, "tiny")


def mla():
    return catalog.model_from_config(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "vocab_size": 512,
            "max_position_embeddings": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        "mla",
    )


def windowed():
    return config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)


@pytest.mark.parametrize("make", [mla, windowed])
def test_latents_experts_and_windows_are_measured(make):
    few = {**SMALL, "max_tokens": 64, "max_seqs": 4, "max_context": 128}
    profile = measure_operators(make(), MeasurementSettings(**few), budget_s=12, target=10.0).profile
    named = {one.name for one in operators_of(make(), (1,), Reach(64, 4, 128, 512))}
    assert set(profile.operators) == named


def test_killed_run_is_resumed(tmp_path):
    points = tmp_path / "points.jsonl"
    code = (
        "import json, sys; from lengthwise import catalog; from lengthwise.measure.operators import *;"
        "measure_operators(catalog.model_from_config(json.loads(sys.argv[1]), 'tiny'),"
        "MeasurementSettings(**json.loads(sys.argv[3])), budget_s=60, resume=sys.argv[2])"
    )
    one = subprocess.Popen([sys.executable, "-c", code, json.dumps(LLAMA), str(points), json.dumps(SMALL)])
    until = time.monotonic() + 60
    while time.monotonic() < until and (not points.exists() or points.read_bytes().count(b"\n") < 20):
        time.sleep(0.05)
    os.kill(one.pid, signal.SIGKILL)
    one.wait()
    before = points.read_bytes().splitlines()[:20]
    profile = measure_operators(tiny(), MeasurementSettings(**SMALL), budget_s=15, target=10.0, resume=points).profile
    assert points.read_bytes().splitlines()[:20] == before
    lines = [json.loads(line) for line in points.read_bytes().splitlines()[1:]]
    places = [(line["operator"], *line["at"], line["skew"]) for line in lines]
    assert len(places) == len(set(places)) == len(profile)
    with pytest.raises(ProfileError, match=r"another measurement .*dtype"):
        measure_operators(tiny(), MeasurementSettings(dtype="bfloat16", **SMALL), budget_s=15, resume=points)


def test_what_does_not_fit_the_memory_is_skipped():
    torch = torch_module()
    from lengthwise.measure.operators.bench import TorchBench, measure
    from lengthwise.measure.operators.device import Device
    from lengthwise.measure.operators.points import NoRoomError, Operator, Point

    bench = TorchBench(torch, tiny(), Device("cpu", "float32", 1))
    fits = Operator("mlp up", "rows", (1,), (16,), 1, {"n": 64, "k": 64})
    wide = Operator("mlp down", "rows", (1,), (16,), 1, {"n": 1 << 30, "k": 1 << 20})
    points = [Point(wide, (16,)), Point(fits, (16,))]
    with pytest.raises(NoRoomError):
        bench.prepare(points[0])
    skipped, done = sorted(measure(bench, points, 3), key=lambda outcome: not outcome.skipped)
    assert "GB are free" in skipped.skipped
    assert len(done.wall_s) == 3


def test_collectives_of_two_processes():
    outcomes, reason = collectives.measure_collectives(
        torch_module(), "cpu", 2, limit_s=60, sizes_bytes=(1 << 10, 1 << 22)
    )
    assert not reason
    seconds = {(o.point.operator.name, o.point.at[0]): o.seconds for o in outcomes}
    assert set(seconds) == {(name, size) for name in ("all-reduce", "send") for size in (1 << 10, 1 << 22)}
    assert seconds["send", 1 << 22] > seconds["send", 1 << 10]


def test_collectives_that_hang_are_terminated():
    outcomes, reason = collectives.measure_collectives(torch_module(), "cpu", 2, limit_s=0.2)
    assert not outcomes
    assert "more than 0 s" in reason


def test_missing_hardware_support_is_reported():
    torch = torch_module()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match=r"device cuda needs an NVIDIA GPU.*--device cpu"):
        measure_operators(tiny(), MeasurementSettings("cuda"))
    with pytest.raises(InputError, match="dtype must be one of bfloat16, float16, float32"):
        measure_operators(tiny(), MeasurementSettings("cpu", "fp8"))
