"""Profiles of applications: what is measured where an application will run, and plans and runs that use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lengthwise.apps.app import App
from lengthwise.apps.launch import Loaded
from lengthwise.apps.plan import Space
from lengthwise.scenario._app_profile_asked import SHAPES, Profiling, Wanted
from lengthwise.scenario._app_profile_book import (
    BOOK,
    SWITCH_TIMES,
    Book,
    Costed,
    Lengths,
    Switched,
    mean_of,
    read_book,
)
from lengthwise.scenario._app_profile_over import Over, fixed_commands
from lengthwise.scenario._app_profile_run import Run


@dataclass(frozen=True)
class Profiled:
    """A profile.

    Attributes:
        folder: Where it is.
        book: All that is in it, measured now or before.
        notes: What could not be measured, and why.
    """

    folder: Path
    book: Book
    notes: tuple[str, ...] = ()


def profile_app(
    what: Profiling,
    folder: Path,
    wanted: Wanted | None = None,
    *,
    told: Callable[[str], None] = lambda _: None,
    now_s: Callable[[], float] = time.perf_counter,
) -> Profiled:
    """An application measured on this machine, with the very commands that a run starts engines by.

    What is in the folder already, of the same commands and the same rows, is not measured again; a profile that was
    killed goes on where it was.

    Args:
        what: Is measured.
        folder: Where it is kept; made where it is missing.
        wanted: How much of it.
        told: Hears what is being done, in words.
        now_s: A clock that never goes back.

    Raises:
        InputError: A model has no command, or there is none of a name.
        EngineError: An engine did not start, or did not wake; what was measured before is kept.
        OutputError: The folder cannot be written.
    """
    run = Run(what, wanted or Wanted(), folder, told, now_s)
    return Profiled(folder, run.whole(), tuple(run.notes))


def profiled(
    app: App, space: Space, folder: Path | str, loaded: Sequence[Loaded] = ()
) -> tuple[App, Space, tuple[str, ...]]:
    """An application and the space of its plans with what a profile measured, and what it did and did not hold.

    Args:
        app: The application.
        space: Of its plans, with what is assumed.
        folder: Of the profile.
        loaded: How engines are started: what starts alike under every plan takes as long and costs as much.

    Raises:
        InputError: There is no profile in the folder, or a file of it cannot be read.
    """
    over = Over(Path(folder), app, space, fixed_commands(loaded))
    models = over.models()
    times = over.times()
    served = [
        replace(one, cost=model.cost, host=model.host) if model.cost != before.cost else one
        for one, model, before in zip(space.models, models, app.models, strict=True)
    ]
    return replace(app, models=models), Space(served, space.cluster, times), tuple(over.notes)


__all__ = [
    "BOOK",
    "SHAPES",
    "SWITCH_TIMES",
    "Book",
    "Costed",
    "Lengths",
    "Profiled",
    "Profiling",
    "Switched",
    "Wanted",
    "mean_of",
    "profile_app",
    "profiled",
    "read_book",
]
