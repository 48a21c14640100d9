"""The tools of ``lengthwise mcp``, called with the client of the MCP SDK."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from lengthwise.cli.mcp import server

ROOT = Path(__file__).parents[2]
CHAT = {"model": "llama-3.1-8b", "gpu": "L40S"}
SMALL = {"workload.num_requests": 60, "run.seeds": 2, "run.model_draws": 16}


def answers(*calls, client=None):
    """Return the result of each call, a pair of tool and arguments, by one client."""

    async def call():
        async with Client(client or server()) as connected:
            return [await connected.call_tool(name, arguments) for name, arguments in calls]

    return anyio.run(call)


def answer(tool, **arguments):
    (found,) = answers((tool, arguments))
    assert not found.is_error, found.content
    assert json.loads(found.content[0].text) == found.structured_content
    return found.structured_content


def test_simulate_answers_as_the_command_does(cli, tmp_path):
    found = answer("simulate", **CHAT, rate=3, workload="200/30", settings=SMALL)
    path = tmp_path / "numbers.json"
    options = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    finished = cli(
        "simulate",
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "L40S",
        "--rate",
        3,
        "--workload",
        "200/30",
        *options,
        "--json",
        path,
    )
    assert finished.code == 0, finished.err
    by_command = json.loads(path.read_text())
    assert found["results"] == by_command["results"]
    ttft = found["results"][0]["summary"]["ttft_s"]["p50"]
    assert ttft["value"] > 0
    assert ttft["half_width"] is not None
    assert ttft["model_low"] < ttft["value"] < ttft["model_high"]


def test_compare_runs_variants_on_the_same_requests():
    variants = {"one": {}, "two": {"deployment.replicas": 2, "scheduler.router": "least_outstanding"}}
    found = answer("compare", **CHAT, rate=3, variants=variants, settings=SMALL)
    assert [one["name"] for one in found["results"]] == ["one", "two"]
    assert [one["deployment"]["replicas"] for one in found["results"]] == [1, 2]


def test_a_scenario_is_given_as_text_and_its_settings_are_replaced():
    text = (ROOT / "examples" / "chat-70b.toml").read_text()
    found = answer("simulate", scenario=text, rate=2, settings=SMALL | {"deployment.tp": 8})
    assert len(found["results"]) == 3
    assert {one["deployment"]["tp"] for one in found["results"]} == {8}


@pytest.mark.slow
def test_capacity_and_search_give_intervals():
    limits = {"ttft.p90": "2s"}
    small = {"search.seeds": 2, "search.precision": 0.2, "run.model_draws": 16}
    capacity = answer("capacity", **CHAT, workload="200/30", limits=limits, settings=small)["capacities"][0]
    assert capacity["limits"][0]["metric"] == "ttft.p90"
    assert capacity["requests_per_s"]["half_width"] is not None
    space = {"search.space.tp": [1], "search.seeds": 2, "search.precision": 0.2}
    found = answer("search", model="llama-3.1-8b", gpus=["L40S", "H100"], rate=3, limits=limits, settings=space)
    best = found["plans"][0]["best"]
    assert "L40S" in best
    assert {"L40S", "H100"} <= {one["settings"]["deployment.gpu"] for one in found["plans"][0]["choices"]}


def test_explain_catalog_and_plan():
    explained = answer("explain", **CHAT)["explanations"][0]
    step = explained["steps"][0]
    assert step["s"] == pytest.approx(sum(one["seconds"] for one in step["operators"]))
    assert "H100" in answer("catalog", kind="gpus")["names"]
    assert answer("catalog", kind="model", name="llama-3.1-8b")["entries"][0]["parameters"].startswith("8,030,261,248")
    plan = answer("plan", app_file=str(ROOT / "examples/apps/ensemble-tiny.toml"), nodes=["2xL40S"])
    assert plan["makespan"]["value"] > 0


def test_errors_name_what_must_hold():
    wrong = [
        ("simulate", {**CHAT, "gpu": "L40", "rate": 1}, "Did you mean: L40S"),
        ("simulate", {**CHAT, "rate": 1, "settings": {"deployment.tpp": 1}}, "deployment.tp"),
        ("simulate", CHAT, "--rate"),
        ("simulate", {"scenario": "[workload"}, "scenario"),
        ("catalog", {"kind": "models", "name": "llama-3.1-9b"}, "llama-3.1-8b"),
        ("plan", {"app_file": "missing.toml"}, "missing.toml"),
    ]
    for (_, _, message), found in zip(wrong, answers(*(one[:2] for one in wrong)), strict=True):
        assert found.is_error
        assert message in found.content[0].text
        assert "Traceback" not in found.content[0].text


def test_the_command_serves_on_standard_input_and_output():
    command = StdioServerParameters(command=sys.executable, args=["-m", "lengthwise.cli", "mcp"])

    async def call():
        async with Client(stdio_client(command)) as connected:
            tools = {tool.name: tool for tool in (await connected.list_tools()).tools}
            return tools, await connected.call_tool("explain", CHAT)

    tools, found = anyio.run(call)
    assert set(tools) == {"simulate", "compare", "capacity", "search", "explain", "plan", "catalog"}
    assert all(tool.description for tool in tools.values())
    assert not found.is_error
