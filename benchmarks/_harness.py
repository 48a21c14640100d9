"""Rows, machine description, timing and output that all benchmarks share."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOOP_ROUNDS = 100_000


@dataclass(frozen=True)
class Row:
    """One measured figure. ``ci`` is the range over repeats, or a 95 % interval; None: measured once."""

    name: str
    value: float
    unit: str
    target: float
    better: str
    ci: tuple[float, float] | None = None
    details: dict[str, Any] = field(default_factory=dict)


def arguments(description: str) -> argparse.Namespace:
    """Parse --json and --quick."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """Describe this machine, its load and the versions that decide over speed."""
    import numba
    import numpy as np

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
    }


def commit() -> str:
    """Return the commit of the code, with "-dirty" where the checkout has changes."""
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print rows as JSON lines, or as a table with a mark at those that meet their target."""
    for row in rows:
        if as_json:
            print(strict_json(asdict(row)))
            continue
        met = row.value >= row.target if row.better == "higher" else row.value <= row.target
        spread = f" [{row.ci[0]:.4g}, {row.ci[1]:.4g}]" if row.ci else ""
        mark = "ok " if met else "---"
        print(f"{mark} {row.name:34} {row.value:12.5g} {row.unit:12} target {row.target:g} {row.better}{spread}")


def strict_json(value: Any) -> str:
    """Encode as JSON, with null for numbers that are not finite."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the median and the range of repeats, as ``value`` and ``ci`` of a row."""
    return {"value": statistics.median(values), "ci": (min(values), max(values))}


def best_cpu_s(run: Callable[[], Any], repeats: int) -> tuple[float, list[float]]:
    """Return (median, all) CPU seconds of a call: steadier than wall time on a shared machine."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), seconds


def python_loop() -> int:
    """Run LOOP_ROUNDS rounds of integer arithmetic: a fixed amount of plain Python."""
    number = 1
    for _ in range(LOOP_ROUNDS):
        number = (number * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return number


def child_process(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, check: bool = True
) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Run a command to its end; return (process, CPU seconds, wall seconds)."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=check)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def fresh_process(code: str, **environment: str) -> dict[str, Any]:
    """Run Python code in a new process; return the JSON of its last line, its CPU and its wall seconds."""
    done, cpu_s, wall_s = child_process([sys.executable, "-c", code], os.environ | environment)
    lines = done.stdout.strip().splitlines()
    return {"cpu_s": cpu_s, "wall_s": wall_s, "out": json.loads(lines[-1]) if lines else None}
