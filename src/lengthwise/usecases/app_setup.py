"""An application's file with the GPUs and the profile that a command names beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lengthwise.config.cluster import parse_cluster
from lengthwise.schema.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from lengthwise.apps.app import App
    from lengthwise.apps.launch import EngineConfig, EngineTimeouts, Launcher
    from lengthwise.apps.plan import Space
    from lengthwise.config.app_file import AppFile
    from lengthwise.schema.app import AppPlan, TaskDraw
    from lengthwise.usecases.app_plan import PlannedApp, Planning
    from lengthwise.workload import Marginal


@dataclass(frozen=True)
class Stretched:
    """A distribution of lengths."""

    lengths: Marginal
    times: float

    def quantile(self, level: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Tokens at each level."""
        return np.asarray(self.times * np.asarray(self.lengths.quantile(np.asarray(level, np.float64))))


def stretched(lengths: Marginal | None, times: float) -> Stretched:
    """So many times as long; raises InputError where no lengths are known."""
    if lengths is None:
        raise InputError(
            "true_lengths are told as times of a model's lengths; give it lengths, or take true_lengths out"
        )
    return Stretched(lengths, times)


TRUE_SEED = (0, 2)
"""Of lengths that are not those planned with."""


def _default_timeouts() -> EngineTimeouts:
    from lengthwise.apps.launch.local import DEFAULT

    return DEFAULT


@dataclass(frozen=True)
class Engines:
    """Who answers.

    Attributes:
        loaded: How engines of each model are started and asked, in the application's order.
        true_lengths: Of simulated engines, by the models' numbers: answers are drawn so many times as long as planned.
    """

    launcher: str = "local"
    loaded: Sequence[EngineConfig] = ()
    urls: Mapping[int, Sequence[str]] = field(default_factory=dict)
    timeouts: EngineTimeouts = field(default_factory=_default_timeouts)
    ray: str = "auto"
    true_lengths: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from lengthwise.config.app_sections import LAUNCHERS

        if self.launcher not in LAUNCHERS:
            raise UnknownNameError("launcher", self.launcher, LAUNCHERS)


def launcher_of(planned: PlannedApp, engines: Engines, folder: Path) -> Launcher:
    """What makes a plan's engines be there; raises InputError where they cannot be had."""
    from lengthwise.apps.launch import Lengths, LocalLauncher, SimulatedLauncher, StaticLauncher

    names = [one.name for one in planned.expanded.app.models]
    space, logs = planned.space, folder / "logs"
    if engines.launcher == "static":
        return StaticLauncher(engines.loaded, engines.urls, engines.timeouts)
    if space is None or planned.plan is None:
        raise InputError(f"the launcher {engines.launcher} follows a plan; there is none. Name the GPUs (--node)")
    if engines.launcher == "simulated":
        lengths = Lengths.of(planned.expanded.tasks, _truth(planned, engines.true_lengths))
        return SimulatedLauncher(names, space.deployment, lengths, space.seconds, space.sleeps)
    if engines.launcher == "ray":
        from lengthwise.apps.launch.ray import RayLauncher

        gpus = space.cluster.gpus if engines.ray == "local" else None
        return RayLauncher(
            engines.loaded, logs, engines.ray, deployed=space.deployment, timeouts=engines.timeouts, gpus=gpus
        )
    if (machines := len(space.cluster.machines)) > 1:
        raise InputError(
            f"the local launcher starts engines on one machine; the plan is of {machines}. Take --launcher ray, or "
            "one --node"
        )
    for one in engines.loaded:
        _require_weights(one)
    return LocalLauncher(engines.loaded, logs, space.deployment, engines.timeouts)


def _truth(planned: PlannedApp, times: Mapping[int, float]) -> TaskDraw:
    """The lengths of simulated engines, which nobody planned with: as given, or by model so many times as long."""
    from lengthwise.usecases.app_plan import draws_of

    expanded = planned.expanded
    models = [
        replace(one, lengths=stretched(one.lengths, times[number])) if number in times else one
        for number, one in enumerate(expanded.app.models)
    ]
    other = replace(expanded, app=replace(expanded.app, models=models))
    (drawn,) = draws_of(other, [TRUE_SEED])
    return drawn


def _require_weights(loaded: EngineConfig) -> None:
    """Engines start for a minute before they say that a folder is not there."""
    if loaded.weights and Path(loaded.weights).is_absolute() and not Path(loaded.weights).exists():
        raise InputError(
            f"weights of {loaded.name} must be a folder with a model, or a name of a hub; there is no {loaded.weights}"
        )


@dataclass(frozen=True, eq=False)
class AskedApp:
    """What a command is asked to plan or run.

    Attributes:
        space: Of its plans; None: no GPUs are named.
        notes: What a profile held and what it did not, in words; what is assumed without one the plan says itself.
    """

    file: AppFile
    app: App
    space: Space | None
    notes: tuple[str, ...]

    def planned(self, how: Planning, given: AppPlan | None = None, *, begins: bool = False) -> PlannedApp:
        """Its plan, or with ``begins`` one to begin with; raises InputError where no GPUs are named."""
        from lengthwise.usecases.app_plan import planned_app

        if self.space is None:
            raise InputError('a plan needs GPUs: --node 8xA100-80GB, or [cluster] nodes = ["8xA100-80GB"] in the file')
        made = planned_app(self.app, self.file.rows, self.space, how, given=given, begins=begins)
        assert made.plan is not None
        sought = made.sought
        later = None if sought is None else lambda: self._recorded(sought())
        return replace(made, plan=self._recorded(made.plan), sought=later)

    def _recorded(self, made: AppPlan) -> AppPlan:
        return replace(made, notes=tuple(dict.fromkeys((*self.notes, *made.notes))))

    def drawn(self, how: Planning) -> PlannedApp:
        """Without a plan, for engines that are given."""
        from lengthwise.usecases.app_plan import drawn_app

        return drawn_app(self.app, self.file.rows, how)

    def engines(self, launcher: str | None = None, ray: str = "auto") -> Engines:
        """Who answers, as the file says, or by another launcher."""
        run = self.file.run
        name = launcher or run.launcher
        return Engines(name, self.file.loaded, run.urls or {}, run.timeouts, ray, run.true_lengths)


def asked_app(path: Path, sets: Sequence[str] = (), nodes: Sequence[str] = (), profile: Path | None = None) -> AskedApp:
    """An application's file, on GPUs, under a profile."""
    # Names of GPUs are checked before what it takes to read the file is imported.
    cluster = parse_cluster(nodes, Path()) if nodes else None
    from lengthwise.apps.plan import Space
    from lengthwise.config.app_file import load_app

    file = load_app(path, sets)
    cluster = cluster or file.cluster
    if cluster is None:
        if profile is not None:
            raise InputError("a profile is of GPUs; name them: --node, or [cluster] nodes in the file")
        return AskedApp(file, file.app, None, ())
    space, app = Space(file.served, cluster, file.times), file.app
    notes: tuple[str, ...] = ()
    if profile is not None:
        from lengthwise.usecases.app_profile import profiled

        app, space, notes = profiled(app, space, profile, file.loaded)
    return AskedApp(replace(file, app=app), app, space, tuple(notes))
