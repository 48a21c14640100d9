"""Process that measures collectives as one rank: ``python -m`` this module, with one JSON argument.

Rank 0 prints a JSON line per operator and message size. The ranks find each other by a file, without a port.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_WARM_UP = 3
CALLS = 20
_SLEEP_CYCLES = 4_000_000  # about two milliseconds: longer than a host takes to enqueue the calls


def main(settings_json: str) -> None:
    """Measure the collectives at all message sizes as one of the ranks. Rank 0 prints the seconds of each repeat."""
    import torch
    import torch.distributed as dist

    settings = json.loads(settings_json)
    rank, backend = settings["rank"], settings["backend"]
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{settings['meet']}",
        rank=rank,
        world_size=settings["world"],
        timeout=timedelta(seconds=settings["timeout_s"]),
    )
    measure = by_events if backend == "nccl" else _by_clock
    for size in settings["bytes"]:
        device = "cuda" if backend == "nccl" else "cpu"
        tensor = torch.ones(max(1, size // 4), dtype=torch.float32, device=device)

        def send(tensor: Any = tensor) -> None:
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            elif rank == 1:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)

        def all_reduce(tensor: Any = tensor) -> None:
            dist.all_reduce(tensor)

        for name, call, messages in (("all-reduce", all_reduce, 1), ("send", send, 2)):  # there and back
            for _ in range(_WARM_UP):
                call()
            seconds = [each / messages for each in measure(torch, dist, call, settings["repeats"])]
            if rank == 0:
                sys.stdout.write(json.dumps({"operator": name, "bytes": size, "seconds": seconds}) + "\n")
                sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()


def _by_clock(_: Any, dist: Any, call: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def by_events(torch: Any, dist: Any, call: Callable[[], object], repeats: int) -> list[float]:
    """Return the slowest rank's seconds of a call in each repeat. CUDA events exclude the time of launches."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - torch's own tests wait with it
        call()  # untimed: aligns the ranks
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / CALLS)
    slowest = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(one) for one in slowest.tolist()]


if __name__ == "__main__":
    main(sys.argv[1])
