"""Progress of a command on standard error: a bar on a terminal, in a pipe only that the simulator is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import typer

COMPILE_S = 30


@contextmanager
def bar(
    label: str, *, quiet: bool, counts: bool = True, refresh_per_second: float = 10
) -> Iterator[Callable[..., None]]:
    """Show a bar, and yield a function of (done, total, description) that moves it. A total of 0 means unknown.

    If ``counts``, done and total are also shown as numbers.
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
    """Show a bar of simulations, after a note if the engine must be compiled.

    The context yields the function that moves the bar, which is called with (runs done, runs in total).
    """
    with compile_note(quiet=quiet), bar("simulating", quiet=quiet) as advance:
        yield advance


def compile_note(*, quiet: bool) -> AbstractContextManager[None]:
    """Return a context in which a note is printed when the engine must be compiled, which takes time."""
    from lengthwise import engine

    note = f"compiling the simulator (first run only, about {COMPILE_S} s)"
    return nullcontext() if quiet else engine.on_compile(lambda: typer.echo(note, err=True))
