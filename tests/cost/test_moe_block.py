"""Blocks of experts by the experts that a step activates, as LLMServingSim's profiler measures them."""

from dataclasses import replace

import numpy as np
import pytest
from imported_rows import rows

from lengthwise import catalog
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.cost.profiles import import_llmservingsim
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import ProfileError

MODEL, GPU = catalog.model("qwen3-30b-a3b"), catalog.gpu("RTX-PRO-6000")
TOKENS, EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), (8, 16, 32, 64, 128)
META = """
vllm_version: 0.19.0
gpu: NVIDIA RTX PRO 6000 Blackwell Server Edition
hardware: RTXPRO6000
model: {model}
variant: bf16
measurement_iterations: 3
"""


def block_us(tokens, activated):
    """Reading an expert's 9.4 MB takes 6.5 us; each token adds 0.2 us."""
    return 15 + 6.5 * activated + 0.2 * tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of LLMServingSim v1 whose block of experts follows ``block_us``, with a grid of twice as many GPUs."""
    place = tmp_path_factory.mktemp("moe") / "bf16"
    (place / "tp1").mkdir(parents=True)
    (place / "meta.yaml").write_text(META.format(model="Qwen/Qwen3-30B-A3B"))
    grid = [(tokens, experts) for tokens in TOKENS for experts in EXPERTS if experts <= 8 * tokens]
    lines = [f"1,{tokens},{experts},{block_us(tokens, experts)}" for tokens, experts in grid]
    lines += [f"2,{tokens},{experts // 2},{block_us(tokens, experts) / 2}" for tokens, experts in grid]
    (place / "tp1" / "moe.csv").write_text("\n".join(["ep,tokens,activated_experts,time_us", *lines]))
    norms = [f"layernorm,{tokens},{2 + tokens / 500}" for tokens in TOKENS]
    (place / "tp1" / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *norms]))
    return place


def target(model=MODEL, tp=1):
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048)
    return Target(model, GPU, catalog.default_node(GPU, tp), Parallelism(tp), limits, 4096)


def hit(tokens):
    """Experts that evenly routed tokens activate; routing is a little uneven (``Curves.routing_power``)."""
    return 128 * (1 - (1 - 8 / 128) ** (tokens**0.96))


def test_the_importer_keeps_the_rows_of_one_rank(folder):
    profile = import_llmservingsim(folder)
    found = rows(profile, "moe block", "tp", "tokens", "experts")
    assert len(found) == 50
    assert {row[0] for row in found} == {1}
    assert max(row[2] for row in found) == 128
    assert "50 moe rows with experts spread over GPUs (EP) are left out" in " ".join(profile.metadata.notes)


@pytest.mark.parametrize("estimator", ["auto", "tables", "physics"])
def test_a_step_takes_the_time_of_the_experts_that_it_activates(folder, estimator):
    tables, report = fit_profile(import_llmservingsim(folder), target(), estimator=estimator)
    (fit,) = (one for one in report.operators if one.name == "moe block")
    assert fit.median_error < 0.1
    shares = "; ".join(report.filled)
    assert "experts" not in shares
    assert "router" not in shares
    measured = ("router", "experts up", "expert activation", "experts down", "norms")
    for tokens in (8, 64, 256, 2048):
        rest_s = sum(work.seconds for work in target().operators().layer(tokens) if work.name not in measured)
        norms_s = 2e-6 * (2 + tokens / 500)
        block_s = 1e-6 * block_us(tokens, hit(tokens))
        assert tables.layer_s[tokens] == pytest.approx(block_s + rest_s + norms_s, rel=0.12)


def test_another_degree_activates_as_many_experts_of_half_the_width(folder):
    one, two = (fit_profile(import_llmservingsim(folder), target(tp=tp))[0].layer_s for tp in (1, 2))
    assert two[64] / one[64] == pytest.approx(0.55, abs=0.1)


def test_a_fused_kernel_in_a_shard_is_of_an_earlier_import(folder):
    profile = import_llmservingsim(folder)
    operators = np.where(profile["operator"] == "moe block", "fused moe", profile["operator"])
    old = replace(profile, columns={**profile.columns, "operator": operators})
    with pytest.raises(ProfileError, match=r"activated experts\. Import the profile again"):
        fit_profile(old, target())


@pytest.mark.parametrize("named", ["Qwen/Qwen3-30B-A3B-FP8", "x/Qwen3-30B-A3B-Instruct", "qwen3-30b-a3b-2507"])
def test_a_variant_of_the_measured_model_is_the_measured_model(folder, named):
    (folder / "meta.yaml").write_text(META.format(model=named))
    profile = import_llmservingsim(folder)
    assert profile.metadata.model in ("qwen3-30b-a3b", "qwen3-30b-a3b-2507")
    for model in ("qwen3-30b-a3b", "qwen3-30b-a3b-2507"):
        notes = " ".join(fit_profile(profile, target(catalog.model(model)))[1].notes)
        assert "carried" not in notes
