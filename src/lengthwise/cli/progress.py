"""What a user sees while runs are under way: on standard error, and a bar only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.progress import ProgressColumn, Task
from rich.text import Text

from lengthwise import engine

COMPILE_S = 60


@contextmanager
def shown(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A callable for runs done and runs in all, 0 where that is not known."""
    if not quiet and not engine.ready():
        typer.echo(f"compiling the engine (first run only, about {COMPILE_S} s)", err=True)
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    with _bar() as advance:
        yield advance


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("runs", total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of or None)


class RateColumn(ProgressColumn):
    """How fast a task goes; empty while that is not known."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s", style="progress.data.speed")
