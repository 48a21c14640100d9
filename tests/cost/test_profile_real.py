"""The importers on the real files, against the raw rows: units, conventions, and nothing absurd."""

from __future__ import annotations

import time

import numpy as np
import polars as pl
import pytest

from lengthwise import catalog
from lengthwise.cost.profiles import (
    describe_profile,
    import_aiconfigurator,
    import_llmservingsim,
    import_vidur,
    read_profile,
    write_profile,
)

LLM = "data/profiles/llmservingsim"
AIC = "data/profiles/aiconfigurator"


def absurd(profile):
    return [note for note in profile.metadata.notes if "10 ns" in note or "peak" in note or "minute" in note]


def test_vidur_s_rows(shared):
    folder = shared("data/profiles/vidur")
    profile = import_vidur(folder, catalog.model("llama-2-70b"), "a100", keep_surrogates=True)
    home = folder / "compute/a100/meta-llama/Llama-2-70b-hf"
    raw = pl.read_csv(home / "mlp.csv.gz").filter(pl.col("num_tensor_parallel_workers") == 4)
    own = profile.of("mlp up", 4)
    assert np.array_equal(own["tokens"], raw["num_tokens"])
    assert np.allclose(own["seconds"], raw["time_stats.mlp_up_proj.median"] / 1e3, rtol=1e-12)
    raw = pl.read_csv(home / "attention.csv.gz", infer_schema_length=None).unique()
    for tp in (2, 4):
        local = raw.filter(~pl.col("is_prefill"), pl.col("num_tensor_parallel_workers") == tp)
        kv = (local["batch_size"] * local["kv_cache_size"]).sum()
        assert profile.of("decode attention", tp)["kv_tokens"].sum() == kv
    assert profile.tensor_parallel == (1, 2, 4, 8)
    assert absurd(profile) == []
    assert profile.made_up("decode attention") == (4,)
    measured = import_vidur(folder, catalog.model("llama-2-70b"), "a100")
    assert measured.of("decode attention").tensor_parallel == (2,)
    assert len(measured.of("mlp up")) == len(profile.of("mlp up"))
    assert any("marked SURROGATE" in note and "left out" in note for note in measured.metadata.notes)


@pytest.mark.parametrize(("model", "device"), [("qwen-72b", "a40"), ("phi-2", "h100"), ("llama-3-8b", "a100")])
def test_vidur_s_other_models(shared, model, device):
    profile = import_vidur(shared("data/profiles/vidur"), catalog.model(model), device)
    assert {"mlp up", "qkv projection", "send"} <= set(profile.operators)
    assert absurd(profile) == []


@pytest.mark.parametrize("place", ["RTXPRO6000/meta-llama/Llama-3.1-8B", "RTXPRO6000/Qwen/Qwen3-32B"])
def test_llmservingsim_v1_s_rows(shared, place):
    folder = shared(f"{LLM}/v1/{place}/bf16")
    profile = import_llmservingsim(folder)
    assert profile.tensor_parallel == (1, 2)
    raw = pl.read_csv(folder / "tp2/attention.csv.gz")
    one = raw.filter(n_decode=64, kv_decode=4096, prefill_chunk=0)["time_us"].item()
    own = profile.of("decode attention", 2)
    row = (own["seqs"] == 64) & (own["kv_tokens"] == 64 * 4096) & (own["skew"] == 1)
    assert own["seconds"][row].tolist() == [one / 1e6]
    pure = raw.filter(pl.col("n_decode") == 0)
    assert len(profile.of("prefill attention", 2)) == len(pure)
    skew = pl.read_csv(folder / "tp2/skew.csv.gz")
    mixed = raw.filter((pl.col("n_decode") > 0) & (pl.col("prefill_chunk") > 0))
    assert len(profile.of("mixed attention", 2)) == len(mixed) + (skew["pc"] > 0).sum()
    assert absurd(profile) == []


def test_llmservingsim_v1_s_skewed_batches_lie_between_even_ones(shared):
    """A skewed batch takes longer than an even one of the same tokens, and a little so: not three times."""
    profile = import_llmservingsim(shared(f"{LLM}/v1/RTX4090/meta-llama/Llama-3.1-8B/bf16"))
    decode = profile.of("decode attention")
    even = decode.where((decode["skew"] == 1) & (decode["seqs"] == 64))
    skewed = decode.where((decode["skew"] > 1) & (decode["seqs"] == 64))
    order = np.argsort(even["kv_tokens"])
    at = np.interp(skewed["kv_tokens"], even["kv_tokens"][order], even["seconds"][order])
    assert 1.0 < np.median(skewed["seconds"] / at) < 1.5


