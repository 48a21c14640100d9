"""Collectives between this machine's GPUs (NCCL), or between processes on its CPU (gloo)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lengthwise.measure.operators.points import MESSAGE, Operator, Point
from lengthwise.measure.operators.timing import Outcome

SIZES_BYTES = tuple(4**n for n in range(5, 14))
_REPEATS = 7
_WORKER = "lengthwise.measure.operators._collective_worker"


def operators(gpus: int) -> tuple[Operator, ...]:
    """The collectives over so many devices; kernels of no model."""
    shape = {"gpus": gpus}
    return tuple(
        Operator(name, MESSAGE, (0,), (SIZES_BYTES[-1],), 1.0, shape) for name in ("all-reduce", "send")
    )


def measure(
    torch: Any, device: str, gpus: int, *, limit_s: float, sizes_bytes: Sequence[int] = SIZES_BYTES
) -> tuple[list[Outcome], str]:
    """Outcomes of all-reduce and send over ``gpus`` devices, and why there are none or fewer ("": all there).

    Processes are started for it and ended after ``limit_s`` at the latest.
    """
    if device == "cuda" and torch.cuda.device_count() < gpus:
        return (
            [],
            f"collectives over {gpus} GPUs were not measured: this machine has {torch.cuda.device_count()}",
        )
    backend = "nccl" if device == "cuda" else "gloo"
    if not torch.distributed.is_available() or not getattr(torch.distributed, f"is_{backend}_available")():
        return [], f"collectives were not measured: this torch has no {backend}"
    lines, why = _run(backend, gpus, limit_s, sizes_bytes)
    by_name = {one.name: one for one in operators(gpus)}
    outcomes = [
        Outcome(Point(by_name[line["operator"]], (line["bytes"],)), tuple(line["seconds"]), (), backend)
        for line in lines
    ]
    return outcomes, f"collectives over {gpus} devices are not complete: {why}" if why else ""


def _run(
    backend: str, world: int, limit_s: float, sizes_bytes: Sequence[int]
) -> tuple[list[dict[str, Any]], str]:
    """What rank 0 printed until it ended or was ended, and what went wrong."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    with tempfile.TemporaryDirectory() as folder:
        asked = {"world": world, "backend": backend, "meet": str(Path(folder, "meet")), "repeats": _REPEATS}
        asked |= {"timeout_s": limit_s, "bytes": list(sizes_bytes)}
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            workers = [
                subprocess.Popen(  # noqa: S603 - this very package
                    [sys.executable, "-m", _WORKER, json.dumps({**asked, "rank": rank})],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out_file if rank == 0 else subprocess.DEVNULL,
                    stderr=err_file,
                )
                for rank in range(world)
            ]
            why = _ended(workers, limit_s)
        lines = out.read_bytes().splitlines(keepends=True)
        told = err.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if why == "failed" and told:
        why = told[-1][:200]
    return [json.loads(line) for line in lines if line.endswith(b"\n")], why


def _ended(workers: list[subprocess.Popen[bytes]], limit_s: float) -> str:
    """Waits for all; "" if they ended well. None is left running."""
    until = time.monotonic() + limit_s
    try:
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() not in {None, 0} for worker in workers):
                return "failed"
            if time.monotonic() > until:
                return f"they took more than {limit_s:.0f} s"
            time.sleep(0.05)
        return "failed" if any(worker.returncode for worker in workers) else ""
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
