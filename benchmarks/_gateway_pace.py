"""How fast the machine is: two fixed loops, timed before and after what is measured.

A shared machine's speed drifts by a half within hours. Figures of one run can be compared; those of two runs only
where these loops took as long.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LOOP_ROUNDS, IO_ROUNDS, IO_BYTES = 100_000, 5_000, 256
REPEATS = 7


@dataclass(frozen=True)
class Pace:
    """Microseconds that each repeat took.

    Attributes:
        loop_us: Of LOOP_ROUNDS rounds of plain Python.
        io_us: Of IO_ROUNDS writes of IO_BYTES to a socket, each read again from its other end.
    """

    loop_us: tuple[float, ...]
    io_us: tuple[float, ...]


def pace(on: set[int], repeats: int = REPEATS) -> Pace:
    """The pace of these cores now; the thread is where it was afterwards."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, on)
    try:
        return Pace(_timed(_loop, repeats), _timed(_io, repeats))
    finally:
        os.sched_setaffinity(0, mine)


def figures(before: Pace, after: Pace) -> dict[str, Any]:
    """The medians over both, their ranges, and the medians of each."""
    return {
        "machine_pace": _figure(before.loop_us, after.loop_us) | {"rounds": LOOP_ROUNDS},
        "machine_pace_io": _figure(before.io_us, after.io_us) | {"rounds": IO_ROUNDS, "bytes": IO_BYTES},
    }


def _figure(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    every = [*before, *after]
    return {
        "value": statistics.median(every),
        "unit": "us",
        "ci": (min(every), max(every)),
        "before_us": statistics.median(before),
        "after_us": statistics.median(after),
    }


def _timed(work: Callable[[], int], repeats: int) -> tuple[float, ...]:
    """Microseconds of each repeat; the answers are the same."""
    took, answers = [], set()
    for _ in range(repeats):
        start = time.perf_counter()
        answers.add(work())
        took.append((time.perf_counter() - start) * 1e6)
    assert len(answers) == 1
    return tuple(took)


def _loop() -> int:
    number = 1
    for _ in range(LOOP_ROUNDS):
        number = (number * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return number


def _io() -> int:
    one, other = socket.socketpair()
    data, taken = b"x" * IO_BYTES, 0
    with one, other:
        for _ in range(IO_ROUNDS):
            one.send(data)
            taken += len(other.recv(IO_BYTES))
    return taken
