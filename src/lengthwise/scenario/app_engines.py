"""The engines of an application run: on this machine, of a Ray cluster, at given addresses, or in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lengthwise.apps.launch import (
    Launcher,
    Lengths,
    Loaded,
    LocalLauncher,
    Patience,
    SimulatedLauncher,
    StaticLauncher,
)
from lengthwise.apps.launch.local import USUAL
from lengthwise.scenario._app_sections import LAUNCHERS
from lengthwise.scenario._app_stretched import stretched
from lengthwise.scenario.app_plans import PlannedApp, draws_of
from lengthwise.schema.app_tasks import TaskDraw
from lengthwise.schema.errors import InputError, UnknownNameError

TRUE_SEED = (0, 2)
"""Of lengths that are not those planned with."""


@dataclass(frozen=True)
class Engines:
    """Who answers.

    Attributes:
        launcher: One of LAUNCHERS.
        loaded: How engines of each model are started and asked, in the application's order.
        urls: Of given engines, by the models' numbers.
        patience: How long engines may take.
        ray: Address of the Ray cluster; "local" starts one here.
        true_lengths: Of simulated engines, by the models' numbers: answers are drawn so many times as long as planned.
    """

    launcher: str = "local"
    loaded: Sequence[Loaded] = ()
    urls: Mapping[int, Sequence[str]] = field(default_factory=dict)
    patience: Patience = USUAL
    ray: str = "auto"
    true_lengths: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise UnknownNameError("launcher", self.launcher, LAUNCHERS)


def launcher_of(planned: PlannedApp, engines: Engines, folder: Path) -> Launcher:
    """What makes a plan's engines be there; raises InputError where they cannot be had."""
    names = [one.name for one in planned.unrolled.app.models]
    space, logs = planned.space, folder / "logs"
    if engines.launcher == "static":
        return StaticLauncher(engines.loaded, engines.urls, engines.patience)
    if space is None or planned.plan is None:
        raise InputError(
            f"the launcher {engines.launcher} follows a plan; there is none. Name the GPUs (--node)"
        )
    if engines.launcher == "simulated":
        lengths = Lengths.of(planned.unrolled.tasks, _truth(planned, engines.true_lengths))
        return SimulatedLauncher(names, space.deployment, lengths, space.seconds, space.sleeps)
    if engines.launcher == "ray":
        from lengthwise.apps.launch.ray import RayLauncher

        gpus = space.cluster.gpus if engines.ray == "local" else None
        return RayLauncher(
            engines.loaded, logs, engines.ray, deployed=space.deployment, patience=engines.patience, gpus=gpus
        )
    if (machines := len(space.cluster.machines)) > 1:
        raise InputError(
            f"the local launcher starts engines on one machine; the plan is of {machines}. Take --launcher ray, or "
            "one --node"
        )
    for one in engines.loaded:
        _require_weights(one)
    return LocalLauncher(engines.loaded, logs, space.deployment, engines.patience)


def _truth(planned: PlannedApp, times: Mapping[int, float]) -> TaskDraw:
    """The lengths of simulated engines, which nobody planned with: as given, or by model so many times as long."""
    unrolled = planned.unrolled
    models = [
        replace(one, lengths=stretched(one.lengths, times[number])) if number in times else one
        for number, one in enumerate(unrolled.app.models)
    ]
    other = replace(unrolled, app=replace(unrolled.app, models=models))
    (drawn,) = draws_of(other, [TRUE_SEED])
    return drawn


def _require_weights(loaded: Loaded) -> None:
    """Engines start for a minute before they say that a folder is not there."""
    if loaded.weights and Path(loaded.weights).is_absolute() and not Path(loaded.weights).exists():
        raise InputError(
            f"weights of {loaded.name} must be a folder with a model, or a name of a hub; there is no {loaded.weights}"
        )
