"""The JSON API: the tools of agents over HTTP, without files, described by OpenAPI."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lengthwise.cli import mcp
from lengthwise.schema.errors import InputError
from lengthwise.ui import api

SHORT = {"model": "llama-3.1-8b", "gpu": "H100", "rate": 5.0}


def test_a_call_returns_what_the_tool_of_agents_returns(planner):
    from tests.ui.test_plan import send

    status, _, text = send(planner, "/api/simulate", json.dumps(SHORT).encode())
    assert status == 200
    found, expected = json.loads(text)["results"][0], mcp.simulate(**SHORT)["results"][0]
    assert found["summary"]["ttft_s"]["p90"]["value"] == pytest.approx(expected["summary"]["ttft_s"]["p90"]["value"])
    status, _, text = send(planner, "/api/openapi.json", method="GET")
    described = json.loads(text)
    assert set(described["paths"]) == {
        f"/api/{name}" for name in ("simulate", "capacity", "search", "explain", "compare", "plan", "catalog")
    }
    rate = described["paths"]["/api/simulate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert rate["properties"]["rate"]["description"] == "Requests per second."
    status, _, text = send(planner, "/api", method="GET")
    assert "Requests per second." in text
    status, _, text = send(planner, "/api/plan", b"{}")
    assert (status, json.loads(text)["error"]) == (400, "application is missing; /api lists the arguments of plan")


@pytest.mark.parametrize(
    "values",
    [
        SHORT | {"workload": "/etc/passwd"},
        SHORT | {"model": "~/config.json"},
        SHORT | {"settings": {"scheduler.policy": "./evil.py:rank"}},
        SHORT | {"settings": {"scheduler.rank": "os:system"}},
        SHORT | {"settings": {"deployment.cost": '"tables:\\u002fetc"'}},
        {"scenario": 'deployment.model = "llama-3.1-8b"\nworkload.trace = "\\u002fetc/passwd"'},
        {"scenario": 'deployment.gpu = "pyproject.toml"'},
    ],
)
def test_no_argument_names_a_file_or_a_python_object(values):
    with pytest.raises(InputError, match="reads no files and no Python objects"):
        api.call(mcp.simulate, values)


@pytest.mark.parametrize("key", ['scheduler.policy="evil.py:rank" #', "workload.trace=x\nrun.seeds", "", "a..b"])
def test_a_key_of_settings_is_no_other_setting(key):
    with pytest.raises(InputError, match="settings need keys"):
        api.call(mcp.simulate, SHORT | {"settings": {key: 1}})


@pytest.mark.parametrize(
    ("tool", "values"),
    [
        ("simulate", SHORT | {"settings": {"scheduler.policy": "a+b/../x.py:rank"}}),
        ("search", {"gpus": ["H100"], "settings": {"search.space.scheduler": ["vllm_v1", "a+b/../x.py:rank"]}}),
    ],
)
def test_the_planner_runs_no_python_object_that_the_checks_of_texts_miss(planner, tool, values):
    from tests.ui.test_plan import send

    fields = {"model": SHORT["model"], "rate": SHORT["rate"], **values}
    _, _, text = send(planner, f"/api/{tool}", json.dumps(fields).encode())
    assert "runs no Python objects" in text  # as an error, or as the reason for which a search rejects the value


def test_settings_of_a_restricted_process_name_only_allowed_files(tmp_path):
    program = """
import sys
from pathlib import Path
from lengthwise.config import files
from lengthwise.schema.errors import InputError
own, other = (Path(one) for one in sys.argv[1:])
assert files.resolved("other/secret", own.parent) == other / "secret"
files.allow_only(own)
assert files.resolved("file", own) == own / "file"
assert files.resolved("no such name", own.parent) == own.parent / "no such name"
def refused(read, *names):
    try:
        read(*names)
    except InputError:
        return True
for text in ("other/secret", str(other / "secret"), "own/../other/secret", "own/link"):
    assert refused(files.resolved, text, own.parent), text
assert refused(files.python_object, "os:system", own)
files.also_allow(other)
assert files.resolved("other/secret", own.parent) == other / "secret"
"""
    own, other = tmp_path / "own", tmp_path / "other"
    for place, name in ((own, "file"), (other, "secret")):
        place.mkdir()
        (place / name).write_text("x")
    (own / "link").symlink_to(other / "secret")
    subprocess.run([sys.executable, "-c", program, str(own), str(other)], check=True, timeout=60)


@pytest.mark.parametrize(("values", "message"), [({"rate": "5"}, "rate: "), ({"no": 1}, "no: ")])
def test_wrong_arguments_are_named(values, message):
    with pytest.raises(InputError, match=message):
        api.call(mcp.simulate, values)
