"""An application's file with the GPUs and the profile that a command names beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lengthwise.apps.app import App
from lengthwise.apps.plan import Space
from lengthwise.scenario._app_nodes import parse_cluster
from lengthwise.scenario.app_engines import Engines
from lengthwise.scenario.app_plans import PlannedApp, Planning, drawn_app, planned_app
from lengthwise.scenario.app_profiles import profiled
from lengthwise.scenario.apps import AppFile, load_app
from lengthwise.schema.app import AppPlan
from lengthwise.schema.errors import InputError


@dataclass(frozen=True, eq=False)
class AskedApp:
    """What a command is asked to plan or run.

    Attributes:
        file: As it was read.
        app: With what was measured laid over it.
        space: Of its plans; None: no GPUs are named.
        notes: What a profile held and what it did not, in words; what is assumed without one the plan says itself.
    """

    file: AppFile
    app: App
    space: Space | None
    notes: tuple[str, ...]

    def planned(self, how: Planning, given: AppPlan | None = None, *, begins: bool = False) -> PlannedApp:
        """Its plan, or with ``begins`` one to begin with; raises InputError where no GPUs are named."""
        if self.space is None:
            raise InputError(
                'a plan needs GPUs: --node 8xA100-80GB, or [cluster] nodes = ["8xA100-80GB"] in the file'
            )
        made = planned_app(self.app, self.file.rows, self.space, how, given=given, begins=begins)
        assert made.plan is not None
        sought = made.sought
        later = None if sought is None else lambda: self._noted(sought())
        return replace(made, plan=self._noted(made.plan), sought=later)

    def _noted(self, made: AppPlan) -> AppPlan:
        return replace(made, notes=tuple(dict.fromkeys((*self.notes, *made.notes))))

    def drawn(self, how: Planning) -> PlannedApp:
        """Without a plan, for engines that are given."""
        return drawn_app(self.app, self.file.rows, how)

    def engines(self, launcher: str | None = None, ray: str = "auto") -> Engines:
        """Who answers, as the file says, or by another launcher."""
        run = self.file.run
        name = launcher or run.launcher
        return Engines(name, self.file.loaded, run.urls or {}, run.patience, ray, run.true_lengths)


def asked_app(
    path: Path, sets: Sequence[str] = (), nodes: Sequence[str] = (), profile: Path | None = None
) -> AskedApp:
    """An application's file, on GPUs, under a profile.

    Args:
        path: Of the file.
        sets: Assignments that change it.
        nodes: GPUs in place of the file's own.
        profile: Folder of what was measured.

    Raises:
        InputError: Any of them cannot be used.
    """
    file = load_app(path, sets)
    cluster = parse_cluster(nodes, Path()) if nodes else file.cluster
    if cluster is None:
        if profile is not None:
            raise InputError("a profile is of GPUs; name them: --node, or [cluster] nodes in the file")
        return AskedApp(file, file.app, None, ())
    space, app = Space(file.served, cluster, file.times), file.app
    notes: tuple[str, ...] = ()
    if profile is not None:
        app, space, notes = profiled(app, space, profile, file.loaded)
    return AskedApp(replace(file, app=app), app, space, tuple(notes))
