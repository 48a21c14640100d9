"""``lengthwise mcp``: the commands as tools of a Model Context Protocol server, for coding agents and assistants.

A tool takes the settings of the command with its name and returns its JSON, with intervals and notes. A tool's
docstring is the description that the agent reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from lengthwise.schema.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from lengthwise.config.scenario import Override

EXAMPLES = """\b
Examples:
  lengthwise mcp
  lengthwise mcp --port 8900
"""
INSTRUCTIONS = """lengthwise simulates, searches and explains deployments of large language models without a GPU.
Give a model and a GPU of the catalog with a request rate, or the text of a scenario file. Every estimate has a value,
the half-width of its 95 % sampling interval, and the 90 % interval of the cost model's error (model_low, model_high) if
it is known. Report these intervals with the value, and do not rank configurations that they cannot separate. Units are
in the names; "notes" limit the trust in an answer."""


def run(
    host: Annotated[
        str, Option(help="Address of --port; one that others reach needs a proxy with authentication.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, Option(min=0, max=65535, help="Serve streamable HTTP at this port, not standard input and output.")
    ] = None,
) -> None:
    """Serve simulate, capacity, search, explain, compare, plan and catalog as tools for agents (MCP)."""
    made = server()
    if port is None:
        made.run()
    else:
        made.run("streamable-http", host=host, port=port)


def server() -> MCPServer:
    """Return the MCP server. Raises MissingExtraError without the extra ``mcp``."""
    try:
        from mcp.server import MCPServer
    except ImportError as error:
        raise MissingExtraError("an MCP server", "mcp") from error
    made = MCPServer("lengthwise", instructions=INSTRUCTIONS, version=version("lengthwise"), log_level="ERROR")
    for tool in (simulate, capacity, search, explain, compare, plan, catalog):
        made.add_tool(_reporting_errors(tool), structured_output=True)
    return made


def _reporting_errors(tool: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Return a tool that runs in a thread beside the event loop. The agent reads an InputError with its notes."""
    import anyio.to_thread
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    async def run_tool(**arguments: Any) -> dict[str, Any]:
        try:
            return await anyio.to_thread.run_sync(partial(tool, **arguments))
        except InputError as error:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            raise ToolError(f"{error}{notes}") from error

    return run_tool


# Tools
Setting = str | int | float | bool | list[Any] | dict[str, Any]
Settings = dict[str, Setting] | None


def simulate(
    model: str | None = None,
    gpu: str | None = None,
    rate: float | None = None,
    tp: int | None = None,
    workload: str | None = None,
    scenario: str | None = None,
    settings: Settings = None,
) -> dict[str, Any]:
    """Simulate a deployment: latencies (TTFT, TPOT, TBT, JCT), throughput, goodput, utilization, cost and bottleneck.

    Args:
        model: Name of the catalog, or path of a config.json.
        gpu: Name of the catalog.
        rate: Requests per second.
        tp: Tensor parallelism. Default without a scenario: the smallest that fits.
        workload: A preset of the catalog, the path of a trace, or PROMPT/OUTPUT tokens such as "1000/200".
        scenario: Text of a scenario file in TOML. The other arguments replace its settings.
        settings: Further settings by key, such as {"deployment.replicas": 2, "slo.ttft": "2s", "run.seeds": 10}.
    """
    return _simulated(scenario, settings, model=model, gpu=gpu, rate=rate, tp=tp, workload=workload)


def compare(
    variants: dict[str, dict[str, Setting]],
    model: str | None = None,
    gpu: str | None = None,
    rate: float | None = None,
    tp: int | None = None,
    workload: str | None = None,
    scenario: str | None = None,
    settings: Settings = None,
) -> dict[str, Any]:
    """Simulate several variants of a deployment on the same requests, to compare them.

    Args:
        variants: For each name the settings in which it differs: {"H200": {"deployment.gpu": "H200"}}.
        model: As in simulate.
        gpu: As in simulate.
        rate: As in simulate.
        tp: As in simulate.
        workload: As in simulate.
        scenario: As in simulate.
        settings: As in simulate.
    """
    tables = [_table({"name": name} | changes) for name, changes in variants.items()]
    return _simulated(
        scenario, (settings or {}) | {"variants": tables}, model=model, gpu=gpu, rate=rate, tp=tp, workload=workload
    )


def _simulated(text: str | None, settings: Settings, **short: Any) -> dict[str, Any]:
    from lengthwise.report import results_json
    from lengthwise.usecases import short_options, simulate

    scenario = short_options.scenario_of(text, short_options.assignments(settings), **short)
    outcomes = simulate.run(scenario)
    return _with_notes(results_json([simulate.result_of(outcome) for outcome in outcomes]), scenario.notes)


def capacity(
    model: str | None = None,
    gpu: str | None = None,
    tp: int | None = None,
    workload: str | None = None,
    limits: dict[str, str | int | float] | None = None,
    scenario: str | None = None,
    settings: Settings = None,
) -> dict[str, Any]:
    """Find the largest request rate that a deployment sustains within limits, and the metrics at that rate.

    Args:
        model: Name of the catalog, or path of a config.json.
        gpu: Name of the catalog.
        tp: Tensor parallelism. Default without a scenario: the smallest that fits.
        workload: A preset of the catalog, the path of a trace, or PROMPT/OUTPUT tokens such as "1000/200".
        limits: Limits by metric: {"ttft.p90": "2s", "tbt.p99": "200ms"}.
        scenario: Text of a scenario file in TOML. The other arguments replace its settings.
        settings: Further settings by key, such as {"deployment.replicas": 2}.
    """
    from lengthwise.usecases import short_options
    from lengthwise.usecases.capacity import capacities, capacities_json

    scenario_ = short_options.scenario_of(
        scenario,
        [*_limits(limits), *short_options.assignments(settings)],
        model=model,
        gpu=gpu,
        tp=tp,
        workload=workload,
    )
    return _with_notes(capacities_json(capacities(scenario_)), scenario_.notes)


