"""Profiles of applications: what is measured where an application will run, and plans and runs that use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lengthwise.apps.app import App, Model
from lengthwise.apps.launch import EngineConfig
from lengthwise.apps.plan import Space, SwitchTimes
from lengthwise.apps.plan.space import HOWS
from lengthwise.config.app_file import AppFile
from lengthwise.schema.app import Cluster
from lengthwise.schema.errors import InputError
from lengthwise.usecases.app_profile_folder import (
    BOOK,
    Costed,
    ProfileStore,
    Shape,
    Switched,
    cost_path,
    lengths_path,
    read_book,
)
from lengthwise.usecases.app_profile_measurement import Profiling, Run, Wanted, identity, read_lengths, shapes

Key = tuple[str, str, int, int, str]
"""(model, GPU, tp, pp, how)."""


@dataclass
class Over:
    """Lays a profile over an application.

    Attributes:
        fixed: Models whose command is one for all plans: what one replica takes, all take.
    """

    folder: Path
    app: App
    space: Space
    fixed: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (self.folder / BOOK).exists():
            raise InputError(
                f"{self.folder} must hold the profile of an application; there is no {BOOK} in it. "
                "Measure one: lengthwise app profile APP.toml --out FOLDER"
            )
        self.profile_store: ProfileStore = read_book(self.folder)

    def models(self) -> tuple[Model, ...]:
        """The application's models with what was measured of them."""
        of = identity(self.app)
        changed = [one.model for one in self.profile_store.lengths if one.of.split("-")[0] != of]
        if any(model.name in changed for model in self.app.models):
            self.notes.append("the application was changed since its lengths were measured; measure them again")
        return tuple(self._costed(number, self._long(model)) for number, model in enumerate(self.app.models))

    def times(self) -> SwitchTimes:
        """Switch times: the measured ones first."""
        assumed = self.space.times
        measured = dict(self.profile_store.switch_times().measured)
        for number, model in enumerate(self.app.models):
            if model.name in self.fixed:
                self._spread(number, model.name, measured)
            self.notes.extend(self._switch_notes(number, model.name, measured))
        return replace(assumed, measured={**assumed.measured, **measured})

    def _spread(self, number: int, name: str, measured: dict[Key, float]) -> None:
        """What was measured of a shape holds for all of the same GPUs."""
        for plan in shapes(self.space, number, "all"):
            mine = (one for one in self.profile_store.switches if (one.model, one.gpu) == (name, plan.gpu))
            if (found := next(mine, None)) is not None:
                for how in HOWS:
                    if (seconds := measured.get((name, *shape_of(found), how))) is not None:
                        measured.setdefault((name, *plan.shape, how), seconds)

    def _long(self, model: Model) -> Model:
        row, path = self.profile_store.length(model.name), lengths_path(self.folder, model.name)
        if row is None or not row.outputs or not path.exists():
            self.notes.append(f"lengths of {model.name} were not measured: they are as the application says")
            return model
        cut = f"; {row.cut} of them ended at their limit" if row.cut else ""
        off = "" if row.half_width is None else f" ± {row.half_width:.2g}"
        self.notes.append(
            f"lengths of {model.name} are measured: {row.outputs} outputs, {row.mean_tokens:.4g}{off} tokens{cut}"
        )
        return replace(model, lengths=read_lengths(path))

    def _costed(self, number: int, model: Model) -> Model:
        row, path = self.profile_store.cost(model.name), cost_path(self.folder, model.name)
        if row is None or not path.exists():
            self.notes.append(f"costs of {model.name} were not calibrated: they are of {model.cost}")
            return model
        each = [plan.shape for plan in shapes(self.space, number, "all")]
        if model.name not in self.fixed and set(each) != {shape_of(row)}:
            self.notes.append(
                f"calibrated costs of {model.name} are of one replica (tp={row.tp}, pp={row.pp} on {row.gpu}) and "
                f"plans may have others, with which they could not be compared: costs stay of {model.cost}"
            )
            return model
        self.notes.append(
            f"costs of {model.name} are calibrated: single requests are off by {row.after:.0%}, before by "
            f"{row.before:.0%}"
        )
        return replace(model, cost=f"tables:{path}", host="default")

    def _switch_notes(self, number: int, name: str, measured: dict[Key, float]) -> Iterator[str]:
        each = shapes(self.space, number, "all")
        lacking = [plan for plan in each if (name, *plan.shape, "start") not in measured]
        if len(lacking) == len(each):
            yield f"switch times of {name} were not measured: they are assumed"
        elif lacking:
            words = ", ".join(f"tp={plan.tp}, pp={plan.pp} on {plan.gpu}" for plan in lacking)
            yield f"switch times of {name} are measured but for {words}, which are assumed"
        else:
            yield f"switch times of {name} are measured"


