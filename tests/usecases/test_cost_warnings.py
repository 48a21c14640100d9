"""Every answer warns of cost tables that fit badly and of layers that the cost model simplifies."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lengthwise import EngineLimits, config, engine
from lengthwise.cli import main
from lengthwise.cost import MadeFor, model_error, save
from lengthwise.engine import deploy
from lengthwise.policy import scheduler
from lengthwise.schema.cost_tables import FitError
from lengthwise.usecases import capacity, explain, lab, simulate, variants

REQUESTED = """
[workload]
prompt = 50
output = 8
request_rate = 1
num_requests = 20
[deployment]
model = "llama-3-8b"
gpu = "H100"
[run]
seeds = 1
[search]
seeds = 2
precision = 0.1
[search.limits]
"ttft.p50" = "1s"
[search.space]
"engine.max_num_seqs" = [64]
"""
POOR = FitError("moe block", 0.53, 2.0)
WARNING = "held-out rows are off by more than 20% at the median (moe block by 53%)"


@pytest.fixture
def cost(tmp_path):
    """A function that keeps tables of these fits, and returns their source."""

    def made(*fits: FitError) -> str:
        served = variants.deployment(config.loads(REQUESTED))
        save(
            replace(served.cost, evidence=replace(served.cost.evidence, fit=fits)),
            tmp_path / "tables.npz",
            MadeFor.of_deployment(served),
        )
        return f"tables:{tmp_path / 'tables.npz'}"

    return made


def requested(source: str):
    return config.loads(REQUESTED, overrides=[f"deployment.cost={source}"])


@pytest.mark.slow
def test_a_simulation_a_capacity_and_an_explanation_warn_of_a_poor_fit(cost):
    scenario = requested(cost(POOR, FitError("rope", 0.01, 0.1)))
    (outcome,) = simulate.run(scenario)
    (found,) = capacity.capacities(scenario)
    (variant,) = variants.build(scenario)
    for notes in (outcome.notes, found.notes, explain.explain(variant).notes):
        (warning,) = [note for note in notes if WARNING in note]
        assert "rope" not in warning
        assert "`lengthwise profile fit`" in warning


@pytest.mark.slow
def test_a_search_warns_of_a_poor_fit(cost, tmp_path):
    path, out = tmp_path / "asked.toml", tmp_path / "out.json"
    path.write_text(REQUESTED, "utf-8")
    assert main(["search", str(path), "--cost", cost(POOR), "--json", str(out), "--jobs", "1", "--quiet"]) == 0
    assert WARNING in json.dumps(json.loads(out.read_text("utf-8")), ensure_ascii=False)


def test_a_lab_warns_of_a_poor_fit(cost):
    policies = 'policies = ["sjf"]\npredictors = ["oracle"]\nloads = [0.5]\nbatch_sizes = [4]\nseeds = 2'
    scenario = config.loads(f"{REQUESTED}\n[lab]\n{policies}", overrides=[f"deployment.cost={cost(POOR)}"])
    assert WARNING in lab.lab(scenario).answer[-1]


def test_a_good_fit_yields_no_note(cost):
    (outcome,) = simulate.run(requested(cost(FitError("moe block", 0.2, 2.0))))
    assert not [note for note in outcome.notes if "fit" in note]


def test_answers_note_how_the_layers_of_a_model_are_simplified():
    full = replace(scheduler("vllm_v1"), hybrid_kv_cache=False)
    gemma = model_error.deployment_notes(deploy("gemma-3-4b", "H100", scheduler=full))
    assert any("29 of 34 layers have a window of 1,024 tokens" in note for note in gemma)
    in_groups = model_error.deployment_notes(deploy("gemma-3-4b", "H100"))
    assert not any("layers have a window" in note for note in in_groups)
    assert any(
        "linear attention" in note for note in model_error.deployment_notes(deploy("qwen3-next-80b-a3b", "B200"))
    )
    assert model_error.deployment_notes(deploy("llama-3.1-8b", "H100")) == ()


def test_answers_note_that_hits_of_a_model_with_states_are_optimistic_without_groups():
    plain, grouped = (replace(scheduler("vllm_v1"), hybrid_kv_cache=value) for value in (False, True))
    cases = (
        ("qwen3-next-80b-a3b", plain, True),
        ("qwen3-next-80b-a3b", grouped, False),
        ("llama-3.1-8b", plain, False),
    )
    for name, chosen, is_noted in cases:
        limits = EngineLimits(max_model_len=4096, enable_prefix_caching=True)
        d = deploy(name, "B200", limits=limits, scheduler=chosen)
        assert any("the hits are optimistic" in note for note in model_error.deployment_notes(d)) == is_noted
        plain = deploy(name, "B200", limits=EngineLimits(max_model_len=4096))
        assert not any("hits" in note for note in model_error.deployment_notes(plain))


@pytest.mark.parametrize(("gpu", "vendors"), [("H100", None), ("H200", False), ("MI300X", True)])
def test_answers_note_that_a_transfer_between_two_kinds_of_gpu_is_not_checked(gpu, vendors):
    sides = (deploy("llama-3.1-8b", of, limits=EngineLimits(max_model_len=4096)) for of in ("H100", gpu))
    notes = [note for note in model_error.deployment_notes(engine.disaggregate(*sides)) if "KV transfer" in note]
    assert len(notes) == (vendors is not None)
    assert any("two vendors" in note for note in notes) == bool(vendors)
