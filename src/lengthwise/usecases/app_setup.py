"""Loading of an application's file, with the GPUs and the profile that the command line names."""

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
    from lengthwise.usecases.app_plan import PlannedApp, PlanSettings
    from lengthwise.workload import Marginal

TRUE_SEED = (0, 2)  # seed of the lengths of simulated engines; no plan uses it


@dataclass(frozen=True)
class ScaledLengths:
    """A length distribution whose lengths are multiplied by a factor."""

    lengths: Marginal
    factor: float

    def quantile(self, level: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the quantiles in tokens at the given levels."""
        return np.asarray(self.factor * np.asarray(self.lengths.quantile(np.asarray(level, np.float64))))


def _default_timeouts() -> EngineTimeouts:
    from lengthwise.apps.launch.local import DEFAULT

    return DEFAULT


@dataclass(frozen=True)
class Engines:
    """The engines of a run and how they are launched."""

    launcher: str = "local"
    # How engines of each model are started and called, in the application's order.
    loaded: Sequence[EngineConfig] = ()
    # By model number: addresses of running engines (launcher "static").
    urls: Mapping[int, Sequence[str]] = field(default_factory=dict)
    timeouts: EngineTimeouts = field(default_factory=_default_timeouts)
    ray: str = "auto"  # address of the Ray cluster; "local" starts one
    # By model number: simulated engines answer this many times as long as planned.
    length_factor: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from lengthwise.config.app_sections import LAUNCHERS

        if self.launcher not in LAUNCHERS:
            raise UnknownNameError("launcher", self.launcher, LAUNCHERS)


def launcher_of(planned: PlannedApp, engines: Engines, folder: Path) -> Launcher:
    """Return the launcher for a plan's engines. Raises InputError if this launcher cannot start them."""
    from lengthwise.apps.launch import Lengths, LocalLauncher, SimulatedLauncher, StaticLauncher

    space, logs = planned.space, folder / "logs"
    if engines.launcher == "static":
        return StaticLauncher(engines.loaded, engines.urls, engines.timeouts)
    if space is None or planned.plan is None:
        raise InputError(f"the launcher {engines.launcher} needs a plan; name the GPUs to plan for (--node)")
    if engines.launcher == "simulated":
        names = [model.name for model in planned.expanded.app.models]
        lengths = Lengths.of(planned.expanded.tasks, _true_lengths(planned, engines.length_factor))
        return SimulatedLauncher(names, space.deployment, lengths, space.seconds, space.sleeps)
    if engines.launcher == "ray":
        from lengthwise.apps.launch.ray import RayLauncher

        gpus, timeouts = space.cluster.gpus if engines.ray == "local" else None, engines.timeouts
        return RayLauncher(engines.loaded, logs, engines.ray, deployed=space.deployment, timeouts=timeouts, gpus=gpus)
    if (machines := len(space.cluster.machines)) > 1:
        raise InputError(
            f"the local launcher starts engines on one machine; the plan has {machines}. Use --launcher ray, or one "
            "--node"
        )
    for config in engines.loaded:
        # An engine takes a minute to start before it reports a missing folder.
        if config.weights and Path(config.weights).is_absolute() and not Path(config.weights).exists():
            raise InputError(
                f"weights of {config.name} must be a folder with a model, or the name of a model on a hub; "
                f"{config.weights} does not exist"
            )
    return LocalLauncher(engines.loaded, logs, space.deployment, engines.timeouts)


def _true_lengths(planned: PlannedApp, factors: Mapping[int, float]) -> TaskDraw:
    """Return the output lengths of simulated engines. ``factors`` maps a model's number to a factor on its lengths."""
    from lengthwise.usecases.app_plan import length_samples

    expanded, models = planned.expanded, list(planned.expanded.app.models)
    for number, factor in factors.items():
        if (lengths := models[number].lengths) is None:
            raise InputError("length_factor scales a model's lengths; give the model lengths, or remove length_factor")
        models[number] = replace(models[number], lengths=ScaledLengths(lengths, factor))
    (sample,) = length_samples(replace(expanded, app=replace(expanded.app, models=models)), [TRUE_SEED])
    return sample


@dataclass(frozen=True, eq=False)
class AppRequest:
    """An application that a command plans or runs, as read from its file."""

    file: AppFile
    app: App
    space: Space | None  # possible plans; None: no GPUs are named
    notes: tuple[str, ...]  # which parts of a profile were used

    def planned(self, settings: PlanSettings, given: AppPlan | None = None, *, early: bool = False) -> PlannedApp:
        """Return the application with its plan, as ``planned_app`` does."""
        from lengthwise.usecases.app_plan import planned_app

        if self.space is None:
            raise InputError("a plan needs GPUs: --node 8xA100-80GB (also with --plan), or [cluster] nodes in the file")
        made = planned_app(self.app, self.file.rows, self.space, settings, given=given, early=early)
        assert made.plan is not None
        wait = made.final_plan
        final_plan = None if wait is None else lambda: self._with_notes(wait())
        return replace(made, plan=self._with_notes(made.plan), final_plan=final_plan)

    def _with_notes(self, plan: AppPlan) -> AppPlan:
        return replace(plan, notes=tuple(dict.fromkeys((*self.notes, *plan.notes))))

    def engines(self, launcher: str | None = None, ray: str = "auto") -> Engines:
        """Return the engines that the file describes. ``launcher`` replaces the launcher that the file names."""
        run = self.file.run
        name = launcher or run.launcher
        return Engines(name, self.file.loaded, run.urls or {}, run.timeouts, ray, run.length_factor)


def load_app_request(
    path: Path, sets: Sequence[str] = (), nodes: Sequence[str] = (), profile: Path | None = None
) -> AppRequest:
    """Load an application's file. ``nodes`` replaces the file's GPUs, and ``profile`` is a folder of measurements."""
    # GPU names are checked before the imports that reading the file needs.
    cluster = parse_cluster(nodes, Path()) if nodes else None
    from lengthwise.apps.plan import Space
    from lengthwise.config.app_file import load_app

    file = load_app(path, sets)
    cluster = cluster or file.cluster
    if cluster is None:
        if profile is not None:
            raise InputError("a profile needs GPUs; name them: --node, or [cluster] nodes in the file")
        return AppRequest(file, file.app, None, ())
    space = Space(file.served, cluster, file.times)
    if profile is None:
        return AppRequest(file, file.app, space, ())
    from lengthwise.usecases.app_profile import profiled

    app, space, notes = profiled(file.app, space, profile, file.loaded)
    return AppRequest(replace(file, app=app), app, space, notes)
