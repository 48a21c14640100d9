"""Progress of a command on standard error: a bar on a terminal; elsewhere lines, of long work only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import typer

COMPILE_S = 30
LINE_S, LONGEST_LINE_S, LINE_SHARE = 10.0, 600.0, 0.02


def line_interval_s(elapsed_s: float) -> float:
    """Return the seconds until the next line of progress: 2 % of the time so far, from 10 s to 10 minutes."""
    return min(LONGEST_LINE_S, max(LINE_S, LINE_SHARE * elapsed_s))


def lines(clock: Callable[[], float] = time.monotonic) -> Callable[[str, float, float], None]:
    """Return a function of (step, done, total) that prints a line now and then, the first one after ``LINE_S``.

    A total of 0 means unknown. The lines are for logs, where a bar would leave one line for each redraw.
    """
    started_s, next_s = clock(), line_interval_s(0)

    def advance(step: str, done: float, total: float) -> None:
        nonlocal next_s
        elapsed_s = clock() - started_s
        if elapsed_s < next_s:
            return
        next_s = elapsed_s + line_interval_s(elapsed_s)
        share = f" of {total:,.0f} ({min(1.0, done / total):.0%})" if total else ""
        typer.echo(f"{elapsed_s:,.0f} s: {step} {done:,.0f}{share}", err=True)

    return advance


@contextmanager
def bar(
    label: str, *, quiet: bool, counts: bool = True, refresh_per_second: float = 10
) -> Iterator[Callable[..., None]]:
    """Show a bar, and yield a function of (done, total, description) that moves it. A total of 0 means unknown.

    If ``counts``, done and total are also shown as numbers. Without a terminal it prints ``lines``.
    """
    if quiet:
        yield lambda *_: None
        return
    if not sys.stderr.isatty():
        printed, name = lines(), label.partition(" {")[0]
        yield lambda done, total, *of: printed(" ".join([name, *filter(None, of)]), done, total)
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

    notes = {
        False: f"compiling the simulator (first run only, about {COMPILE_S} s)",
        True: "first run: the slower reference engine gives the same answer while the simulator is compiled "
        "in the background",
    }
    return nullcontext() if quiet else engine.on_compile(lambda behind: typer.echo(notes[behind], err=True))
