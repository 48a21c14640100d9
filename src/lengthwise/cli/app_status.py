"""``lengthwise app status`` and ``lengthwise app cancel``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

EXAMPLES = """\b
Examples:
  lengthwise app status run
  lengthwise app cancel run
"""
_Folder = Annotated[Path, Argument(metavar="DIR", help="The folder of the run (app run --out).")]
_Store = Annotated[
    str | None, Option(metavar="URL", help="Location of its ledger, if not in the folder: postgresql://...")
]


def status(
    folder: _Folder, *, store: _Store = None, as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the progress of a run: tasks by state and by model, and how to resume it."""
    from lengthwise.usecases.app_status import app_status, app_status_json

    found = app_status(folder, store)
    if as_json:
        typer.echo(app_status_json(found), nl=False)
        return
    total, finished = found.tasks.total(), found.finished
    states = ", ".join(f"{count:,} {name}" for name, count in sorted(found.tasks.items()) if count)
    typer.echo(f"{finished:,} of {total:,} tasks have finished: {states}")
    for model in found.models:
        lost = model.tasks.get("dead", 0) + model.tasks.get("blocked", 0)
        parts = [f"{model.completed:,} of {model.total:,}", *([f"{lost} dead or blocked"] if lost else [])]
        parts += [f"{model.tokens:,} tokens", f"{model.tries:,} attempts"]
        parts += [f"on {', '.join(model.engines)}"] if model.engines else []
        typer.echo(f"  {model.name}: {', '.join(parts)}")
    if found.owners:
        hosts = ", ".join(owner.split("/")[0] for owner in found.owners)
        typer.echo(f"running now on {hosts}{'; it has been cancelled' if found.is_cancelled else ''}")
    elif finished < total:
        typer.echo("not running; continue with app run --resume")


def cancel(folder: _Folder, *, store: _Store = None) -> None:
    """Stop a run; recorded answers stay, and app run --resume continues it."""
    from lengthwise.usecases.app_status import cancel_app

    running = cancel_app(folder, store)
    typer.echo("the run is cancelled" if running else "not running; there is nothing to cancel")
