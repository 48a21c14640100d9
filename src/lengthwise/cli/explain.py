"""``lengthwise explain``: what fits, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import CostSource

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
    cost: CostSource = None,
) -> None:
    """Show what fits, what a step costs by operator, and what binds; nothing is simulated."""
    from lengthwise import scenario as scenarios
    from lengthwise.cli import _explain_page as page
    from lengthwise.cli import _settings

    asked = scenarios.load(scenario, _settings.overrides(set_, cost))
    _settings.tell(asked.notes)
    page.show_all(scenarios.build(asked))
