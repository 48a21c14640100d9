"""``lengthwise app``: applications of several models, planned and run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lengthwise.cli import app_plan, app_profile, app_run

if TYPE_CHECKING:
    from lengthwise.apps.run import ModelStatus

STATUS_EXAMPLES = """\b
Example:
  lengthwise app status run
"""
CANCEL_EXAMPLES = """\b
Example:
  lengthwise app cancel run
"""
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the run (app run --out).")]
Store = Annotated[
    str | None, typer.Option(metavar="URL", help="Where its ledger is, if not in the folder: postgresql://...")
]


def status(
    folder: Folder, *, store: Store = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """How far a run is: tasks by state, of each model too, who runs it, and how to go on with it."""
    import json
    from dataclasses import asdict

    from lengthwise.apps.ledger import open_ledger
    from lengthwise.apps.run import CANCEL, alive, status_of
    from lengthwise.apps.run.results import RunFolder

    place = _place(RunFolder(folder, store), folder)
    with open_ledger(place, read_only=True) as ledger:
        counts: dict[str, int] = {}
        for (_, state), count in ledger.counts().items():
            counts[state.name.lower()] = counts.get(state.name.lower(), 0) + count
        owners, is_cancelled = list(alive(ledger)), CANCEL in ledger.metadata()
        models = status_of(ledger)
    if as_json:
        told = [asdict(one) | {"total": one.total, "completed": one.completed} for one in models]
        typer.echo(json.dumps({"tasks": counts, "models": told, "runs_now": owners, "cancelled": is_cancelled}))
        return
    total = sum(counts.values())
    ended = sum(counts.get(name, 0) for name in ("done", "skipped", "dead", "blocked"))
    typer.echo(
        f"{ended} of {total} tasks have ended: " + ", ".join(f"{n} {name}" for name, n in sorted(counts.items()) if n)
    )
    for one in models:
        typer.echo(_words(one))
    if owners:
        typer.echo(f"it runs now ({', '.join(owners)})" + ("; it has been told to end" if is_cancelled else ""))
    elif ended < total:
        typer.echo("nobody runs it now; go on with app run --resume")


def _words(one: ModelStatus) -> str:
    """A model in a line: ended, dead, tokens, tries, engines."""
    parts = [f"{one.completed} of {one.total}"]
    lost = one.tasks.get("dead", 0) + one.tasks.get("blocked", 0)
    parts += [f"{lost} dead or blocked"] if lost else []
    parts += [f"{one.tokens:,} tokens", f"{one.tries} tries"]
    parts += [f"on {', '.join(one.engines)}"] if one.engines else []
    return f"  {one.name}: {', '.join(parts)}"


def cancel(folder: Folder, *, store: Store = None) -> None:
    """Tell a run to end: what is under way is cut and kept, engines are stopped; app run --resume goes on with it."""
    from lengthwise.apps.ledger import open_ledger
    from lengthwise.apps.run import CANCEL, alive
    from lengthwise.apps.run.results import RunFolder

    place = _place(RunFolder(folder, store), folder)
    with open_ledger(place) as ledger:
        owners = list(alive(ledger))
        if owners:
            ledger.note({CANCEL: "1"})
    typer.echo("it has been told to end" if owners else "nobody runs it now; there is nothing to end")


def _place(run: object, folder: Path) -> str:
    from lengthwise.apps.run.results import RunFolder
    from lengthwise.schema.errors import InputError

    assert isinstance(run, RunFolder)
    if run.store is None and not run.is_begun:
        raise InputError(f"{folder} must be the folder of a run (app run --out); there is none in it")
    return run.place


EXAMPLES = """\b
Example, in the order in which one goes:
  lengthwise app plan examples/apps/ensemble.toml --node 8xA100-80GB@pairs --report plan.html
  lengthwise app profile examples/apps/ensemble.toml --out profile
  lengthwise app run examples/apps/ensemble.toml --out run --profile profile
  lengthwise app status run
"""

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Plan and run applications of several models over many rows: soonest, nothing lost, nothing doubled.",
    epilog=EXAMPLES,
)
app.command("plan", epilog=app_plan.EXAMPLES)(app_plan.run)
app.command("profile", epilog=app_profile.EXAMPLES)(app_profile.run)
app.command("run", epilog=app_run.EXAMPLES)(app_run.run)
app.command("status", epilog=STATUS_EXAMPLES)(status)
app.command("cancel", epilog=CANCEL_EXAMPLES)(cancel)
