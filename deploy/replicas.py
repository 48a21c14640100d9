"""Simulate R gateways in front of the same engines, each with its own queue: the table of README.md.

Requests arrive at random (Poisson), each at a random gateway. The engines run SLOTS requests at once. Service times
are log-normal (sigma 1, mean 10 s) and known in advance; each queue serves its shortest request first, without
preemption. Adaptive concurrency limits lie between two extremes: "shared", a free slot takes a request of a random
gateway whose queue is not empty; "split", each gateway has an equal, fixed number of slots. Times are from arrival to
end.

    python deploy/replicas.py [requests]
"""

from __future__ import annotations

import heapq
import sys

import numpy as np

SLOTS, MEAN_S, SIGMA = 64, 10.0, 1.0
GATEWAYS, LOADS = (1, 2, 4, 8), (0.9, 0.97)


class Queues:
    """One queue per gateway."""

    def __init__(self, gateways: int, *, shortest: bool, random: np.random.Generator) -> None:
        self._queues: list[list[tuple[float, int]]] = [[] for _ in range(gateways)]
        self._shortest, self._random, self.waiting = shortest, random, 0

    def add(self, owner: int, size: float) -> None:
        """Add a request to the queue of a random gateway."""
        queue = self._queues[self._random.integers(len(self._queues))]
        heapq.heappush(queue, (size if self._shortest else owner, owner))
        self.waiting += 1

    def take(self) -> int:
        """Return the request that takes a free slot: the first of a random gateway's queue."""
        waiting = [queue for queue in self._queues if queue]
        self.waiting -= 1
        return heapq.heappop(waiting[self._random.integers(len(waiting))])[1]


def mean_and_p99_s(
    gateways: int, load: float, requests: int, *, shortest: bool = True, split: bool = False, seed: int = 0
) -> tuple[float, float]:
    """Return the mean and the 99th percentile of the seconds from arrival to end, after a warm-up."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(MEAN_S / (SLOTS * load), requests))
    sizes = random.lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA, requests)
    parts = gateways if split else 1
    chosen = random.integers(parts, size=requests)
    took = np.empty(requests)
    for part in range(parts):
        own = np.flatnonzero(chosen == part)
        queues = Queues(1 if split else gateways, shortest=shortest, random=random)
        took[own] = _served(arrivals[own], sizes[own], SLOTS // parts, queues)
    steady = took[requests // 10 :]
    return float(steady.mean()), float(np.quantile(steady, 0.99))


def _served(arrivals: np.ndarray, sizes: np.ndarray, max_num_seqs: int, queues: Queues) -> np.ndarray:
    """Return [n] times from arrival to end."""
    ends = np.empty(len(sizes))
    free = [0.0] * max_num_seqs  # time at which each slot is free
    coming = 0
    for _ in range(len(sizes)):
        now_s = heapq.heappop(free)
        if not queues.waiting:
            now_s = max(now_s, float(arrivals[coming]))
        while coming < len(sizes) and arrivals[coming] <= now_s:
            queues.add(coming, float(sizes[coming]))
            coming += 1
        request = queues.take()
        ends[request] = now_s + sizes[request]
        heapq.heappush(free, float(ends[request]))
    return ends - arrivals


def rows(requests: int) -> list[str]:
    """Return the table's rows, in Markdown."""
    found = []
    for load in LOADS:
        mean_s, p99_s = mean_and_p99_s(1, load, requests, shortest=False)
        found.append(f"| {load:g} | 1, first come first served | {mean_s:.1f} s | {p99_s:.0f} s | | |")
        for gateways in GATEWAYS:
            cells = [mean_and_p99_s(gateways, load, requests, split=split) for split in (False, True)]
            shown = " | ".join(f"{mean_s:.1f} s | {p99_s:.0f} s" for mean_s, p99_s in cells)
            found.append(f"| {load:g} | {gateways} | {shown} |")
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows(int(sys.argv[1]) if sys.argv[1:] else 400_000)) + "\n")
