"""``lengthwise app run``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import AppFile, HtmlReport, Nodes, Quiet
from lengthwise.cli.progress import compile_note, line_interval_s

if TYPE_CHECKING:
    from lengthwise.apps.run import ModelProgress, Progress
    from lengthwise.usecases.app_run import AppRun

MAX_LISTED = 4  # in a line of progress
EXAMPLES = """\b
Examples:
  lengthwise app run examples/apps/critique.toml --out run --launcher simulated --node 2xA100-80GB
  lengthwise app run summaries.toml --out run
  lengthwise app run summaries.toml --out run --resume
  lengthwise app run summaries.toml --out run-2 --store postgresql://user@host/db?schema=tonight
"""


def run(
    app_file: AppFile,
    *,
    out: Annotated[Path, Option(metavar="DIR", help="Folder of answers, their ledger and logs.")],
    launcher: Annotated[str | None, Option(metavar="NAME", help="local, ray, static; simulated: no GPUs.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in the folder.")] = False,
    plan: Annotated[Path | None, Option(metavar="PLAN.json", help="Output of app plan; default: plan now.")] = None,
    node: Nodes = None,
    profile: Annotated[Path | None, Option(metavar="DIR", help="Output folder of app profile.")] = None,
    ray: Annotated[str, Option(metavar="ADDRESS", help="With --launcher ray: its address; local: start one.")] = "auto",
    store: Annotated[
        str | None,
        Option(metavar="URL", help="Ledger outside of the folder: postgresql://..., for several coordinators."),
    ] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the samples to plan with.")] = 0,
    set_: Annotated[list[str] | None, options.setting("calls.answer.max_tokens=256")] = None,
    report: HtmlReport = None,
    quiet: Quiet = False,
) -> None:
    """Run an application on engines by its plan; every answer is recorded once.

    Exit codes: 0 every task is answered, 1 some tasks are dead (dead.jsonl has the reasons), 2 an input, an engine or
    the disk cannot be used (recorded answers stay), 130 interrupted: continue with --resume.
    """
    from lengthwise.apps.run import RunFolder
    from lengthwise.usecases.app_setup import load_app_request

    requested = load_app_request(app_file, set_ or (), node or (), profile)
    outputs.require_outputs(None, report, requested.file.files)
    store = store or requested.file.run.store
    folder = RunFolder(out, store)
    folder.require_free(resume=resume)

    from lengthwise.config.app_file import read_plan
    from lengthwise.usecases.app_plan import PlanSettings, sampled_app
    from lengthwise.usecases.app_run import RunMonitor, run_app

    engines = requested.engines(launcher, ray)
    planning = PlanSettings(compare=False, draws=2, true_draws=4, seed=seed, what_ifs=False, model_draws=0)
    if engines.launcher == "static":
        planned = sampled_app(requested.app, requested.file.rows, planning)
    else:
        given = None if plan is None else read_plan(plan)
        # The wall clock limits the search for a plan. In virtual time no engine can start meanwhile.
        with compile_note(quiet=quiet):
            planned = requested.planned(planning, given, early=engines.launcher != "simulated")
    notes = planned.plan.notes if planned.plan is not None else ()
    if resume and not folder.has_run:
        notes = (f"{out} has no run to resume: a new one starts", *notes)

    def print_error(message: str) -> None:
        if not quiet:
            typer.echo(message, err=True)

    interrupts = ("stopping: running requests are recorded; Ctrl-C again kills the engines", "killing engines")
    with progress_display(notes, quiet=quiet) as progress:
        monitor = RunMonitor(
            progress,
            stopping=lambda times: print_error(interrupts[0 if times == 1 else 1]),
            started=lambda reused: print_error(f"note: resumed: {reused.words()}"),
        )
        done = run_app(
            planned, requested.file.rows, engines, out, settings=requested.file.run.settings, store=store,
            resume=resume, monitor=monitor,
        )  # fmt: skip
    if report is not None:
        from lengthwise.report.apps import write_app_html
        from lengthwise.usecases.app_report import facts_of_run

        details = facts_of_run(requested, planned, app_file.stem, done)
        write_app_html(report, done.plan, details, [model.name for model in requested.app.models])
    if not quiet:
        _print_end(done, report)
    if done.completed.exit_code:
        raise typer.Exit(done.completed.exit_code)


def _print_end(done: AppRun, report: Path | None) -> None:
    from lengthwise.apps.ledger import FINISHED
    from lengthwise.apps.run import RESUME
    from lengthwise.report.apps_text import duration_text

    completed = done.completed
    if completed.reused is not None:
        typer.echo(completed.reused.words())
    counts = {state.name.lower(): completed.of(state) for state in FINISHED}
    tasks = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    typer.echo(f"{completed.how} after {duration_text(completed.seconds)}: {tasks or 'nothing yet'}")
    typer.echo(f"outputs, manifest and logs are in {done.folder}")
    notes = [f"note: at the end {silent['words']}" for silent in done.metadata["silent"]]
    notes += [f"note: after {duration_text(e.at_s)}: {e.description}" for e in completed.events if e.what == "replan"]
    notes += [] if report is None else [f"wrote {report}"]
    if done.exported.dead:
        notes.append(f"{done.exported.dead} tasks are dead or blocked by dead ones: {done.folder / 'dead.jsonl'}")
    notes += [RESUME] if completed.how == "stopped" else []
    for note in notes:
        typer.echo(note, err=True)


@contextmanager
def progress_display(notes: Sequence[str], *, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a function that shows progress on standard error: a table on a terminal, otherwise lines.

    The time between lines is ``line_interval_s``.
    Notes are printed just before the first progress, so that a run that cannot start prints only an error.
    """
    if quiet:
        yield None
        return
    pending = [f"note: {note}" for note in notes]
    next_s = 0.0

    def print_line(progress: Progress) -> None:
        nonlocal next_s
        while pending:
            typer.echo(pending.pop(0), err=True)
        if progress.at_s >= next_s:
            next_s = progress.at_s + line_interval_s(progress.at_s)
            typer.echo(line(progress), err=True)

    if not sys.stderr.isatty():
        yield print_line
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, markup=False, highlight=False)
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def update(progress: Progress) -> None:
            while pending:
                console.print(pending.pop(0))
            live.update(table(progress))

        yield update


