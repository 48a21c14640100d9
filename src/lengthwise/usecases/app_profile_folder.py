"""The folder of an application's profile: profile.json with all measurements, and the files that planning reads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.apps.launch.local import slug
from lengthwise.apps.plan import SwitchTimes, write_switch_times
from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_atomic

PROFILE, SWITCH_TIMES = "profile.json", "switch-times.toml"
_VERSION = 1
Shape = tuple[str, int, int]  # (GPU, tp, pp) of one replica


@dataclass(frozen=True)
class _ReplicaRow:
    model: str
    gpu: str
    tp: int
    pp: int
    source: str  # digest of the command that starts it

    @property
    def shape(self) -> Shape:
        return self.gpu, self.tp, self.pp


@dataclass(frozen=True)
class SwitchRow(_ReplicaRow):
    """Seconds that one replica takes to start, stop, sleep and wake, one value for each repetition."""

    start_s: tuple[float, ...]
    stop_s: tuple[float, ...]
    sleep_s: tuple[float, ...] = ()  # empty if the engine cannot sleep
    wake_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class LengthRow:
    """Output lengths of a model, measured on a sample of rows."""

    model: str
    source: str  # digests of the application and of the sample
    rows: int
    outputs: int
    cut: int  # outputs that reached their limit
    mean_tokens: float | None  # None without outputs
    half_width: float | None  # of the mean's 95 % interval over rows; None if one row had outputs


@dataclass(frozen=True)
class CostRow(_ReplicaRow):
    """The calibration of one replica's cost tables: the number of requests, and the errors before and after."""

    requests: int
    before: float  # mean absolute relative error of single held-out requests' JCT, with the tables before
    after: float  # the same with the calibrated tables


_ROWS: dict[str, Any] = {"switches": SwitchRow, "lengths": LengthRow, "costs": CostRow}  # by field of a profile


@dataclass(frozen=True)
class AppProfile:
    """All measurements in a folder. Switching times have a row for each model and shape, other rows are per model."""

    switches: tuple[SwitchRow, ...] = ()
    lengths: tuple[LengthRow, ...] = ()
    costs: tuple[CostRow, ...] = ()

    def switch(self, model: str, shape: Shape) -> SwitchRow | None:
        """Return the switching times of a model's replica of this shape, or None if they were not measured."""
        return next((row for row in self.switches if (row.model, row.shape) == (model, shape)), None)

    def length(self, model: str) -> LengthRow | None:
        """Return the row of a model's output lengths, or None if they were not measured."""
        return next((row for row in self.lengths if row.model == model), None)

    def cost(self, model: str) -> CostRow | None:
        """Return the row of a model's calibration, or None if the model was not calibrated."""
        return next((row for row in self.costs if row.model == model), None)

    def with_row(self, row: SwitchRow | LengthRow | CostRow) -> AppProfile:
        """Return the profile with this row added, in place of an earlier measurement of the same quantity."""

        def key(one: SwitchRow | LengthRow | CostRow) -> tuple[Any, ...]:
            return (one.model, one.shape) if isinstance(one, SwitchRow) else (one.model,)

        (name,) = (name for name, kind in _ROWS.items() if isinstance(row, kind))
        others = [one for one in getattr(self, name) if key(one) != key(row)]
        changed: dict[str, Any] = {name: (*others, row)}
        return replace(self, **changed)

    def switch_times(self) -> SwitchTimes:
        """Return the mean switching times in the form that the planner reads."""
        means: dict[tuple[str, str, int, int, str], float] = {}
        for row in self.switches:
            each = {"start": row.start_s, "wake": row.wake_s, "stop": row.stop_s, "sleep": row.sleep_s}
            means |= {(row.model, *row.shape, how): float(np.mean(times)) for how, times in each.items() if times}
        return SwitchTimes(means)


def read_profile(folder: Path) -> AppProfile:
    """Return the measurements in a folder, which may have none. Raises InputError if the profile is unreadable."""
    path = folder / PROFILE
    if not path.exists():
        return AppProfile()
    try:
        tables = json.loads(path.read_text("utf-8"))
        if tables["version"] != _VERSION:
            raise InputError(
                f"{path} must be of version {_VERSION}; it is of {tables['version']}. Measure into another folder"
            )
        return AppProfile(
            **{name: tuple(kind(**_with_tuples(row)) for row in tables[name]) for name, kind in _ROWS.items()}
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path} is not the profile of an application ({error!r}); measure into another folder"
        raise InputError(text) from error


def _with_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def write_profile(folder: Path, profile: AppProfile) -> None:
    """Write profile.json and the file of switching times, each atomically."""
    text = json.dumps({"version": _VERSION, **asdict(profile)}, indent=1) + "\n"
    write_atomic(folder / PROFILE, text.encode())
    if profile.switches:
        write_switch_times(folder / SWITCH_TIMES, profile.switch_times())


def lengths_path(folder: Path, model: str) -> Path:
    """Return the path of the file with a model's output lengths."""
    return folder / f"lengths-{slug(model)}.csv"


def cost_path(folder: Path, model: str) -> Path:
    """Return the path of the file with a model's cost tables."""
    return folder / f"cost-{slug(model)}.npz"


def digest(*words: object) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the objects' texts."""
    return hashlib.sha256(json.dumps([str(word) for word in words]).encode()).hexdigest()[:16]
