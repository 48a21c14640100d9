"""``lengthwise capacity``: how much a deployment takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import CostSource, JsonFile, Quiet

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
    from lengthwise import scenario as scenarios
    from lengthwise.cli import _capacity_page, _outputs, _progress, _settings

    given = _settings.searching(limit, precision, seeds)
    asked = scenarios.load(scenario, [*_settings.overrides(set_, cost), *given])
    _outputs.require_writable([json] if json is not None and str(json) != "-" else [], inputs=asked.files)
    _settings.tell(asked.notes, quiet=quiet)
    with _progress.shown(quiet=quiet) as progress:
        found = scenarios.capacities(asked, jobs=jobs, progress=progress)
    if not quiet and str(json) != "-":
        _capacity_page.show(found)
    if json is not None:
        _capacity_page.write(json, found)
