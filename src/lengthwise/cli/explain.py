"""``lengthwise explain``: what fits, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Example:
  lengthwise explain examples/chat-70b.toml --set deployment.tp=2
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file.")],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: deployment.tp=2; repeatable."),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="roofline, profile:FILE, tables:FILE, vidur:DIR, vidur_forest:DIR"
        ),
    ] = None,
) -> None:
    """Show what fits, what a step costs by operator, and what binds; nothing is simulated."""
    from lengthwise import scenario as scenarios
    from lengthwise.cli import _explain_page as page
    from lengthwise.cli import _settings

    page.show_all(scenarios.build(scenarios.load(scenario, _settings.overrides(set_, cost))))
