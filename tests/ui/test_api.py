"""The JSON API: the tools of agents over HTTP, without files, described by OpenAPI."""

from __future__ import annotations

import json

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
        f"/api/{name}" for name in ("simulate", "capacity", "search", "explain", "compare", "catalog")
    }
    rate = described["paths"]["/api/simulate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert rate["properties"]["rate"]["description"] == "Requests per second."
    status, _, text = send(planner, "/api", method="GET")
    assert "Requests per second." in text


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


@pytest.mark.parametrize(("values", "message"), [({"rate": "5"}, "rate: "), ({"no": 1}, "no: ")])
def test_wrong_arguments_are_named(values, message):
    with pytest.raises(InputError, match=message):
        api.call(mcp.simulate, values)
