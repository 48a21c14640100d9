"""What ``lengthwise search`` works with, shows and leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import typer

from lengthwise import engine, report, search
from lengthwise.cli._outputs import write_answers
from lengthwise.cli._progress import COMPILE_S
from lengthwise.cli._show import console
from lengthwise.scenario import Scenario
from lengthwise.schema.plan import Study
from lengthwise.search import Store
from lengthwise.search.workers import Workers

Progress = Callable[[str, int, int], None]
WORDS = {"bound": "bounds", "scout": "a quick look", "rank": "exact answers", "shift": "other limits"}


def workers(jobs: int | None, *, processes: bool, ray: str | None) -> AbstractContextManager[Workers]:
    """Threads, processes or a Ray cluster."""
    if ray is not None:
        return search.ray(ray, jobs=jobs)
    return search.processes(jobs) if processes else search.threads(jobs)


def store(folder: Path | None) -> AbstractContextManager[Store | None]:
    """The store of a folder, or none."""
    return nullcontext(None) if folder is None else Store.open(folder)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Progress]:
    """A callable for a step's name, evaluations done and to do: a bar a step, on a terminal only."""
    if not engine.ready():
        if not quiet:
            typer.echo(f"compiling the engine (first run only, about {COMPILE_S} s)", err=True)
        engine.warm_up()
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    with _bars() as advance:
        yield advance


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from lengthwise.cli._rate import RateColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:

        def advance(step: str, done: int, of: int) -> None:
            if step not in tasks:
                head, _, word = step.rpartition(" ")
                tasks[step] = bars.add_task(f"{head} {WORDS.get(word, word)}".strip(), total=of)
            bars.update(tasks[step], completed=done, total=of)

        yield advance


def show(study: Study, asked: Scenario) -> None:
    """Prints the question and the ranked answers."""
    out = console()
    if asked.description:
        out.print(asked.description, style="dim")
    out.print(report.search_table(study, top=asked.search.top if asked.search else 10))


def write(study: Study, json: Path | None, html: Path | None) -> list[Path]:
    """Writes the files that were asked for, each whole or not at all, and returns them."""
    return write_answers(
        json,
        html,
        lambda path: report.write_search_json(path, study),
        lambda path: report.write_search_html(path, study),
    )
