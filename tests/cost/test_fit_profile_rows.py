"""Which rows of a profile speak: those of one backend, and of the GPU that its driver names."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_profiles import GPU, LIMITS, LONGEST, MODEL, NODE, planted, profile, target

from lengthwise import catalog
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.cost.estimators.fit import rows_for
from lengthwise.cost.profiles import write_profile
from lengthwise.engine import deploy
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.errors import ProfileError


def fitted(rows, **requested):
    return fit_profile(rows, Target(MODEL, GPU, NODE, Parallelism(), LIMITS, LONGEST), **requested)


@pytest.fixture(scope="module")
def several():
    """A profile whose MLP was measured by three libraries, the second twice as slow, the third three times."""
    rows = profile(operators=("mlp up",))
    names, slower, counts = ("cutlass", "Flash_Infer", "triton"), (1, 2, 3), (26, 25, 24)
    columns = {name: np.concatenate([rows[name][:n] for n in counts]) for name in rows.columns if name != "backend"}
    columns["seconds"] = columns["seconds"] * np.repeat(slower, counts)
    return replace(rows, columns={**columns, "backend": np.repeat(names, counts)})


@pytest.mark.parametrize(
    ("requested", "taken", "slower"),
    [
        ("", "cutlass taken (the most rows", 1),
        ("flash_infer", "Flash_Infer taken (as requested", 2),
        ("TRI", "triton taken (as", 3),
    ],
)
def test_of_several_backends_one_is_used_and_the_others_are_named(several, requested, taken, slower):
    tables, report = fit_profile(
        several, Target(MODEL, GPU, NODE, Parallelism(), LIMITS, LONGEST), estimator="tables", backend=requested
    )
    alone = fitted(profile(operators=("mlp up",)), estimator="tables")[0]
    mlp = planted("mlp up", tokens=np.array([16])).seconds[0]
    assert tables.layer_s[16] - alone.layer_s[16] == pytest.approx((slower - 1) * mlp, abs=0.1 * mlp)
    (note,) = (note for note in report.notes if "left out" in note)
    assert f"mlp up: rows of {taken}" in note
    assert all(name in note for name in ("cutlass", "Flash_Infer", "triton"))
    assert note in tables.evidence.source


def test_products_of_quantized_weights_are_kept_where_another_library_has_more_of_16_bits():
    """AIConfigurator's tables of vLLM: bfloat16 by torch, more of them, and FP8 by CUTLASS."""
    shape = {"operator": "gemm", "tp": 0, "n": 4096, "k": 4096, "tokens": 16, "seconds": 1e-5}
    wide = [shape | {"dtype": "bfloat16", "backend": "torch", "tokens": 2**n} for n in range(8)]
    narrow = [shape | {"dtype": "fp8", "backend": "cutlass", "tokens": 2**n} for n in range(6)]
    limits = replace(LIMITS, weight_dtype="fp8")
    found = rows_for(
        profile(operators=(), more=(*wide, *narrow)), Target(MODEL, GPU, NODE, Parallelism(), limits, LONGEST)
    )
    assert sorted(found.kernels["backend"].tolist()) == ["cutlass"] * 6 + ["torch"] * 8


def test_a_backend_that_was_not_measured_is_refused_with_those_that_were(several, tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.cost.tables.cache_folder", lambda _: tmp_path / "cache")
    write_profile(several, tmp_path / "p.parquet")
    with pytest.raises(
        ProfileError, match="no rows of the backend fa3; its backends are: Flash_Infer, cutlass, triton"
    ):
        deploy("llama-3.1-8b", "H100", cost=f"profile:{tmp_path / 'p.parquet'}#tables@fa3")
    made = deploy("llama-3.1-8b", "H100", cost=f"profile:{tmp_path / 'p.parquet'}#@triton")
    assert "rows of triton taken" in made.cost.evidence.source


def attention(prefill, decode, mlp=""):
    """A profile whose attention was measured with these backends."""
    rows = profile(operators=("mlp up", "prefill attention", "decode attention"))
    names = {"mlp up": mlp, "prefill attention": prefill, "decode attention": decode}
    return replace(rows, columns={**rows.columns, "backend": np.array([names[o] for o in rows["operator"].tolist()])})


def test_attention_of_another_backend_than_the_deployments_is_refused():
    with pytest.raises(
        ProfileError, match="of the attention backend FA3; it has decode attention with FLASHINFER alone"
    ):
        rows_for(attention("vllm_fa3", "FLASHINFER"), target(), "FA3")
    with pytest.raises(ProfileError, match="no rows of the backend fa3; its backends are: FLASHINFER"):
        rows_for(attention("FLASHINFER", "FLASHINFER"), target(), "fa3")
    rows_for(attention("vllm_fa3", "vllm_fa3 graph"), target(), "FA3")


def test_windows_that_the_deployment_has_not_need_not_be_of_its_backend():
    window = {"operator": "decode window attention", "tp": 1, "backend": "FLASHINFER", "seconds": 1e-5}
    rows = profile(operators=("mlp up",), more=(window, window | {"operator": "decode attention", "backend": "FA3"}))
    assert not rows_for(rows, target(), "FA3").notes


@pytest.mark.parametrize(
    ("requested", "end"), [("", ": right if the deployment's is the same"), ("cutlass", ", not with cutlass")]
)
def test_the_measured_attention_backend_is_noted_if_the_deployment_names_none(requested, end):
    found = rows_for(attention("FA3", "FLASHINFER", mlp="cutlass"), target(), requested)
    assert found.notes == (f"measured prefill attention with FA3; decode attention with FLASHINFER{end}",)
    assert rows_for(attention("", ""), target()).notes == ()


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_profile_of_a_device_as_its_driver_calls_it_is_of_the_catalogs_gpu(device, gpu):
    rows = profile(operators=("norms",), gpu=device)
    assert rows_for(rows, replace(target(), gpu=catalog.gpu(gpu))).is_same_model_and_gpu
    assert rows_for(rows, replace(target(), gpu=catalog.gpu("MI300X"))).is_same_model_and_gpu == (gpu == "MI300X")


@pytest.mark.parametrize("device", ["Tesla T4", "NVIDIA A10G"])
def test_a_device_that_no_catalog_knows_is_refused_by_its_name(device):
    with pytest.raises(ProfileError, match=rf"is of {device}, which is not H100 and in no catalog") as reported:
        fitted(profile(operators=("norms",), gpu=device))
    assert f'aliases = ["{device}"]' in str(reported.value)


def test_a_gpu_file_with_an_alias_takes_a_profile_of_that_name(tmp_path):
    own = (Path(__file__).parents[2] / "examples" / "gpus" / "cpu.toml").read_text("utf-8")
    rows = profile(operators=("norms",), gpu="AMD EPYC")
    for name, text in (
        ("alias", own + 'aliases = ["AMD EPYC"]\n'),
        ("heading", own.replace("[EPYC-9654]", '["AMD EPYC"]')),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text(text, "utf-8")
        assert rows_for(rows, replace(target(), gpu=catalog.gpu(str(path)))).is_same_gpu
