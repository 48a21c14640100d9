"""Whether two runs are of one model is a matter of shape, not of the name that it is served under."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lengthwise import catalog
from lengthwise.metrics import compare
from lengthwise.schema.records import RunResult, shape_facts
from lengthwise.schema.workload import Workload

TINY = shape_facts(replace(catalog.model("llama-3-8b"), layers=2, hidden=64))
BEHIND = {"model": "tiny", "model_shape": TINY, "gpu": "H100", "tp": 1, "max_num_seqs": 64}


@pytest.fixture(scope="module")
def run(toy) -> RunResult:
    records = toy.records(120, seed=1, odd=False)
    r = records.requests
    return RunResult(records, Workload(r.arrival_s, r.prompt_tokens, r.output_tokens), "bench")


def warnings(run: RunResult, own: dict, other: dict) -> tuple[str, ...]:
    return compare(replace(run, metadata=own), replace(run, metadata=other), draws=10).warnings


def test_one_model_under_two_names_is_one_model(run) -> None:
    assert warnings(run, {"deployment": BEHIND}, {"model": "model", "deployment": BEHIND}) == ()
    renamed = BEHIND | {"model": "/models/tiny-v2"}
    assert warnings(run, {"deployment": BEHIND}, {"model": "model", "deployment": renamed}) == ()


def test_two_shapes_under_one_name_are_two_models(run) -> None:
    other = BEHIND | {"model_shape": TINY | {"layers": 4}}
    (warning,) = warnings(run, {"deployment": BEHIND}, {"deployment": other})
    assert warning == "They are of different models: tiny and tiny (layers 2 and 4)."


def test_an_unknown_served_name_yields_a_warning_with_the_remedy(run) -> None:
    (warning,) = warnings(run, {"deployment": BEHIND}, {"model": "model"})
    assert "They may be of different models, tiny and model: B records only the name model" in warning
    assert "lengthwise bench URL SCENARIO.toml --records" in warning


def test_names_of_the_catalog_are_known_by_its_shapes(run) -> None:
    alias = catalog.model("llama-3-8b").metadata.aliases[0]
    assert warnings(run, {"model": "llama-3-8b"}, {"model": f"/models/{alias}"}) == ()
    (warning,) = warnings(run, {"model": "llama-3-8b"}, {"model": "llama-3-70b"})
    assert warning.startswith("They are of different models: llama-3-8b and llama-3-70b (layers 32 and 80, ")


def test_differing_degrees_and_limits_are_warned_about(run) -> None:
    other = BEHIND | {"tp": 2, "max_num_seqs": 128, "gpu": "A100"}
    reported = warnings(run, {"deployment": BEHIND}, {"deployment": other})
    assert "Their deployments differ: tp 1 and 2, max_num_seqs 64 and 128." in reported
    assert any(warning.startswith("They are of different GPUs: ") for warning in reported)
