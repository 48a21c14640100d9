"""Progress of a command on standard error: a bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

COMPILE_S = 60


@contextmanager
def bar(
    label: str, *, quiet: bool, counts: bool = True, refresh_per_second: float = 10
) -> Iterator[Callable[..., None]]:
    """Yield a function of (done, total, description) that moves a bar; a total of 0 is unknown.

    ``counts``: show done and total as numbers, too.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn(label), BarColumn(), *([MofNCompleteColumn()] if counts else []), TimeElapsedColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=refresh_per_second) as shown:
        task = shown.add_task("", total=None)

        def advance(done: float, total: float, description: str = "") -> None:
            shown.update(task, completed=min(done, total or done), total=total or None, description=description)

        yield advance


@contextmanager
def simulating(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of runs done and runs in total, after a note if the engine must be compiled."""
    print_compile_note(quiet=quiet)
    with bar("simulating", quiet=quiet) as advance:
        yield advance


def print_compile_note(*, quiet: bool) -> bool:
    """Return whether the engine must be compiled, after a note about how long that takes."""
    from lengthwise import engine

    if engine.ready():
        return False
    if not quiet:
        typer.echo(f"compiling the engine (first run only, about {COMPILE_S} s)", err=True)
    return True
