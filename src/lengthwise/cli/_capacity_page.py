"""What ``lengthwise capacity`` prints and writes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import typer

from lengthwise import report
from lengthwise.cli._show import console, print_table, two_digits
from lengthwise.scenario import Sustained
from lengthwise.schema.files import write_whole

FORMAT, VERSION = "lengthwise.capacity", 1


def show(found: list[Sustained]) -> None:
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


def write(path: Path, found: list[Sustained]) -> None:
    """All numbers as JSON; to standard output for "-"."""
    told = {"format": FORMAT, "version": VERSION, "capacities": [_told(one) for one in found]}
    text = json.dumps(told, indent=2, allow_nan=False) + "\n"
    if str(path) == "-":
        typer.echo(text, nl=False)
    else:
        write_whole(path, text.encode())
        typer.echo(f"wrote {path}", err=True)


def _row(one: Sustained) -> list[str]:
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
    return [
        one.name,
        f"{rate.value:.4g}",
        half,
        one.capacity.binds,
        f"{one.capacity.ceiling.rate_rps:.4g}",
        *metrics,
    ]


def _told(one: Sustained) -> dict[str, Any]:
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
        "beyond_reach": [dataclasses.asdict(beyond) for beyond in one.beyond],
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
