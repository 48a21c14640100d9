"""How far a run of an application is, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from lengthwise.apps.ledger import ENDED, State
from lengthwise.apps.run import RESUME, Progress
from lengthwise.report.apps import took
from lengthwise.scenario.app_runs import RanApp

_LINE_S = 10.0


@contextmanager
def shown(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """What is told how far a run is: a table on a terminal, else a line now and then; on standard error."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        yield lambda progress: live.update(table(progress))


class _Lines:
    """A line each 10 s of the run's clock."""

    def __init__(self) -> None:
        self._last_s = -_LINE_S

    def __call__(self, progress: Progress) -> None:
        if progress.at_s - self._last_s >= _LINE_S:
            self._last_s = progress.at_s
            typer.echo(line(progress), err=True)


def line(progress: Progress) -> str:
    """Where a run is, in a line."""
    done, total = _done(progress)
    running = ", ".join(one.name for one in progress.models if one.state == "runs")
    return (
        f"{took(progress.at_s)}: {done} of {total} tasks, {left(progress)}; runs {running or 'nothing yet'}"
    )


def left(progress: Progress) -> str:
    """The time that is left, in words."""
    if progress.left_s is None:
        return "time left not known yet"
    value, low, high = progress.left_s
    return f"{took(value)} left ({took(low)} to {took(high)})"


def _done(progress: Progress) -> tuple[int, int]:
    ended = sum(one.states.get(state, 0) for one in progress.models for state in ENDED)
    return ended, sum(one.total for one in progress.models)


def table(progress: Progress) -> Any:
    """Model by model."""
    from rich import box
    from rich.table import Table

    done, total = _done(progress)
    made = Table(
        box=box.SIMPLE_HEAD,
        title=f"{done} of {total} tasks, {took(progress.at_s)}, {left(progress)}",
        title_justify="left",
    )
    for column in ("model", "", "done", "of", "under way", "tokens/s", "GPUs", "dead"):
        made.add_column(column)
    for one in progress.models:
        ended = sum(one.states.get(state, 0) for state in ENDED)
        gpus = " ".join(",".join(map(str, replica)) for replica in one.gpus)
        dead = one.states.get(State.DEAD, 0) + one.states.get(State.BLOCKED, 0)
        made.add_row(
            one.name,
            one.state,
            str(ended),
            str(one.total),
            str(one.going),
            f"{one.tokens_per_s:.0f}",
            gpus,
            str(dead or ""),
        )
    return made


def end(ran: RanApp, *, quiet: bool) -> None:
    """Says how a run ended, and ends the command with its exit code."""
    ended = ran.ended
    if not quiet:
        if ended.reused is not None:
            typer.echo(ended.reused.words())
        counts = {state: ended.of(state) for state in ENDED}
        told = ", ".join(f"{count} {state.name.lower()}" for state, count in counts.items() if count)
        typer.echo(f"{ended.how} after {took(ended.seconds)}: {told or 'nothing yet'}")
        typer.echo(f"outputs, manifest and logs are in {ran.folder}")
        if ran.exported.dead:
            typer.echo(
                f"{ran.exported.dead} tasks are dead or behind dead ones: {ran.folder / 'dead.jsonl'}",
                err=True,
            )
        if ended.how == "stopped":
            typer.echo(RESUME, err=True)
    if ended.exit_code:
        raise typer.Exit(ended.exit_code)


def stopping(*, quiet: bool) -> Callable[[int], None]:
    """Says what Ctrl-C does."""

    def told(times: int) -> None:
        if not quiet:
            words = (
                "ending: what is under way is kept; Ctrl-C again kills the engines"
                if times == 1
                else "killing engines"
            )
            typer.echo(words, err=True)

    return told
