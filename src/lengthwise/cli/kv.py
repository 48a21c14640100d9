"""``lengthwise kv``."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lengthwise.cli import options, outputs, progress
from lengthwise.cli.options import CostSource, HtmlReport, JsonFile, Quiet, TraceFormat
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.schema.kv import KvStudy

EXAMPLES = """\b
Examples:
  lengthwise kv examples/multi-turn.toml --memory 256 --report kv.html
  lengthwise kv examples/agents.toml --load "local SSD=6" --memory 500 --memory-price 0.005
  lengthwise kv trace.jsonl --model llama-3.1-8b
"""
SCENARIOS = (".toml", ".yaml", ".yml")
UNITS = {"": 1.0, "gb": 1.0, "gib": 2**30 / 1e9, "tb": 1000.0, "tib": 2**40 / 1e9}  # GB


def run(
    source: Annotated[str, Argument(metavar="SCENARIO|TRACE", help="A .toml or .yaml file, or a trace.")],
    *,
    set_: Annotated[list[str] | None, options.setting("engine.block_size=32")] = None,
    variant: Annotated[str | None, Option(metavar="NAME", help="Variant of the scenario; default: the first.")] = None,
    cost: CostSource = None,
    seeds: Annotated[int | None, Option(min=1, help="Repetitions; the table shows 95 % intervals.")] = None,
    memory: Annotated[
        list[str] | None,
        Option(metavar="GB", help="Memory for the KV cache of a replica, as 64 or 64GiB; 1 GB: 1e9 bytes; repeatable."),
    ] = None,
    memory_price: Annotated[
        float | None,
        Option(metavar="USD", help="Price of a GB of memory for an hour; default: engine.kv_offloading's."),
    ] = None,
    load: Annotated[
        list[str] | None,
        Option(metavar="NAME=GB/S", help="Load prefixes from NAME at this rate of each GPU; repeatable."),
    ] = None,
    prompts_only: Annotated[bool, Option("--prompts-only", help="Cache no blocks of outputs.")] = False,
    model: Annotated[str | None, Option(help="Of a trace: model whose KV cache gives sizes in GB.")] = None,
    block_size: Annotated[int | None, Option(min=1, help="Of a trace: tokens of a block.")] = None,
    format_: TraceFormat = None,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Show what a prefix cache finds at each size of memory, and whether the memory pays.

    One pass over the requests gives the hit rate of an LRU cache at all sizes, for requests served one after the other
    with vLLM's rules; models whose layers form KV cache groups are simulated with each size. A scenario adds the GPU
    pool, the time that hits save, and the break-even prefix of loading.
    """
    from lengthwise import config

    is_scenario = source.lower().endswith(SCENARIOS)
    of_scenario = {"--set": set_, "--variant": variant, "--cost": cost, "--seeds": seeds, "--load": load}
    of_trace = {"--model": model, "--block-size": block_size, "--format": format_}
    for name, value in (of_trace if is_scenario else of_scenario | {"--memory-price": memory_price}).items():
        if value is not None:
            if is_scenario:
                raise InputError(f"{name} needs a trace; {source} is a scenario; change it with --set")
            file = f'workload.trace = "{source}" and deployment = {{ model = "{model or "..."}", gpu = "..." }}'
            raise InputError(f"{name} needs a scenario; {source} is a trace. A .toml file replays it: {file}")
    memory_gb = list(map(_gb, memory or ()))
    if is_scenario:
        scenario = config.load(source, options.overrides(set_, cost))
        names = [expanded.name for expanded in scenario.variant_scenarios()]
        scenario = scenario.only(variant or names[0]) if scenario.variants or variant else scenario
        scenario = scenario if seeds is None else scenario.with_run(seeds=seeds)
        outputs.require_outputs(json, report, scenario.files)
        more = [f"{names[0]} is the first of {len(names)} variants; --variant takes another"]
        options.print_notes([*scenario.notes, *(more if len(names) > 1 and variant is None else ())], quiet=quiet)
        sources = tuple(map(_rate, load)) if load else None
        from lengthwise.usecases.kv import Prices, study
        from lengthwise.usecases.variants import build

        price = Prices(memory_price) if sources is None else Prices(memory_price, sources)
        (built,) = build(scenario)
        with progress.simulating(quiet=quiet) as advance:
            found = study(built, memory_gb, price, prompts_only=prompts_only, progress=advance)
    else:
        outputs.require_outputs(json, report)
        from lengthwise import catalog
        from lengthwise.config.sources import open_workload
        from lengthwise.config.workload import column_notes
        from lengthwise.usecases.kv import study_trace

        requests = open_workload(source, format_)
        options.print_notes(column_notes(source), quiet=quiet)
        spec = None if model is None else catalog.model(model)
        found = study_trace(requests, block_size, spec, memory_gb, prompts_only=prompts_only)
    from lengthwise.report.kv import write_kv_html, write_kv_json

    if not quiet and json != outputs.STDOUT:
        _show(found)
    outputs.write_outputs(json, report, found, write_kv_json, write_kv_html, quiet=quiet)


def _gb(text: str) -> float:
    parts = re.fullmatch(r"([^a-z]+)([a-z]*)", text.strip().lower().replace(" ", ""))
    try:
        number, unit = parts.groups() if parts else ("", "")
        return float(number) * UNITS[unit]
    except (ValueError, KeyError):
        raise InputError(f"--memory takes a number of GB, such as 64, 64GB, 64GiB or 1TB; it is {text!r}") from None


def _rate(text: str) -> tuple[str, float]:
    name, _, rate = text.rpartition("=")
    with suppress(ValueError):
        if name.strip():
            return name.strip(), float(rate)
    raise InputError(f'--load takes NAME=GB/S, such as "local SSD=6"; it is {text!r}')


def _show(study: KvStudy) -> None:
    from lengthwise.cli.tables import console, print_table
    from lengthwise.report.kv import answers, size_rows

    out = console()
    out.print(", ".join((study.name, *study.metadata)), style="dim", highlight=False)
    heads, rows = size_rows(study)
    drops = "blocks found, %", "$ per M tokens", "prefill saved, %", "$ per saved s", "GB", "saved, s/h"
    print_table(heads, rows, drops=drops)
    for line in (*answers(study), *(f"note: {note}" for note in study.notes)):
        out.print(line, highlight=False)
