"""``lengthwise app status`` and ``lengthwise app cancel``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from lengthwise.schema.errors import InputError

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
    from lengthwise.apps.ledger import FINISHED, open_ledger
    from lengthwise.apps.run import CANCEL, alive, status_of

    with open_ledger(_ledger(folder, store), read_only=True) as ledger:
        counts = Counter[str]()
        for (_, state), count in ledger.counts().items():
            counts[state.name.lower()] += count
        owners, is_cancelled, models = list(alive(ledger)), CANCEL in ledger.metadata(), status_of(ledger)
    if as_json:
        by_model = [asdict(model) | {"total": model.total, "completed": model.completed} for model in models]
        report = {"tasks": counts, "models": by_model, "runs_now": owners, "cancelled": is_cancelled}
        typer.echo(json.dumps(report))
        return
    total, finished = counts.total(), sum(counts[state.name.lower()] for state in FINISHED)
    states = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
    typer.echo(f"{finished} of {total} tasks have finished: {states}")
    for model in models:
        lost = model.tasks.get("dead", 0) + model.tasks.get("blocked", 0)
        parts = [f"{model.completed} of {model.total}", *([f"{lost} dead or blocked"] if lost else [])]
        parts += [f"{model.tokens:,} tokens", f"{model.tries} attempts"]
        parts += [f"on {', '.join(model.engines)}"] if model.engines else []
        typer.echo(f"  {model.name}: {', '.join(parts)}")
    if owners:
        typer.echo(f"running now ({', '.join(owners)})" + ("; it has been cancelled" if is_cancelled else ""))
    elif finished < total:
        typer.echo("not running; continue with app run --resume")


def cancel(folder: _Folder, *, store: _Store = None) -> None:
    """Stop a run; what is recorded stays, and app run --resume continues it."""
    from lengthwise.apps.ledger import open_ledger
    from lengthwise.apps.run import CANCEL, alive

    with open_ledger(_ledger(folder, store)) as ledger:
        running = list(alive(ledger))
        if running:
            ledger.note({CANCEL: "1"})
    typer.echo("the run is cancelled" if running else "not running; there is nothing to cancel")


def _ledger(folder: Path, store: str | None) -> str:
    from lengthwise.apps.run import RunFolder

    run = RunFolder(folder, store)
    if run.store is None and not run.is_begun:
        raise InputError(f"{folder} must be the folder of a run (app run --out); it has none")
    return run.place
