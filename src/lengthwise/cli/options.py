"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from lengthwise.config.scenario import Override

ScenarioFile = Annotated[Path, Argument(metavar="SCENARIO", help="A .toml or .yaml file.")]
OptionalScenario = Annotated[
    Path | None, Argument(metavar="[SCENARIO]", help="A .toml or .yaml file; or give --model and --gpu.")
]


def names(kind: str) -> Callable[[str], list[str]]:
    """Return what completes a name of the catalog in a shell, or the last of several names with commas."""

    def complete(incomplete: str) -> list[str]:
        from lengthwise.cli import catalog

        earlier, comma, last = incomplete.rpartition(",")
        return [f"{earlier}{comma}{name}" for name in catalog.names(kind) if name.startswith(last)]

    return complete


Model = Annotated[
    str | None, Option(metavar="NAME", help="Name, name-fp8 or config.json of a model.", autocompletion=names("models"))
]
Gpu = Annotated[str | None, Option(metavar="NAME", help="GPU of the catalog.", autocompletion=names("gpus"))]
Tp = Annotated[int | None, Option(min=1, help="Tensor parallelism; without a file: the smallest that fits.")]
Rate = Annotated[str | None, Option(metavar="RPS", help="Requests per second.")]
Limits = Annotated[
    list[str] | None, Option(metavar="METRIC=BOUND", help="Limit, instead of [search.limits]; repeatable.")
]
WorkloadName = Annotated[
    str | None,
    Option(
        "--workload",
        metavar="NAME",
        help="A preset, a trace file, or PROMPT/OUTPUT tokens: 1000/200.",
        autocompletion=names("workloads"),
    ),
]
Columns = Annotated[
    list[str] | None, Option(metavar="NAME=COLUMN", help="Column of a CSV trace: prompt_tokens=input_len; repeatable.")
]
AppFile = Annotated[Path, Argument(metavar="APP", help="A .toml or .yaml file of an application.")]
Nodes = Annotated[
    list[str] | None, Option(metavar="NODE", help="GPUs: 8xA100-80GB, or a node of the catalog; repeatable.")
]
CostSource = Annotated[
    str | None, Option(metavar="SOURCE", help="roofline, profile:FILE, tables:FILE, vidur:DIR, vidur_forest[_grid]:DIR")
]
TraceFormat = Annotated[str | None, Option("--format", help="Format of the trace; default: detected.")]
LatencyBound = Annotated[str | None, Option(metavar="TIME", help="Latency bound: 5s; inf: none.")]
Threshold = Annotated[
    float | None,
    Option(metavar="SHARE", help="Resize prefill batches: prompts and decode batch stay within this of their means."),
]
Goodput = Annotated[
    list[str] | None,
    Option(metavar="METRIC=LIMIT", help="A limit for goodput: ttft=2s, tpot=100ms, jct=1min; repeatable."),
]
ApiKey = Annotated[
    str | None, Option(envvar="OPENAI_API_KEY", show_envvar=True, help="API key, sent as a bearer token.")
]
Jobs = Annotated[int | None, Option(min=1, help="Simulations in parallel; default: one per CPU.")]
HtmlReport = Annotated[Path | None, Option(help="Write a self-contained HTML report to this file.")]
JsonFile = Annotated[
    Path | None, Option(help="Write all numbers to this file; -: to standard output, without the table.")
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print no table and no progress.")]
NoTable = Annotated[bool, Option("--quiet", "-q", help="Print no table.")]


def setting(example: str) -> Any:
    """Return the repeatable option ``--set``, with an example in its help text."""
    return Option("--set", metavar="PATH=VALUE", help=f"Change a setting: {example}; repeatable.")


def overrides(set_: list[str] | None, cost: str | None) -> list[Override]:
    """Return the settings of ``--set`` and then ``--cost``. If two settings have the same key, the last one counts."""
    return [*(set_ or ()), *([] if cost is None else [("--cost", f"deployment.cost={cost}")])]


def print_notes(notes: Iterable[str], *, quiet: bool = False) -> None:
    """Print a scenario's notes on standard error, one per line."""
    for note in () if quiet else notes:
        typer.echo(note, err=True)
