"""Profile an application on the machine where it will run, and use the profile in plans and runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lengthwise.apps.app import App, Model
from lengthwise.apps.launch import EngineConfig
from lengthwise.apps.plan import Space, SwitchTimes
from lengthwise.apps.plan.space import HOWS
from lengthwise.config.app_file import AppFile
from lengthwise.schema.errors import InputError
from lengthwise.usecases.app_profile_folder import PROFILE, cost_path, lengths_path, read_profile
from lengthwise.usecases.app_profile_measurement import (
    ProfileOptions,
    ProfileRun,
    ProfileTarget,
    identity,
    read_lengths,
    shapes,
)

Key = tuple[str, str, int, int, str]  # (model, GPU, tp, pp, how)
_PLACEHOLDER = re.compile(r"\{(tp|pp)\}")


class _Overlay:
    """Replaces an application's assumptions by the measurements of a profile."""

    def __init__(self, folder: Path, app: App, space: Space, loaded: Sequence[EngineConfig]) -> None:
        if not (folder / PROFILE).exists():
            raise InputError(
                f"{folder} must hold the profile of an application; it has no {PROFILE}. "
                "Measure one: lengthwise app profile APP.toml --out FOLDER"
            )
        self.folder, self.app, self.space, self.profile = folder, app, space, read_profile(folder)
        # Models with one command for all plans: measurements of one replica hold for all their shapes.
        self.fixed = {one.name for one in loaded if one.command and not _PLACEHOLDER.search(one.command)}
        self.notes: list[str] = []  # which measurements exist and which do not

    def models(self) -> tuple[Model, ...]:
        own = identity(self.app)
        changed = {row.model for row in self.profile.lengths if row.source.split("-")[0] != own}
        if any(model.name in changed for model in self.app.models):
            self.notes.append("the application has changed since its lengths were measured; measure them again")
        return tuple(self._with_cost(number, self._with_lengths(model)) for number, model in enumerate(self.app.models))

    def times(self) -> SwitchTimes:
        assumed = self.space.times
        measured = dict(self.profile.switch_times().measured)
        for number, model in enumerate(self.app.models):
            if model.name in self.fixed:
                self._copy_to_all_shapes(number, model.name, measured)
            self.notes.append(self._switch_note(number, model.name, measured))
        return replace(assumed, measured={**assumed.measured, **measured})

    def _copy_to_all_shapes(self, number: int, name: str, measured: dict[Key, float]) -> None:
        for plan in shapes(self.space, number, "all"):
            rows = (row for row in self.profile.switches if (row.model, row.gpu) == (name, plan.gpu))
            if (row := next(rows, None)) is not None:
                for how in HOWS:
                    if (seconds := measured.get((name, *row.shape, how))) is not None:
                        measured.setdefault((name, *plan.shape, how), seconds)

    def _with_lengths(self, model: Model) -> Model:
        row, path = self.profile.length(model.name), lengths_path(self.folder, model.name)
        if row is None or not row.outputs or not path.exists():
            self.notes.append(f"lengths of {model.name} were not measured; those of the application are used")
            return model
        cut = f"; {row.cut} of them reached their limit" if row.cut else ""
        mean = f"{row.mean_tokens:.4g}" + ("" if row.half_width is None else f" ± {row.half_width:.2g}")
        self.notes.append(f"lengths of {model.name} are measured: {row.outputs} outputs, {mean} tokens{cut}")
        return replace(model, lengths=read_lengths(path))

    def _with_cost(self, number: int, model: Model) -> Model:
        row, path = self.profile.cost(model.name), cost_path(self.folder, model.name)
        if row is None or not path.exists():
            self.notes.append(f"costs of {model.name} were not calibrated; {model.cost} is used")
            return model
        if model.name not in self.fixed and {plan.shape for plan in shapes(self.space, number, "all")} != {row.shape}:
            self.notes.append(
                f"costs of {model.name} are calibrated for tp={row.tp}, pp={row.pp} on {row.gpu} only, and plans "
                f"compare it with other shapes, so {model.cost} is used for all"
            )
            return model
        self.notes.append(
            f"costs of {model.name} are calibrated: the error on single requests is {row.after:.0%}, before "
            f"{row.before:.0%}"
        )
        return replace(model, cost=f"tables:{path}", host="default")

    def _switch_note(self, number: int, name: str, measured: dict[Key, float]) -> str:
        plans = shapes(self.space, number, "all")
        missing = [plan for plan in plans if (name, *plan.shape, "start") not in measured]
        if not missing:
            return f"switching times of {name} are measured"
        if len(missing) == len(plans):
            return f"switching times of {name} were not measured; they are assumed"
        words = ", ".join(f"tp={plan.tp}, pp={plan.pp} on {plan.gpu}" for plan in missing)
        return f"switching times of {name} are measured except for {words}, where they are assumed"


def profile_app(
    target: ProfileTarget,
    folder: Path,
    options: ProfileOptions | None = None,
    *,
    report: Callable[[str], None] = lambda _: None,
    now_s: Callable[[], float] = time.perf_counter,
) -> ProfileRun:
    """Measure an application on this machine and return the completed measurement.

    Engines are started by the same commands as in a run. Existing measurements of the same commands and rows are
    reused, so that an interrupted profile continues.

    Raises:
        EngineError: An engine did not start or wake. Earlier measurements are stored.
        OutputError: The folder cannot be written.
    """
    run = ProfileRun(target, options or ProfileOptions(), folder, report, now_s)
    run.complete()
    return run


def profiled(
    app: App, space: Space, folder: Path | str, loaded: Sequence[EngineConfig] = ()
) -> tuple[App, Space, tuple[str, ...]]:
    """Replace an application's assumed lengths, costs and switching times by the measurements of a profile.

    Return the application, the space of plans, and notes on what was measured. If ``loaded`` has one command for
    all plans of a model, the measurements of one replica hold for replicas of every shape (GPU, tp, pp).
    """
    overlay = _Overlay(Path(folder), app, space, loaded)
    models, times = overlay.models(), overlay.times()
    served = [
        replace(one, cost=model.cost, host=model.host) if model.cost != before.cost else one
        for one, model, before in zip(space.models, models, app.models, strict=True)
    ]
    return replace(app, models=models), Space(served, space.cluster, times), tuple(overlay.notes)


def profile_target(file: AppFile) -> ProfileTarget:
    """Return what to measure: the file's models on its GPUs, started by its commands or running (launcher static)."""
    if file.run.launcher == "simulated":
        raise InputError('only real engines can be measured; run.launcher is "simulated". Use --set run.launcher=local')
    if file.cluster is None:
        raise InputError("the application must name its GPUs: [cluster] nodes in the file, or --node 8xA100-80GB")
    urls = file.run.urls if file.run.launcher == "static" else None
    space = Space(file.served, file.cluster, file.times)
    return ProfileTarget(file.app, file.rows.rows, file.loaded, space, file.run.timeouts, urls)
