"""Rows, machine description, timing, processes, and the hash of the code that all benchmarks share."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def toml(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))


RECORDED = toml("recorded")


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


def machine() -> dict[str, Any]:
    """Describe this machine, its load and the versions that decide over speed."""
    import numba
    import numpy as np

    from lengthwise.measure.operators.device import processor

    versions = {"python": platform.python_version(), "numba": numba.__version__, "numpy": np.__version__}
    return {"cpu": processor(), "cores": os.cpu_count(), "load_1m": os.getloadavg()[0]} | versions


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


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return the items of each key, in their order."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the median and the range of repeats, as ``value`` and ``ci`` of a row; one value has no range."""
    return {"value": statistics.median(values), "ci": (min(values), max(values)) if len(values) > 1 else None}


def cpu_seconds(run: Callable[[], Any], repeats: int) -> list[float]:
    """Return CPU seconds of calls: steadier than wall time on a shared machine."""
    times_s = [time.process_time()]
    for _ in range(repeats):
        run()
        times_s.append(time.process_time())
    return [after - before for before, after in itertools.pairwise(times_s)]


def python_loop() -> None:
    """Run 100,000 rounds of integer arithmetic: a fixed amount of plain Python, to compare machines."""
    number = 1
    for _ in range(100_000):
        number = (number * 1_103_515_245 + 12_345) & 0x7FFFFFFF


def fresh_process(code: str, **environment: str) -> Any:
    """Run Python code in a new process; return the JSON of its last line."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def group_use(group: int) -> tuple[float, float]:
    """Return (CPU seconds, resident MiB) of the living processes of a group; 0 where there is no /proc."""
    ticks = pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[2]) == group:
                ticks, pages = ticks + int(words[11]) + int(words[12]), pages + int(words[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def posted(
    url: str, bodies: Sequence[Any], due_s: Sequence[float] = (), *, concurrency: int = 0, key: str = "", clock: Any = 0
) -> list[tuple[float, float, float, bytes]]:
    """Post completions at their times, or ``concurrency`` at a time; return seconds by a clock and content of each."""
    # Seconds are those at which it was due, sent and finished. Every status must be 200.
    import aiohttp

    slots, start_s = asyncio.Semaphore(concurrency or len(bodies)), (clock := clock or time.monotonic)() + 0.1
    options = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=None)}
    async with aiohttp.ClientSession(**options, headers={"Authorization": f"Bearer {key}"}) as session:

        async def post(body: Any, due_s: float) -> tuple[float, float, float, bytes]:
            await asyncio.sleep(start_s + due_s - clock())
            async with slots:
                sent_s = clock()
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    content = await response.read()
                    assert response.status == 200, content[:500]
            return start_s + due_s, sent_s, clock(), content

        return await asyncio.gather(*map(post, bodies, due_s or [0.0] * len(bodies)))


def code_sha256() -> str:
    """Return the hash of paths and contents of the package and of the benchmarks, without results."""
    files = [path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(ROOT).as_posix(), path) for path in files):
        if not re.search("__pycache__|results/|[.]md$", name):
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def of_measuring() -> dict[str, Any]:
    """Return time and code as a campaign begins to measure."""
    return {"measured_at": datetime.now(UTC).isoformat(timespec="minutes"), "measured_code_sha256": code_sha256()}


def measured_by(folder: Path) -> dict[str, Any]:
    """Return time and code from the folder of a campaign; None where they were not recorded."""
    path = folder / "device.json"
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return {key: known.get(key) for key in ("measured_at", "measured_code_sha256")}


def making() -> dict[str, Any]:
    """Return the code that makes a row now."""
    return {"code_sha256": code_sha256()}


def origin(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details of a row made now from runs measured as ``measured`` states; no hash counts as other code."""
    made = making()
    return {**measured, **made, "frozen": measured["measured_code_sha256"] == made["code_sha256"]}
