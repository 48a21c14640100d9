"""``lengthwise workload``: requests at a glance."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  lengthwise workload show chat-1m
  lengthwise workload show trace.csv --format azure
"""

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at traces and presets.", epilog=EXAMPLES)


@app.callback()
def _workload() -> None:
    """Keeps ``show`` a command of its own, with others to come beside it."""


@app.command(epilog=EXAMPLES)
def show(
    source: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A trace or log, or the name of a preset.")],
    *,
    format_: Annotated[
        str | None, typer.Option("--format", help="The trace's format; without it, it is detected.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests drawn from a preset.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw from a preset.")] = 0,
) -> None:
    """Show counts, rates, quantiles and a sketch of the lengths of a trace or a preset."""
    from lengthwise.cli import workload_summary as page

    page.show(page.opened(source, format_, num_requests, seed))
