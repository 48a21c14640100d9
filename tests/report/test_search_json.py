from __future__ import annotations

import dataclasses
import json

import pytest

from lengthwise.report import write_search_json
from lengthwise.schema.errors import OutputError
from lengthwise.schema.plan import Plan, Study


def written(study, path) -> dict:
    write_search_json(path, study)
    return json.loads(path.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_everything_is_present_under_stable_keys(studies, tmp_path) -> None:
    study = studies.study()
    made = written(study, tmp_path / "a.json")
    assert (made["format"], made["version"], made["name"]) == ("lengthwise.study", 1, study.name)
    plan, reported = study.plans[0], made["plans"][0]
    assert set(reported) == {"best", *(field.name for field in dataclasses.fields(Plan))}
    assert reported["best"] == plan.best.key
    assert len(reported["choices"]) == len(plan.choices)
    first = reported["choices"][0]
    assert first["status"] == "ranked"
    assert first["binds"] == plan.best.bottleneck.binds
    assert {"reason", "group", "bound", "bound_rps", "cause"} < set(first)
    assert first["objective"] == {"value": plan.best.objective.value, "half_width": 9.0}
    assert first["points"][2]["values"]["ttft.p90"]["value"] == plan.best.points[2].value("ttft.p90")
    assert reported["frontiers"]["ttft.p90"][0]["cost_usd"] == plan.frontiers["ttft.p90"][0].cost_usd
    assert reported["limits"][0] == {"metric": "ttft.p90", "bound": 2.0, "at_least": False}


def test_what_is_not_known_is_null(studies, tmp_path) -> None:
    made = written(studies.study(), tmp_path / "a.json")
    shifts = made["plans"][0]["shifts"]
    assert any(shift["objective"] is None for shift in shifts)
    assert any(swap["ratio"] is None for swap in made["swaps"])
    assert made["plans"][0]["choices"][0]["bound"] is None
    hard = written(Study("x", (studies.plan("hard", (0.1, 0.01)),)), tmp_path / "b.json")
    assert hard["plans"][0]["best"] is None


def test_the_same_study_gives_the_same_bytes(studies, tmp_path) -> None:
    written(studies.study(), tmp_path / "a.json")
    written(studies.study(), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    with pytest.raises(OutputError):
        write_search_json(tmp_path, studies.study())
