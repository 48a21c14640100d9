"""``lengthwise capacity``: how much a deployment takes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from lengthwise import report
from lengthwise.cli.options import CostSource, JsonFile, Quiet
from lengthwise.cli.tables import console, print_table, two_digits
from lengthwise.schema.files import write_whole
from lengthwise.usecases.capacity import VariantCapacity

EXAMPLES = """\b
Examples:
  lengthwise capacity examples/chat-70b.toml
  lengthwise capacity examples/chat-70b.toml --limit ttft.p90=2s --limit tbt.p99=200ms
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file.")],
    *,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=BOUND", help="What must hold, instead of [search.limits]; repeatable."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: deployment.tp=8; repeatable."),
    ] = None,
    cost: CostSource = None,
    precision: Annotated[float | None, typer.Option(help="Relative half-width to reach: 0.025.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Independent repetitions behind it: 5.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: one a CPU.")] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the largest request rate that holds the limits, with its confidence interval.

    By default 99 % of the requests must be scheduled within 5 s.
    """
    from lengthwise import config
    from lengthwise.cli import options, outputs
    from lengthwise.cli import progress as _progress
    from lengthwise.usecases import capacity

    given = options.searching(limit, precision, seeds)
    asked = config.load(scenario, [*options.overrides(set_, cost), *given])
    outputs.require_writable([json] if json is not None and str(json) != "-" else [], inputs=asked.files)
    options.tell(asked.notes, quiet=quiet)
    with _progress.shown(quiet=quiet) as progress:
        found = capacity.capacities(asked, jobs=jobs, progress=progress)
    if not quiet and str(json) != "-":
        show(found)
    if json is not None:
        write(json, found)


FORMAT, VERSION = "lengthwise.capacity", 1


def show(found: list[VariantCapacity]) -> None:
    """A row a variant: its capacity, what binds it, and the limited metrics there."""
    limits = found[0].limits
    heads = ["", "requests/s", "±", "binds", "at most", *(limit.metric for limit in limits)]
    rows = [_row(one) for one in found]
    print_table(heads, rows)
    out = console()
    out.print(f"Limits: {', '.join(report.limit_text(limit) for limit in limits)}.", highlight=False)
    for note in dict.fromkeys(note for one in found for note in one.notes):
        out.print(note, highlight=False)
    spent = sum(one.capacity.effort.simulations for one in found)
    requests = sum(one.capacity.effort.requests for one in found)
    out.print(
        "± half-width of a 95 % interval: seeds' spread, and drift with longer runs. At most: what no schedule "
        f"beats. The metrics are at the interval's lower end. {spent:,} runs of {requests:,} requests.",
        style="dim",
        highlight=False,
    )


def write(path: Path, found: list[VariantCapacity]) -> None:
    """All numbers as JSON; to standard output for "-"."""
    told = {"format": FORMAT, "version": VERSION, "capacities": [_report(one) for one in found]}
    text = json.dumps(told, indent=2, allow_nan=False) + "\n"
    if str(path) == "-":
        typer.echo(text, nl=False)
    else:
        write_whole(path, text.encode())
        typer.echo(f"wrote {path}", err=True)


def _row(one: VariantCapacity) -> list[str]:
    rate = one.capacity.rate_rps
    if one.at is None:
        return [
            one.name,
            "0",
            "",
            one.capacity.binds,
            f"{one.capacity.ceiling.rate_rps:.4g}",
            *(["-"] * len(one.limits)),
        ]
    half = two_digits(rate.half_width) if rate.has_interval else "unknown"
    metrics = [report.metric_text(limit.metric, one.at.value(limit.metric)) for limit in one.limits]
    return [one.name, f"{rate.value:.4g}", half, one.capacity.binds, f"{one.capacity.ceiling.rate_rps:.4g}", *metrics]


def _report(one: VariantCapacity) -> dict[str, Any]:
    found = one.capacity
    return {
        "name": one.name,
        "limits": [{"metric": x.metric, "bound": x.bound, "at_least": x.at_least} for x in one.limits],
        "requests_per_s": {"value": found.rate_rps.value, "half_width": _known(found.rate_rps.half_width)},
        "binds": found.binds,
        "ceiling_requests_per_s": found.ceiling.rate_rps,
        "requests_a_run": found.requests,
        "simulations": found.effort.simulations,
        "requests": found.effort.requests,
        "notes": list(one.notes),
        "beyond_reach": [dataclasses.asdict(beyond) for beyond in one.out_of_range],
        "at": None
        if one.at is None
        else {
            "requests_per_s": one.at.rate_rps,
            "metrics": {
                name: {"value": _known(e.value), "half_width": _known(e.half_width)}
                for name, e in one.at.values.items()
            },
        },
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
