"""The demo in the terminal: both orders side by side, and a verdict in words."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.gateway.demo.race import Gain, Side, gain

if TYPE_CHECKING:
    from rich.table import Table

_SAY_S = 15.0
NAMES = {"fcfs": "first come, first served", "isrtf": "shortest predicted first (ISRTF)"}


@contextmanager
def shown(what: str) -> Iterator[Callable[[Sequence[Side], float], None]]:
    """A callable that shows the sides: a live table on a terminal, else a line a round."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    if not console.is_terminal:
        yield _lines()
        return
    from rich.live import Live

    with Live(console=console, refresh_per_second=4) as live:
        yield lambda sides, seconds: live.update(table(what, sides, seconds))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows meanwhile that something goes on, and for how long: moving on a terminal, else a line now and then."""
    from rich.console import Console

    console, over, begun_s = Console(file=sys.stdout), threading.Event(), time.monotonic()

    def told() -> str:
        return f"{what}, {time.monotonic() - begun_s:.0f} s"

    def look() -> None:
        if not console.is_terminal:
            while not over.wait(_SAY_S):
                console.print(told())
            return
        with console.status(told()) as status:
            while not over.wait(0.5):
                status.update(told())

    shows = threading.Thread(target=look, daemon=True)
    shows.start()
    try:
        yield
    finally:
        over.set()
        shows.join()


def table(what: str, sides: Sequence[Side], seconds: float) -> Table:
    """What both have done so far."""
    from rich.table import Table

    made = Table(title=f"{what}, {seconds:.0f} s", caption=f"{pages(sides)}\n{change(gain(sides))}")
    made.add_column("")
    for side in sides:
        made.add_column(NAMES[side.mode], justify="right")
    rows: dict[str, Callable[[Side], str]] = {
        "waiting": lambda side: str(side.waiting),
        "at engines": lambda side: str(side.running),
        "finished": lambda side: str(len(side.seen)),
        "mean JCT": lambda side: _seconds(side, np.mean),
        "P99 JCT": lambda side: _seconds(side, lambda jct: np.quantile(jct, 0.99)),
        "times cut": lambda side: str(side.cuts),
    }
    for name, of in rows.items():
        made.add_row(name, *(of(side) for side in sides))
    return made


def pages(sides: Sequence[Side]) -> str:
    """Where each side's admin page is."""
    return "admin pages  " + "  ".join(f"{side.mode}: http://127.0.0.1:{side.admin_port}/" for side in sides)


def change(found: Gain) -> str:
    """The gain so far, in a line."""
    if found.rounds == 0:
        return "the gain is told once both have served the same burst"
    told = f"ISRTF against FCFS, round by round: mean JCT {_percent(found.mean)}"
    if not math.isinf(found.high):
        told += f" (95 %: {_percent(found.low)} to {_percent(found.high)})"
    return f"{told}, P99 {_percent(found.p99)}, {found.rounds} round{'s' if found.rounds > 1 else ''}"


def verdict(what: str, found: Gain) -> str:
    """What it comes to."""
    if found.is_sure:
        word = "Shortest predicted first was faster here."
    elif found.low > 0:
        word = "Shortest predicted first was slower here."
    else:
        word = "This run does not tell: the interval holds 0. Run it again while nothing else needs the CPU."
    return f"{word}\n{change(found)}; {what}; every burst went through both in turns."


def _lines() -> Callable[[Sequence[Side], float], None]:
    told = 0
    begun = False

    def look(sides: Sequence[Side], seconds: float) -> None:
        nonlocal told, begun
        if not begun:
            begun = True
            sys.stdout.write(f"{pages(sides)}\n")
        found = gain(sides)
        if found.rounds > told:
            told = found.rounds
            sys.stdout.write(f"{seconds:5.0f} s  {change(found)}\n")
            sys.stdout.flush()

    return look


def _seconds(side: Side, of: Callable[[np.ndarray], float]) -> str:
    seen = side.seen
    return f"{float(of(seen)):.2f} s" if len(seen) else "-"


def _percent(share: float) -> str:
    return f"{100 * share:+.0f} %"
