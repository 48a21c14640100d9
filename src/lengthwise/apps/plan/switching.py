"""How long it takes until a replica is ready, or gone: seconds by model, shape and how, measured or assumed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.files import write_whole

HOWS = ("start", "wake", "stop", "sleep")
"""A replica is ready after the first two, and has left its GPUs after the others."""


@dataclass(frozen=True)
class SwitchRates:
    """What is assumed where nothing was measured: an engine's own start, and what weights pass through.

    Chosen so that starting comes to what SamuLLM measured with vLLM on 8 x A100 (section 5.1: 11 s to 47 s, for models
    of 6 B to 70 B parameters, 12.5 to 138 GB): one stream from disk for all GPUs of a replica, then PCIe 4 to each GPU
    beside the others. It is a fit to the two ends of a range, not a measurement of any disk. Of engines that end or
    fall asleep nothing is assumed: those seconds count where they were measured.
    """

    engine_start_s: float = 7.0
    disk_bytes_per_s: float = 3.7e9
    pcie_bytes_per_s: float = 25e9

    def seconds(self, weight_bytes: float, gpus: int, how: str) -> float:
        """Until a replica of so many GPUs is ready, or gone; a wake copies weights from host memory alone."""
        if how in ("stop", "sleep"):
            return 0.0
        copied_s = weight_bytes / gpus / self.pcie_bytes_per_s
        if how == "wake":
            return copied_s
        return self.engine_start_s + weight_bytes / self.disk_bytes_per_s + copied_s


@dataclass(frozen=True)
class SwitchTimes:
    """Seconds by (model, GPU, tp, pp, how); what is not there is told by the rates.

    Attributes:
        measured: The table; how is one of ``HOWS``.
        rates: For what was not measured.
        wakes: Whether engines sleep (and wake on the same GPUs) rather than being stopped, where nothing was measured.
    """

    measured: Mapping[tuple[str, str, int, int, str], float] = field(default_factory=dict)
    rates: SwitchRates = SwitchRates()
    wakes: bool = False

    def seconds(self, name: str, weight_bytes: float, plan: ModelPlan, how: str) -> float:
        """Until one replica of the plan is ready, or has left its GPUs.

        Raises:
            UnknownNameError: There is no such way.
        """
        if how not in HOWS:
            raise UnknownNameError("way to switch a replica", how, HOWS)
        found = self.measured.get((name, plan.gpu, plan.tp, plan.pp, how))
        if found is not None:
            return found
        if how == "wake" and not self.wakes:
            return self.seconds(name, weight_bytes, plan, "start")
        return self.rates.seconds(weight_bytes, plan.tp * plan.pp, how)

    def can_wake(self, name: str, plan: ModelPlan) -> bool:
        """Whether a replica of the plan sleeps when it is not needed."""
        return self.wakes or (name, plan.gpu, plan.tp, plan.pp, "wake") in self.measured


def read_switch_times(path: Path | str) -> SwitchTimes:
    """The table of a file as ``write_switch_times`` writes it.

    Raises:
        InputError: The file cannot be read, or a row lacks something; the message names it.
    """
    try:
        told = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the switch times {path}: {error}") from error
    rows = told.get("replica", [])
    return SwitchTimes({_key(row, n, path): _seconds(row, n, path) for n, row in enumerate(rows, 1)})


def write_switch_times(path: Path | str, times: SwitchTimes) -> None:
    """Writes what was measured: TOML, a ``[[replica]]`` with model, gpu, tp, pp, how and seconds each."""
    lines = []
    for (model, gpu, tp, pp, how), seconds in sorted(times.measured.items()):
        lines += ["[[replica]]", f"model = {_text(model)}", f"gpu = {_text(gpu)}", f"tp = {tp}", f"pp = {pp}"]
        lines += [f'how = "{how}"', f"seconds = {float(seconds)!r}", ""]
    write_whole(path, "\n".join(lines).encode())


def _key(row: Mapping[str, object], n: int, path: Path | str) -> tuple[str, str, int, int, str]:
    missing = [key for key in ("model", "gpu", "how", "seconds") if key not in row]
    if missing:
        raise InputError(
            f"{path}: replica {n} must have model, gpu, how and seconds; it lacks {', '.join(missing)}"
        )
    how = str(row["how"])
    if how not in HOWS:
        raise UnknownNameError("way to switch a replica", how, HOWS)
    tp, pp = row.get("tp", 1), row.get("pp", 1)
    if not isinstance(tp, int) or not isinstance(pp, int) or min(tp, pp) < 1:
        raise InputError(
            f"{path}: replica {n}: tp and pp must be whole numbers of at least 1; they are {tp} and {pp}"
        )
    return str(row["model"]), str(row["gpu"]), tp, pp, how


def _seconds(row: Mapping[str, object], n: int, path: Path | str) -> float:
    value = row["seconds"]
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{path}: replica {n}: seconds must be a number of at least 0; it is {value!r}")
    return float(value)


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
