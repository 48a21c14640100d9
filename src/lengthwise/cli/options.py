"""Options that commands have in common, with one wording."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

CostSource = Annotated[
    str | None, typer.Option(metavar="SOURCE", help="roofline, profile:FILE, tables:FILE, vidur:DIR, vidur_forest:DIR")
]
HtmlReport = Annotated[Path | None, typer.Option(help="Write a self-contained HTML report to this file.")]
JsonFile = Annotated[
    Path | None, typer.Option(help="Write all numbers to this file; -: to standard output, without the table.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no table and no progress.")]


def overrides(set_: list[str] | None, cost: str | None) -> list[str]:
    """What ``--set`` and ``--cost`` change, in order; the latter wins."""
    return [*(set_ or ()), *([] if cost is None else [f"deployment.cost={cost}"])]


def tell(notes: Iterable[str], *, quiet: bool = False) -> None:
    """Says what was dropped for an override, a line each, where numbers do not go."""
    for note in () if quiet else notes:
        typer.echo(note, err=True)


def searching(limits: list[str] | None, precision: float | None, seeds: int | None) -> list[str]:
    """What ``--limit``, ``--precision`` and ``--seeds`` change of [search]."""
    given = [f"search.limits={_limits(limits)}"] if limits else []
    given += [] if precision is None else [f"search.precision={precision}"]
    return given + ([] if seeds is None else [f"search.seeds={seeds}"])


def ranking(top: int | None) -> list[str]:
    """What ``--top`` changes."""
    return [] if top is None else [f"search.top={top}"]


def _limits(texts: list[str]) -> str:
    """``ttft.p90=2s`` as an inline table; a bad one is left for the scenario to complain of."""
    pairs = []
    for text in texts:
        metric, _, bound = text.partition("=")
        try:
            float(bound)
        except ValueError:
            bound = json.dumps(bound.strip())
        pairs.append(f"{json.dumps(metric.strip())} = {bound}")
    return "{ " + ", ".join(pairs) + " }"