def shape_of(row: Switched | Costed) -> Shape:
    """Of the replica that was measured."""
    return row.gpu, row.tp, row.pp


def fixed_commands(loaded: Sequence[EngineConfig]) -> frozenset[str]:
    """Models whose own command has no place for the degrees of a plan."""
    return frozenset(
        one.name for one in loaded if one.command and not any(f"{{{p}}}" in one.command for p in ("tp", "pp"))
    )


@dataclass(frozen=True)
class Profiled:
    """A profile.

    Attributes:
        profile_store: All that is in it, measured now or before.
    """

    folder: Path
    profile_store: ProfileStore
    notes: tuple[str, ...] = ()


def profile_app(
    what: Profiling,
    folder: Path,
    desired: Wanted | None = None,
    *,
    report: Callable[[str], None] = lambda _: None,
    now_s: Callable[[], float] = time.perf_counter,
) -> Profiled:
    """An application measured on this machine, with the very commands that a run starts engines by.

    What is in the folder already, of the same commands and the same rows, is not measured again; a profile that was
    killed goes on where it was.

    Raises:
        EngineError: An engine did not start, or did not wake; what was measured before is kept.
        OutputError: The folder cannot be written.
    """
    run = Run(what, desired or Wanted(), folder, report, now_s)
    return Profiled(folder, run.complete(), tuple(run.notes))


def profiled(
    app: App, space: Space, folder: Path | str, loaded: Sequence[EngineConfig] = ()
) -> tuple[App, Space, tuple[str, ...]]:
    """An application and the space of its plans with what a profile measured, and what it did and did not hold.

    Args:
        loaded: How engines are started: what starts alike under every plan takes as long and costs as much.
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
    """What is measured of an application's file: its models on the GPUs that it names, by its own commands."""
    if file.run.launcher == "simulated":
        raise InputError(
            'engines that are measured must be real; run.launcher is "simulated". Take --set run.launcher=local'
        )
    urls = file.run.urls if file.run.launcher == "static" else None
    space = Space(file.served, _cluster(file), file.times)
    return Profiling(file.app, file.rows.rows, file.loaded, space, file.run.timeouts, urls)


def with_profile(file: AppFile, folder: Path | str) -> AppFile:
    """An application's file with the lengths, costs and switch times of a profile; notes say which it held."""
    space = Space(file.served, _cluster(file), file.times)
    app, over, notes = profiled(file.app, space, folder, file.loaded)
    return replace(file, app=app, served=tuple(over.models), times=over.times, notes=(*_still(file, app), *notes))


def _still(file: AppFile, app: App) -> Iterator[str]:
    """Notes of the file that hold with the profile, too: what is told of lengths may not."""
    changed = any(old.lengths is not new.lengths for old, new in zip(file.app.models, app.models, strict=True))
    return (note for note in file.notes if not (changed and note.startswith("no lengths are given")))


def _cluster(file: AppFile) -> Cluster:
    if file.cluster is None:
        raise InputError(
            "the application must name the GPUs that it runs on: in [cluster] nodes, or by --node 8xA100-80GB"
        )
    return file.cluster