def test_llmservingsim_v0_s_rows(shared):
    folder = shared(f"{LLM}/v0/H100/meta-llama/Llama-3.1-70B")
    profile = import_llmservingsim(folder)
    raw = pl.read_csv(folder / "tp4/layers.csv.gz").filter(pl.col("input") == 1000)
    ns = raw.filter(pl.col("layer_name").is_in(["q_proj", "k_proj", "v_proj"]))["latency(ns)"].sum()
    own = profile.of("qkv projection", 4)
    assert own["seconds"][own["tokens"] == 1000].tolist() == [ns / 1e9]
    assert profile.tensor_parallel == (1, 2, 4)
    assert absurd(profile) == []


@pytest.mark.parametrize(
    "place",
    ["A6000/microsoft/Phi-mini-MoE-instruct", "TPU-v6e-1/meta-llama/Llama-3.1-8B", "RTX3090/meta-llama/Llama-3.1-8B"],
)
def test_llmservingsim_v0_s_other_folders(shared, place):
    profile = import_llmservingsim(shared(f"{LLM}/v0/{place}"))
    assert {"rope", "lm head", "prefill attention"} <= set(profile.operators)


@pytest.fixture(scope="module")
def h200(shared):
    folder = shared(AIC)
    started = time.perf_counter()
    profile = import_aiconfigurator(folder, "h200_sxm", "vllm", "0.24.0")
    return folder, profile, time.perf_counter() - started


def test_all_h200_tables_are_imported_soon(h200, tmp_path):
    _, profile, duration_s = h200
    started = time.perf_counter()
    write_profile(profile, tmp_path / "h200.parquet")
    assert len(read_profile(tmp_path / "h200.parquet")) == len(profile)
    assert duration_s + time.perf_counter() - started < 20
    assert absurd(profile) == []


def test_aiconfigurator_s_rows(h200):
    folder, profile, _ = h200
    raw = pl.read_parquet(folder / "h200_sxm/gemm/vllm/0.24.0/gemm_perf.parquet")
    gemm = profile.of("gemm")
    assert np.array_equal(gemm["seconds"], raw["latency"] / 1e3)
    assert np.array_equal(gemm["tokens"] * gemm["k"], raw["m"] * raw["k"])
    raw = pl.read_parquet(folder / "h200_sxm/attention/vllm/0.24.0/generation_attention_perf.parquet")
    complete = raw.filter(pl.col("window_size") == 0)
    decode = profile.of("decode attention")
    assert np.array_equal(decode["kv_tokens"], complete["batch_size"] * complete["step"])


def test_messages_are_elements_times_their_width(h200):
    """NCCL takes as long for equal bytes of two widths, and no longer than the links allow."""
    _, profile, _ = h200
    sums = profile.of("all-reduce")
    nccl = sums.where((sums["backend"] == "nccl") & (sums["gpus"] == 2) & (sums["bytes"] == 2**29))
    assert sorted(nccl["dtype"].tolist()) == ["float16", "int8"]
    assert nccl["seconds"][0] == pytest.approx(nccl["seconds"][1], rel=0.05)
    assert 200e9 < 2**29 / nccl["seconds"].max() < 450e9


@pytest.mark.parametrize(
    ("system", "backend", "version"), [("h100_sxm", "vllm", "0.19.0"), ("a100_sxm", "trtllm", "1.0.0")]
)
def test_aiconfigurator_s_other_systems(shared, system, backend, version):
    profile = import_aiconfigurator(shared(AIC), system, backend, version)
    assert {"gemm", "prefill attention", "decode attention", "all-reduce"} <= set(profile.operators)
    assert absurd(profile) == []


def test_measured_products_come_near_the_data_sheet_and_not_above(shared):
    """Units that were wrong by a power of ten would show here."""
    profile = import_llmservingsim(shared(f"{LLM}/v1/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16"))
    shares = {v.operator: v.median for v in describe_profile(profile).operators if v.tp == 1}
    for operator in ("qkv projection", "mlp up", "mlp down", "lm head"):
        assert 0.5 < shares[operator].roofline < 1.0
    assert 0.5 < shares["decode attention"].bandwidth < 1.0
