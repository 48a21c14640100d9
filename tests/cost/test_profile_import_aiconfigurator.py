"""AIConfigurator's tables read into profiles: units, conventions, and notes on what is not there."""

from __future__ import annotations

import polars as pl
import pytest
from imported_rows import rows

from lengthwise.cost.profiles import import_aiconfigurator
from lengthwise.schema.errors import MissingExtraError, UnknownNameError


def table(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"device": "NVIDIA H200", "kernel_source": "kernel"}
    n = len(columns["latency"])
    pl.DataFrame({name: [value] * n for name, value in about.items()} | columns).write_parquet(path)


def tables(root):
    place = root / "h200_sxm"
    table(
        place / "gemm/vllm/0.24.0/gemm_perf.parquet",
        op_name=["gemm"], gemm_dtype=["fp8_block"], m=[16], n=[32], k=[64], latency=[0.5],
    )  # fmt: skip
    shape = {"num_heads": [8, 8], "num_key_value_heads": [0, 2], "head_dim": [128] * 2, "window_size": [0, 128]}
    shape |= {"attn_dtype": ["bfloat16"] * 2, "kv_cache_dtype": ["fp8"] * 2, "beam_width": [1] * 2}
    for kind, isl, step in (("context", 256, 64), ("generation", 1, 255)):
        table(
            place / f"attention/vllm/0.24.0/{kind}_attention_perf.parquet",
            op_name=[f"{kind}_attention"] * 2, batch_size=[4, 4], isl=[isl] * 2, step=[step] * 2,
            latency=[0.25, 0.125], **shape,
        )  # fmt: skip
    table(
        place / "moe/vllm/0.24.0/moe_perf.parquet",
        op_name=["moe"] * 2, moe_dtype=["bfloat16"] * 2, num_tokens=[8] * 2, hidden_size=[2048] * 2,
        inter_size=[768] * 2, topk=[8] * 2, num_experts=[128] * 2, moe_tp_size=[2, 1], moe_ep_size=[1, 8],
        distribution=["balanced"] * 2, latency=[0.1, 0.2],
    )  # fmt: skip
    for version, ms in (("2.9", 9.0), ("2.29.2", 0.02)):
        table(
            place / f"comm/nccl/{version}/nccl_perf.parquet",
            op_name=["all_reduce", "all_gather"], nccl_dtype=["half"] * 2, num_gpus=[8] * 2,
            message_size=[1000] * 2, latency=[ms] * 2,
        )  # fmt: skip
    table(
        place / "comm/vllm/0.19.0/custom_allreduce_perf.parquet",
        op_name=["all_reduce"], allreduce_dtype=["bfloat16"], num_gpus=[2], message_size=[128], latency=[0.005],
        backend=["vllm_graph"],
    )  # fmt: skip
    return root


def test_aiconfigurator_is_in_milliseconds_and_elements(tmp_path):
    profile = import_aiconfigurator(tables(tmp_path), "h200_sxm", "vllm", "0.24.0")
    assert (profile["tp"] == 0).all()
    gemm = rows(profile, "gemm", "dtype", "tokens", "n", "k", "seconds")
    assert gemm == [("fp8_block", 16, 32, 64, 0.5e-3)]
    sums = rows(profile, "all-reduce", "backend", "dtype", "gpus", "bytes", "seconds")
    assert sums == [("vllm_graph", "bfloat16", 2, 256, 5e-6), ("nccl", "float16", 8, 2000, 0.02e-3)]
    moe = rows(profile, "fused moe", "tokens", "experts", "topk", "n", "k", "gpus", "backend")
    assert moe == [(8, 128, 8, 384, 2048, 2, "kernel (balanced)")]
    assert profile.metadata.gpu == "H200"


def test_aiconfigurator_s_attention_is_of_prompts_or_of_one_token_each(tmp_path):
    profile = import_aiconfigurator(tables(tmp_path), "h200_sxm", "vllm", "0.24.0")
    prefill = rows(profile, "prefill attention", "seqs", "chunk", "context", "heads", "kv_heads", "kv_dtype")
    assert prefill == [(4, 256, 64, 8, 8, "fp8")]
    decode = rows(profile, "decode attention", "seqs", "kv_tokens", "chunk", "seconds")
    assert decode == [(4, 1020, 0, 0.25e-3)]
    window = rows(profile, "decode window attention", "window", "kv_heads", "seconds")
    assert window == [(128, 2, 0.125e-3)]


def test_aiconfigurator_notes_name_rows_of_another_version_and_omissions(tmp_path):
    notes = " | ".join(import_aiconfigurator(tables(tmp_path), "h200_sxm", "vllm", "0.24.0").metadata.notes)
    assert "custom_allreduce_perf.parquet is of vllm 0.19.0" in notes
    assert "NCCL is 2.29.2" in notes
    assert "all_gather (1)" in notes
    assert "1 fused moe rows with experts spread over GPUs" in notes


def test_aiconfigurator_errors_list_what_is_present(tmp_path):
    tables(tmp_path)
    with pytest.raises(UnknownNameError, match="h200_sxm"):
        import_aiconfigurator(tmp_path, "h200", "vllm", "0.24.0")
    with pytest.raises(UnknownNameError, match="vllm"):
        import_aiconfigurator(tmp_path, "h200_sxm", "vlm", "0.24.0")
    with pytest.raises(UnknownNameError, match=r"0\.24\.0"):
        import_aiconfigurator(tmp_path, "h200_sxm", "vllm", "0.23.0")


def test_aiconfigurator_s_installed_package_is_found(tmp_path, monkeypatch):
    package = tmp_path / "aiconfigurator_core"
    package.mkdir()
    (package / "__init__.py").touch()
    tables(package / "systems" / "data")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(import_aiconfigurator(None, "h200_sxm", "vllm", "0.24.0")) == 8


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setattr("lengthwise.cost.profiles.aiconfigurator.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[aic\]"):
        import_aiconfigurator(None, "h200_sxm", "vllm", "0.24.0")
