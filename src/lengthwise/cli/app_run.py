"""``lengthwise app run``: an application run by its plan, every answer kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lengthwise.apps.ledger import FINISHED, State
from lengthwise.apps.run import RESUME, ModelProgress, Progress, Reused
from lengthwise.cli.options import HtmlReport, Quiet
from lengthwise.report.apps_text import duration_text
from lengthwise.usecases.app_run import RanApp

EXAMPLES = """\b
Examples:
  lengthwise app run examples/apps/critique.toml --out run --launcher simulated --node 2xA100-80GB
  lengthwise app run summaries.toml --out run
  lengthwise app run summaries.toml --out run --resume
  lengthwise app run summaries.toml --out run-2 --store postgresql://user@host/db?schema=tonight
"""


def run(
    app: Annotated[Path, typer.Argument(metavar="APP", help="A .toml or .yaml file of an application.")],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where answers, their ledger and logs go.")],
    launcher: Annotated[
        str | None, typer.Option(metavar="NAME", help="local, ray, static or simulated; default: as the file says.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.json", help="What app plan --json wrote; default: it is planned now.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="GPUs: 8xA100-80GB, or a node of the catalog; repeatable.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help="What app profile measured.")] = None,
    ray: Annotated[
        str, typer.Option(metavar="ADDRESS", help="With --launcher ray: of the cluster; local starts one here.")
    ] = "auto",
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where its ledger is, if not in the folder: postgresql://... for several coordinators, a folder each.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws to plan with.")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: calls.answer.max_tokens=256; repeatable."),
    ] = None,
    report: HtmlReport = None,
    quiet: Quiet = False,
) -> None:
    """Run an application on engines: models come and go as planned, and every answer is recorded once.

    Exit codes: 0 all is answered, 1 some tasks are dead (dead.jsonl says why), 2 an input, an engine or the disk cannot
    be used (what was recorded stays), 130 it was stopped: go on with --resume.
    """
    from lengthwise.apps.plan import read_plan
    from lengthwise.apps.run import RunFolder
    from lengthwise.cli import app_report, outputs
    from lengthwise.report.apps import write_app_html
    from lengthwise.usecases.app_plan import Planning
    from lengthwise.usecases.app_run import Watching, run_app
    from lengthwise.usecases.app_setup import asked_app

    asked = asked_app(app, set_ or (), node or (), profile)
    outputs.require_answers(None, report, inputs=asked.file.files)
    run_of = asked.file.run
    store = store or run_of.store
    RunFolder(out, store).require_free(resume=resume)
    engines = asked.engines(launcher, ray)
    how = Planning(additional=False, draws=2, true_draws=4, seed=seed, what_ifs=False)
    if engines.launcher == "static":
        made = asked.drawn(how)
    else:
        given = None if plan is None else read_plan(plan)
        # In virtual time nothing can start while a plan is looked for by the clock.
        made = asked.planned(how, given, begins=engines.launcher != "simulated")
    notes = made.plan.notes if made.plan is not None else ()
    if resume and not RunFolder(out, store).is_begun:
        notes = (f"{out} holds no run to go on with: a new one begins", *notes)
    with shown(notes, quiet=quiet) as watch:
        watching = Watching(watch, stopping=stopping(quiet=quiet), started=begun(quiet=quiet))
        ran = run_app(
            made, asked.file.rows, engines, out, settings=run_of.settings, store=store, resume=resume,
            watching=watching,
        )  # fmt: skip
    if report is not None:
        metadata = app_report.facts_of_run(asked, made, app.stem, ran)
        write_app_html(report, ran.plan, metadata, [model.name for model in asked.app.models])
    end(ran, report, quiet=quiet)


_LINE_S, _MOST_LINE_S, _LINE_SHARE = 10.0, 600.0, 0.02
_HEADS = ("model", "", "done", "of", "under way", "tokens/s", "GPUs", "stage", "left", "dead")
_ALWAYS, _WIDE, _LESS = 4, 100, ("under way", "stage")


@contextmanager
def shown(notes: Sequence[str], *, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """What is told how far a run is: a table on a terminal, else a line now and then; on standard error.

    Notes stand before it once the run is under way: what cannot be run is told without them.
    """
    if quiet:
        yield None
        return
    notes = [f"note: {note}" for note in notes]
    if not sys.stderr.isatty():
        yield _Lines(notes)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, markup=False, highlight=False)
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def tell(progress: Progress) -> None:
            while notes:
                console.print(notes.pop(0))
            live.update(table(progress, console.width))

        yield tell


class _Lines:
    """A line each 10 s of the run's clock at first, later one for each fiftieth of the time that has passed."""

    def __init__(self, notes: list[str]) -> None:
        self._notes, self._next_s = notes, 0.0

    def __call__(self, progress: Progress) -> None:
        while self._notes:
            typer.echo(self._notes.pop(0), err=True)
        if progress.at_s >= self._next_s:
            self._next_s = progress.at_s + min(_MOST_LINE_S, max(_LINE_S, progress.at_s * _LINE_SHARE))
            typer.echo(line(progress), err=True)