def search(
    model: str | None = None,
    gpus: list[str] | None = None,
    rate: float | None = None,
    workload: str | None = None,
    limits: dict[str, str | int | float] | None = None,
    scenario: str | None = None,
    settings: Settings = None,
) -> dict[str, Any]:
    """Find the deployment that serves a rate within limits at the lowest price; takes seconds to minutes.

    Without a scenario it tries tp of 1, 2, 4 and 8 on each GPU, with as few replicas as meet the limits. Choices are
    sorted, the best first; those whose intervals overlap are ties.

    Args:
        model: Name of the catalog, or path of a config.json.
        gpus: Names of the catalog, to compare.
        rate: Requests per second.
        workload: A preset of the catalog, the path of a trace, or PROMPT/OUTPUT tokens such as "1000/200".
        limits: Limits by metric. Default without a scenario: {"ttft.p90": "2s", "tbt.p99": "200ms"}.
        scenario: Text of a scenario file in TOML with a table [search]. The other arguments replace its settings.
        settings: Further settings by key, such as {"search.objective": "requests_per_dollar", "search.max_gpus": 16}.
    """
    from lengthwise import search as searching
    from lengthwise.report import search_json
    from lengthwise.usecases import search as usecase
    from lengthwise.usecases import short_options

    names = ",".join(gpus) if gpus else None
    changes = [*_limits(limits), *short_options.assignments(settings)]
    found = short_options.scenario_of(scenario, changes, model=model, gpus=names, rate=rate, workload=workload)
    with searching.threads(None) as workers:
        study = usecase.plan(found, workers)
    return _with_notes(search_json(study), found.notes)


def explain(
    model: str | None = None,
    gpu: str | None = None,
    tp: int | None = None,
    workload: str | None = None,
    scenario: str | None = None,
    settings: Settings = None,
) -> dict[str, Any]:
    """Show what fits in memory, and what each operator of typical steps costs and what bounds it, without a simulation.

    Args:
        model: Name of the catalog, or path of a config.json.
        gpu: Name of the catalog.
        tp: Tensor parallelism. Default without a scenario: the smallest that fits.
        workload: A preset of the catalog, the path of a trace, or PROMPT/OUTPUT tokens such as "1000/200".
        scenario: Text of a scenario file in TOML. The other arguments replace its settings.
        settings: Further settings by key, such as {"engine.max_num_seqs": 64}.
    """
    from lengthwise.usecases import short_options
    from lengthwise.usecases.explain import by_group, explanation_json
    from lengthwise.usecases.explain import explain as explained
    from lengthwise.usecases.variants import build

    made = short_options.scenario_of(
        scenario, short_options.assignments(settings), model=model, gpu=gpu, tp=tp, workload=workload
    )
    found = [explanation_json(one.name, explained(one)) for one in by_group(build(made))]
    return {"explanations": found, "notes": list(made.notes)}


def plan(app_file: str, nodes: list[str] | None = None, settings: Settings = None) -> dict[str, Any]:
    """Plan how several models of an application share GPUs: stages, makespan with its interval, idle GPUs.

    Args:
        app_file: Path of an application file (.toml or .yaml).
        nodes: GPUs, such as ["8xA100-80GB"]. Default: those of the file.
        settings: Settings of the file by key, such as {"calls.answer.max_tokens": 256}.
    """
    from lengthwise.apps.plan import plan_json
    from lengthwise.usecases import short_options
    from lengthwise.usecases.app_plan import PlanSettings
    from lengthwise.usecases.app_setup import load_app_request

    requested = load_app_request(Path(app_file), short_options.assignments(settings), nodes or ())
    planned = requested.planned(PlanSettings())
    assert planned.plan is not None  # GPUs are given
    found: dict[str, Any] = json.loads(plan_json(planned.plan))
    return found


def catalog(kind: str, name: str | None = None) -> dict[str, Any]:
    """List the names of the catalog, or one entry in detail with their sources.

    Args:
        kind: models, gpus, nodes, policies or workloads.
        name: An entry. Default: the names of all.
    """
    from lengthwise.cli.catalog import entry, names

    if name is None:
        return {"names": names(kind)}
    return {
        "entries": [
            {"name": title, **{key: value for key, value in properties if value}}
            for title, properties in entry(kind, name)
        ]
    }


# Arguments
def _limits(limits: dict[str, str | int | float] | None) -> list[Override]:
    from lengthwise.usecases import short_options

    return short_options.limits([f"{metric}={bound}" for metric, bound in (limits or {}).items()])


def _table(settings: dict[str, Any]) -> dict[str, Any]:
    """Return nested tables of settings by dotted key."""
    made: dict[str, Any] = {}
    for key, value in settings.items():
        *outer, last = key.split(".")
        table = made
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = value
    return made


def _with_notes(text: str, notes: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found | ({"notes": list(notes)} if notes else {})
