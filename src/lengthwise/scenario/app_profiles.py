"""Profiles of applications: what is measured where an application will run, and plans and runs that use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
from lengthwise.scenario.apps import AppFile
from lengthwise.schema.app import Cluster
from lengthwise.schema.errors import InputError


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


def profiling_of(file: AppFile) -> Profiling:
    """What is measured of an application's file: its models on the GPUs that it names, by its own commands.

    Raises:
        InputError: It names no GPUs, or its engines are simulated.
    """
    if file.run.launcher == "simulated":
        raise InputError(
            'engines that are measured must be real; run.launcher is "simulated". Take --set run.launcher=local'
        )
    urls = file.run.urls if file.run.launcher == "static" else None
    space = Space(file.served, _cluster(file), file.times)
    return Profiling(file.app, file.rows.rows, file.loaded, space, file.run.patience, urls)


def with_profile(file: AppFile, folder: Path | str) -> AppFile:
    """An application's file with the lengths, costs and switch times of a profile; notes say which it held.

    Raises:
        InputError: There is no profile in the folder, a file of it cannot be read, or the application names no GPUs.
    """
    space = Space(file.served, _cluster(file), file.times)
    app, over, notes = profiled(file.app, space, folder, file.loaded)
    return replace(
        file, app=app, served=tuple(over.models), times=over.times, notes=(*_still(file, app), *notes)
    )


def _still(file: AppFile, app: App) -> Iterator[str]:
    """Notes of the file that hold with the profile, too: what is told of lengths may not."""
    changed = any(
        old.lengths is not new.lengths for old, new in zip(file.app.models, app.models, strict=True)
    )
    return (note for note in file.notes if not (changed and note.startswith("no lengths are given")))


def _cluster(file: AppFile) -> Cluster:
    if file.cluster is None:
        raise InputError(
            "the application must name the GPUs that it runs on: in [cluster] nodes, or by --node 8xA100-80GB"
        )
    return file.cluster


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
    "profiling_of",
    "read_book",
    "with_profile",
]