def line(progress: Progress) -> str:
    """Where a run is, in a line: as a whole, then who runs and who starts."""
    busy = [_busy(one) for one in progress.models if one.state in ("runs", "starts")]
    told = [f"{whole(progress)}; {', '.join(busy) or 'no engine is there yet'}", *unheard(progress)]
    return "; ".join(told)


def unheard(progress: Progress) -> list[str]:
    """Engines that should answer and do not, in words."""
    return [one.words(progress.models[one.model].name) for one in progress.silent]


def _busy(one: ModelProgress) -> str:
    if one.state == "starts":
        return f"{one.name} starts{_for(one)}"
    more = f", another starts{_for(one)}" if one.starts_s is not None else ""
    return f"{one.name} {one.completed:,}/{one.total:,} at {one.tokens_per_s:,.0f} tokens/s{more}"


def _for(one: ModelProgress) -> str:
    return "" if one.starts_s is None else f" ({_complete(one.starts_s)} so far)"


def _complete(seconds: float) -> str:
    """With few decimals, as it is told anew each time."""
    return duration_text(seconds) if seconds >= 120 else f"{seconds:.{1 if seconds < 10 else 0}f} s"


def whole(progress: Progress) -> str:
    """The run as a whole: since when, tasks, stage, time left."""
    ended, total = sum(one.completed for one in progress.models), sum(one.total for one in progress.models)
    stage = f"stage {max(0, progress.stage) + 1} of {progress.stages}, " if progress.stages > 1 else ""
    return f"{_complete(progress.at_s)}: {ended:,} of {total:,} tasks, {stage}{left(progress)}"


def left(progress: Progress) -> str:
    """The time that is left, in words."""
    if progress.left_s is None:
        return "time left not known yet"
    value, low, high = map(_complete, progress.left_s)
    return f"{value} left ({low} to {high})"


def table(progress: Progress, width: int = _WIDE) -> Any:
    """Model by model; columns without anything are left out, on a narrow terminal two more."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    rows = [_cells(one) for one in progress.models]
    kept = [k for k in range(len(_HEADS)) if k < _ALWAYS or any(row[k] for row in rows)]
    kept = [k for k in kept if width >= _WIDE or _HEADS[k] not in _LESS]
    padding = (0, 1 if width >= _WIDE else 0)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=padding)
    for k in kept:
        made.add_column(_HEADS[k], justify="left" if _HEADS[k] in ("model", "", "GPUs") else "right")
    for row in rows:
        made.add_row(*(row[k] for k in kept))
    return Group(whole(progress), made, *unheard(progress))


def _cells(one: ModelProgress) -> tuple[str, ...]:
    state = f"starts {_complete(one.starts_s)}" if one.state == "starts" and one.starts_s is not None else one.state
    dead = one.states.get(State.DEAD, 0) + one.states.get(State.BLOCKED, 0)
    return (
        one.name,
        state,
        f"{one.completed:,}",
        f"{one.total:,}",
        str(one.active or ""),
        f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "",
        " ".join(",".join(map(str, replica)) for replica in one.gpus),
        "" if one.stage is None else str(one.stage + 1),
        "" if one.left_s is None else _complete(one.left_s),
        str(dead or ""),
    )


def end(ran: RanApp, report: Path | None, *, quiet: bool) -> None:
    """Says how a run ended, and ends the command with its exit code."""
    ended = ran.completed
    if not quiet:
        if ended.reused is not None:
            typer.echo(ended.reused.words())
        counts = {state: ended.of(state) for state in FINISHED}
        told = ", ".join(f"{count} {state.name.lower()}" for state, count in counts.items() if count)
        typer.echo(f"{ended.how} after {duration_text(ended.seconds)}: {told or 'nothing yet'}")
        typer.echo(f"outputs, manifest and logs are in {ran.folder}")
        for one in ran.metadata["silent"]:
            typer.echo(f"note: at its end {one['words']}", err=True)
        for event in ended.events:
            if event.what == "replan":
                typer.echo(f"note: after {duration_text(event.at_s)}: {event.description}", err=True)
        if report is not None:
            typer.echo(f"wrote {report}", err=True)
        if ran.exported.dead:
            typer.echo(f"{ran.exported.dead} tasks are dead or behind dead ones: {ran.folder / 'dead.jsonl'}", err=True)
        if ended.how == "stopped":
            typer.echo(RESUME, err=True)
    if ended.exit_code:
        raise typer.Exit(ended.exit_code)


def begun(*, quiet: bool) -> Callable[[Reused], None]:
    """Says what is kept of a run before."""

    def told(retained: Reused) -> None:
        if not quiet:
            typer.echo(f"note: it goes on with what is there: {retained.words()}", err=True)

    return told


def stopping(*, quiet: bool) -> Callable[[int], None]:
    """Says what Ctrl-C does."""

    def told(times: int) -> None:
        if not quiet:
            words = (
                "ending: what is under way is kept; Ctrl-C again kills the engines" if times == 1 else "killing engines"
            )
            typer.echo(words, err=True)

    return told
