"""What every benchmark shares: arguments, JSON lines or a table, assertions of the answer."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measured figure. ``ci`` is the range over the repeats (None: measured once)."""

    name: str
    value: float
    unit: str
    target: float
    better: str
    ci: tuple[float, float] | None = None
    details: dict[str, Any] = field(default_factory=dict)


def arguments(description: str) -> argparse.Namespace:
    """--json, --quick."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import numba
    import numpy as np

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
    }


def _cpu() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def commit() -> str:
    """The commit of the code; "-dirty" behind it where the checkout holds more."""
    asked = ["git", "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
    done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def show(rows: list[Row], *, as_json: bool) -> None:
    """Prints the rows as JSON lines, or as a table."""
    if as_json:
        for row in rows:
            print(strict_json(asdict(row)))
        return
    for row in rows:
        decision = "ok " if met(row) else "---"
        spread = f" [{row.ci[0]:.4g}, {row.ci[1]:.4g}]" if row.ci else ""
        print(f"{decision} {row.name:34} {row.value:12.5g} {row.unit:12} target {row.target:g} {row.better}{spread}")


def strict_json(value: Any) -> str:
    """JSON that every reader takes: null where a number is not finite."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def met(row: Row) -> bool:
    """Whether a figure reaches its target."""
    return row.value >= row.target if row.better == "higher" else row.value <= row.target


def best_cpu_s(run: Callable[[], Any], repeats: int) -> tuple[float, list[float]]:
    """(median, all) CPU seconds of a call in this process: steadier than the wall on a shared machine."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), seconds


def fresh_process(code: str, **environment: str) -> dict[str, Any]:
    """Runs Python code in a new process; returns the JSON it prints last, its CPU and wall seconds."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = done.stdout.strip().splitlines()
    return {"cpu_s": cpu_s, "wall_s": wall_s, "out": json.loads(lines[-1]) if lines else None}
