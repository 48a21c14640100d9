"""Options and arguments that several commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.config.scenario import Override, Scenario

ScenarioFile = Annotated[Path, Argument(metavar="SCENARIO", help="A .toml or .yaml file.")]
OptionalScenario = Annotated[
    Path | None, Argument(metavar="[SCENARIO]", help="A .toml or .yaml file; or give --model and --gpu.")
]
Model = Annotated[str | None, Option(metavar="NAME", help="Model of the catalog, or a config.json.")]
Gpu = Annotated[str | None, Option(metavar="NAME", help="GPU of the catalog.")]
Tp = Annotated[int | None, Option(min=1, help="Tensor parallelism; without a file: the smallest that fits.")]
Rate = Annotated[str | None, Option(metavar="RPS", help="Requests per second.")]
Limits = Annotated[
    list[str] | None, Option(metavar="METRIC=BOUND", help="Limit, instead of [search.limits]; repeatable.")
]
WorkloadName = Annotated[
    str | None, Option("--workload", metavar="NAME", help="A preset, a trace file, or PROMPT/OUTPUT tokens: 1000/200.")
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

DEFAULT_WORKLOAD, DEFAULT_SEEDS = "chat-1m", 5  # without a scenario file


def setting(example: str) -> Any:
    """Return the repeatable option ``--set``, with an example in its help text."""
    return Option("--set", metavar="PATH=VALUE", help=f"Change a setting: {example}; repeatable.")


def overrides(set_: list[str] | None, cost: str | None) -> list[Override]:
    """Return the settings of ``--set`` and then ``--cost``. If two settings have the same key, the last one counts."""
    return [*(set_ or ()), *([] if cost is None else [("--cost", f"deployment.cost={cost}")])]


def scenario(file: Path | None, settings: Sequence[Override], **short: str | int | None) -> Scenario:
    """Read and check a scenario file, or make a scenario of the short options alone.

    Args:
        file: The scenario file, or None.
        settings: Settings of other options. They are applied after the short ones.
        short: Values of the command's short options by name (model, gpu or gpus, tp, rate, workload); None: not given.
            They replace those of the file.

    Raises InputError without a file if the model, the GPU or the rate is missing, and ScenarioError for wrong values.
    """
    from lengthwise import config

    given = {name: str(value) for name, value in short.items() if value is not None}
    settings = [*(pair for name, text in given.items() for pair in _set_by(name, text)), *settings]
    if file is not None:
        return config.load(file, settings)
    workload = given.get("workload", DEFAULT_WORKLOAD)
    is_given = {"--model": "model" in given, "--gpu": "gpu" in given or "gpus" in given}
    is_given["--rate"] = "rate" in given or "rate" not in short or Path(workload).is_file()
    if missing := [option for option, found in is_given.items() if not found]:
        raise InputError(
            f"give a scenario file, or {' and '.join(missing)}: --model llama-3.1-8b --gpu H100 --rate 20. The names "
            "are listed by lengthwise catalog models and lengthwise catalog gpus"
        )
    name = f"{given['model']} on {given.get('gpu') or given['gpus']}"
    about = f"{workload} at {given['rate']} requests/s" if "rate" in given else workload
    lines = [
        f"name = {json.dumps(name)}",
        f"run.seeds = {DEFAULT_SEEDS}",
        "" if Path(workload).is_file() else "workload.request_rate = 1.0",  # a trace has its own times
        "" if "workload" in given else f"workload.preset = {json.dumps(workload)}",
        SEARCH if "gpus" in given else "",
    ]

    def made(tp: str) -> Scenario:
        text = "\n".join([f"description = {json.dumps(about)}", *lines])
        return config.loads(f"{text}\n{tp}", source="the options", overrides=settings)

    if "gpus" in given or "tp" in given:
        return made("")
    from lengthwise.usecases.variants import smallest_tp

    if (tp := smallest_tp(made(""))) > 1:
        about += f"; tp {tp} is the smallest that fits"
    return made(f"deployment.tp = {tp}")


SEARCH = """[search]
objective = "cost_at_rate"
limits = { "ttft.p90" = "2s", "tbt.p99" = "200ms" }
space = { tp = [1, 2, 4, 8], replicas = "auto" }
"""
"""The search without a file."""


def _set_by(name: str, text: str) -> list[tuple[str, str]]:
    """Return the settings of a short option, each as (option, KEY=VALUE). Paths are absolute, to hold in any folder."""
    is_file = Path(text).is_file()
    value = json.dumps(str(Path(text).absolute())) if is_file else toml_value(text)
    if name == "workload" and (lengths := re.fullmatch(r"(\d+)/(\d+)", text)):
        pairs = [("workload.prompt", lengths[1]), ("workload.output", lengths[2])]
    elif name == "gpus":
        pairs = [("search.space.gpu", json.dumps(text.split(",")))]
    else:
        key = {"rate": "workload.request_rate", "workload": "workload.trace" if is_file else "workload.preset"}
        pairs = [(key.get(name, f"deployment.{name}"), value)]
    return [(f"--{name.removesuffix('s')}", f"{key}={setting}") for key, setting in pairs]


def limits(given: list[str] | None) -> list[Override]:
    """Return the setting of ``--limit``, [] without it. Raises InputError for a text that is not METRIC=BOUND."""
    pairs = []
    for text in given or ():
        metric, equals, bound = (part.strip() for part in text.partition("="))
        if not (metric and equals):
            raise InputError(f"--limit takes METRIC=BOUND, such as ttft.p90=2s; it is {text!r}")
        pairs.append(f"{json.dumps(metric)} = {toml_value(bound)}")
    return [("--limit", f"search.limits={{ {', '.join(pairs)} }}")] if given else []


def toml_value(text: str) -> str:
    """Return the text unchanged if it is a number, and otherwise as a TOML string."""
    try:
        float(text)
    except ValueError:
        return json.dumps(text)
    return text


def print_notes(notes: Iterable[str], *, quiet: bool = False) -> None:
    """Print a scenario's notes on standard error, one per line."""
    for note in () if quiet else notes:
        typer.echo(note, err=True)
