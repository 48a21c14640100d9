"""What a profile's folder holds: a book of all that was measured, and the files that others read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lengthwise.apps.launch.local import safe
from lengthwise.apps.plan import SwitchTimes, write_switch_times
from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_whole

BOOK, SWITCH_TIMES = "profile.json", "switch-times.toml"
_VERSION = 1
Shape = tuple[str, int, int]
"""(GPU, tp, pp) of one replica."""


@dataclass(frozen=True)
class Switched:
    """Seconds that one replica took, each time; ``of`` tells the command that started it from others.

    Attributes:
        sleep_s: Until it slept; none where it cannot.
    """

    model: str
    gpu: str
    tp: int
    pp: int
    of: str
    start_s: tuple[float, ...]
    stop_s: tuple[float, ...]
    sleep_s: tuple[float, ...] = ()
    wake_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Lengths:
    """Output lengths of a model in a sample of rows.

    Attributes:
        model: As the application calls it.
        of: What was asked.
        rows: Of the sample.
        outputs: How many there are.
        cut: Of them those that ended at their limit.
        mean_tokens: Of them; None: there are none.
        half_width: Of the mean's 95 % interval, over rows; None: of one row nobody knows.
    """

    model: str
    of: str
    rows: int
    outputs: int
    cut: int
    mean_tokens: float | None
    half_width: float | None


@dataclass(frozen=True)
class Costed:
    """Calibrated cost tables of one replica.

    Attributes:
        before: Mean absolute error of single held-out requests' JCT with the tables before, as a share.
    """

    model: str
    gpu: str
    tp: int
    pp: int
    of: str
    requests: int
    before: float
    after: float


_Row = TypeVar("_Row")


@dataclass(frozen=True)
class ProfileStore:
    """All that a folder knows; a row a model, or a model and a shape."""

    switches: tuple[Switched, ...] = ()
    lengths: tuple[Lengths, ...] = ()
    costs: tuple[Costed, ...] = ()

    def switched(self, model: str, shape: Shape) -> Switched | None:
        """What was measured of a replica."""
        return next((one for one in self.switches if (one.model, one.gpu, one.tp, one.pp) == (model, *shape)), None)

    def length(self, model: str) -> Lengths | None:
        """What was measured of a model's outputs."""
        return next((one for one in self.lengths if one.model == model), None)

    def cost(self, model: str) -> Costed | None:
        """What was calibrated of a model."""
        return next((one for one in self.costs if one.model == model), None)

    def with_switched(self, row: Switched) -> ProfileStore:
        """The same with a replica's row."""
        return replace(self, switches=_put(self.switches, row, ("model", "gpu", "tp", "pp")))

    def with_lengths(self, row: Lengths) -> ProfileStore:
        """The same with a model's row."""
        return replace(self, lengths=_put(self.lengths, row, ("model",)))

    def with_cost(self, row: Costed) -> ProfileStore:
        """The same with a model's row: one shape each."""
        return replace(self, costs=_put(self.costs, row, ("model",)))

    def switch_times(self) -> SwitchTimes:
        """Means of what was measured, as planning takes them."""
        measured: dict[tuple[str, str, int, int, str], float] = {}
        for one in self.switches:
            key = (one.model, one.gpu, one.tp, one.pp)
            told = {"start": one.start_s, "wake": one.wake_s, "stop": one.stop_s, "sleep": one.sleep_s}
            measured |= {(*key, how): float(np.mean(times)) for how, times in told.items() if times}
        return SwitchTimes(measured)


def read_book(folder: Path) -> ProfileStore:
    """What is in a folder; nothing where it is none."""
    path = folder / BOOK
    if not path.exists():
        return ProfileStore()
    try:
        told = json.loads(path.read_text("utf-8"))
        if told["version"] != _VERSION:
            raise InputError(
                f"{path} must be of version {_VERSION}; it is of {told['version']}. Measure into another folder"
            )
        return ProfileStore(
            tuple(_row(Switched, one) for one in told["switches"]),
            tuple(_row(Lengths, one) for one in told["lengths"]),
            tuple(_row(Costed, one) for one in told["costs"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is no profile of an application ({error!r}); measure into another folder") from error


def write_book(folder: Path, profile_store: ProfileStore) -> None:
    """Writes the book, and the switch times that follow from it; each file is whole."""
    told = {"version": _VERSION, **{name: [asdict(one) for one in getattr(profile_store, name)] for name in _TABLES}}
    write_whole(folder / BOOK, (json.dumps(told, indent=1) + "\n").encode())
    if profile_store.switches:
        write_switch_times(folder / SWITCH_TIMES, profile_store.switch_times())


_TABLES = ("switches", "lengths", "costs")


def lengths_path(folder: Path, model: str) -> Path:
    """Where a model's output lengths are."""
    return folder / f"lengths-{safe(model)}.csv"


def cost_path(folder: Path, model: str) -> Path:
    """Where a model's cost tables are."""
    return folder / f"cost-{safe(model)}.npz"


def digest(*words: object) -> str:
    """Tells things from others of their kind, in 16 hex digits."""
    return hashlib.sha256(json.dumps([str(one) for one in words]).encode()).hexdigest()[:16]


def _put(rows: tuple[_Row, ...], row: _Row, keys: Sequence[str]) -> tuple[_Row, ...]:
    def key(one: _Row) -> tuple[object, ...]:
        return tuple(getattr(one, name) for name in keys)

    return (*[one for one in rows if key(one) != key(row)], row)


def _row(kind: type[_Row], report: Mapping[str, Any]) -> _Row:
    values: dict[str, Any] = {n: tuple(one) if isinstance(one, list) else one for n, one in report.items()}
    return kind(**values)
