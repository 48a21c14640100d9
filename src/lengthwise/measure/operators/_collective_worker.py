"""One of the processes that measure collectives: ``python -m`` this file, with one JSON argument.

Rank 0 prints a JSON line a message size. The group meets through a file, so that no port is opened.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_WARM_UP = 3
_CALLS = 20
_SLEEP_CYCLES = 4_000_000  # two milliseconds: longer than a host takes to enqueue the calls


def main(text: str) -> None:
    """Measures all sizes and prints the medians' repeats."""
    import torch
    import torch.distributed as dist

    asked = json.loads(text)
    rank, world, backend = asked["rank"], asked["world"], asked["backend"]
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{asked['meet']}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=asked["timeout_s"]),
    )
    device = "cuda" if backend == "nccl" else "cpu"
    for size in asked["bytes"]:
        tensor = torch.ones(max(1, size // 4), dtype=torch.float32, device=device)
        for name, call in _calls(dist, rank, tensor).items():
            told = _repeats(torch, dist, call, device, asked["repeats"])
            if rank == 0:
                sys.stdout.write(json.dumps({"operator": name, "bytes": size, "seconds": told}) + "\n")
                sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()


def _calls(dist: Any, rank: int, tensor: Any) -> dict[str, Callable[[], object]]:
    """An all-reduce over all; and a message there and back between the first two, which is two sends."""

    def send() -> None:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return {"all-reduce": lambda: dist.all_reduce(tensor), "send": send}


def _repeats(torch: Any, dist: Any, call: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Seconds of each repeat, of one message."""
    messages = 2 if call.__name__ == "send" else 1
    for _ in range(_WARM_UP):
        call()
    one = _on_gpu if device == "cuda" else _by_clock
    return [seconds / messages for seconds in one(torch, dist, call, repeats)]


def _by_clock(_: Any, dist: Any, call: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _on_gpu(torch: Any, dist: Any, call: Callable[[], object], repeats: int) -> list[float]:
    """By events around many calls, the slowest rank's; neither launches nor late ranks count.

    The GPU sleeps while the host enqueues all calls, and one call that is not timed lines the ranks up.
    """
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - what torch's own tests wait with
        call()
        start.record()
        for _ in range(_CALLS):
            call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / _CALLS)
    slowest = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(one) for one in slowest.tolist()]


if __name__ == "__main__":
    main(sys.argv[1])