def line(progress: Progress) -> str:
    """Return the progress as one line: the complete run, the running and starting models, and silent engines."""
    models = []
    for model in progress.models:
        starting = "" if model.starts_s is None else f" ({_short(model.starts_s)} so far)"
        if model.state == "starts":
            models.append(f"{model.name} starts{starting}")
        elif model.state == "runs":
            rate = f"{model.name} {model.completed:,}/{model.total:,} at {model.tokens_per_s:,.0f} tokens/s"
            models.append(rate + (f", another starts{starting}" if starting else ""))
    shown = [*models[:MAX_LISTED], *([f"{len(models) - MAX_LISTED} more models"] if models[MAX_LISTED:] else [])]
    silent = silent_engines(progress)
    more = [f"{len(silent) - 1} more engines have not answered"] if silent[1:] else []
    return "; ".join([_summary(progress), ", ".join(shown) or "no engine yet", *silent[:1], *more])


def silent_engines(progress: Progress) -> list[str]:
    """Return a sentence for each engine that should respond but does not."""
    return [silent.words(progress.models[silent.model].name) for silent in progress.silent]


def _short(seconds: float) -> str:
    from lengthwise.report.apps_text import duration_text

    return duration_text(seconds) if seconds >= 120 else f"{seconds:.{1 if seconds < 10 else 0}f} s"


def _summary(progress: Progress) -> str:
    completed, total = (sum(getattr(model, name) for model in progress.models) for name in ("completed", "total"))
    stage = f"stage {max(0, progress.stage) + 1} of {progress.stages}, " if progress.stages > 1 else ""
    left = "time left unknown"
    if progress.left_s is not None:
        value, low, high = map(_short, progress.left_s)
        left = f"{value} left ({low} to {high})"
    return f"{_short(progress.at_s)}: {completed:,} of {total:,} tasks, {stage}{left}"


def table(progress: Progress) -> Any:
    """Return a summary, a table of the models, and silent engines."""
    from rich.console import Group

    from lengthwise.report.fitted_table import FittedTable

    rows = [_cells(model) for model in progress.models]
    heads = list(rows[0])
    shown = heads[:4] + [head for head in heads[4:] if any(row[head] for row in rows)]
    lines = [[row[head] for head in shown] for row in rows]
    made = FittedTable(shown, lines, wraps=(), drops=("stage", "under way"))
    return Group(_summary(progress), made, *silent_engines(progress))


def _cells(model: ModelProgress) -> dict[str, str]:
    from lengthwise.apps.ledger import State

    starting = model.state == "starts" and model.starts_s is not None
    return {
        "model": model.name,
        "": f"starts {_short(model.starts_s)}" if starting and model.starts_s is not None else model.state,
        "done": f"{model.completed:,}",
        "of": f"{model.total:,}",
        "under way": str(model.active or ""),
        "tokens/s": f"{model.tokens_per_s:,.0f}" if model.tokens_per_s else "",
        "GPUs": " ".join(",".join(map(str, replica)) for replica in model.gpus),
        "stage": "" if model.stage is None else str(model.stage + 1),
        "left": "" if model.left_s is None else _short(model.left_s),
        "dead": str(model.states.get(State.DEAD, 0) + model.states.get(State.BLOCKED, 0) or ""),
    }
