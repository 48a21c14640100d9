"""What R gateways before the same engines cost, each with a queue of its own: the table of README.md.

Requests arrive at random (Poisson), and each goes to a gateway by chance. SEATS are what the engines run at once.
Times at a seat are log-normal (sigma 1, mean 10 s), known before; in a queue the shortest goes first. Nobody is
cut. Two ways in which gateways come to seats are the ends between which adapting caps lie: "shared", a seat that
comes free goes to any gateway where somebody waits, by chance; "split", every gateway has its fixed part of them.
Times are from arrival to end.

    python deploy/replicas.py [requests]
"""

from __future__ import annotations

import heapq
import sys

import numpy as np

SEATS, MEAN_S, SIGMA = 64, 10.0, 1.0
GATEWAYS, LOADS = (1, 2, 4, 8), (0.9, 0.97)


class Queues:
    """One queue a gateway."""

    def __init__(self, gateways: int, *, shortest: bool, random: np.random.Generator) -> None:
        self._queues: list[list[tuple[float, int]]] = [[] for _ in range(gateways)]
        self._shortest, self._random, self.waiting = shortest, random, 0

    def add(self, owner: int, size: float) -> None:
        """One more, at a gateway by chance."""
        queue = self._queues[self._random.integers(len(self._queues))]
        heapq.heappush(queue, (size if self._shortest else owner, owner))
        self.waiting += 1

    def take(self) -> int:
        """Who gets the seat: the first of a gateway by chance."""
        there = [queue for queue in self._queues if queue]
        self.waiting -= 1
        return heapq.heappop(there[self._random.integers(len(there))])[1]


def mean_and_p99_s(
    gateways: int, load: float, requests: int, *, shortest: bool = True, split: bool = False, seed: int = 0
) -> tuple[float, float]:
    """Mean and 99th percentile of the time from arrival to end, in seconds, warm-up left out."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(MEAN_S / (SEATS * load), requests))
    sizes = random.lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA, requests)
    parts = gateways if split else 1
    chosen = random.integers(parts, size=requests)
    took = np.empty(requests)
    for part in range(parts):
        own = np.flatnonzero(chosen == part)
        queues = Queues(1 if split else gateways, shortest=shortest, random=random)
        took[own] = _served(arrivals[own], sizes[own], SEATS // parts, queues)
    steady = took[requests // 10 :]
    return float(steady.mean()), float(np.quantile(steady, 0.99))


def _served(arrivals: np.ndarray, sizes: np.ndarray, max_num_seqs: int, queues: Queues) -> np.ndarray:
    """[n] times from arrival to end."""
    ends = np.empty(len(sizes))
    free = [0.0] * max_num_seqs  # when each seat is
    coming = 0
    for _ in range(len(sizes)):
        now_s = heapq.heappop(free)
        if not queues.waiting:
            now_s = max(now_s, float(arrivals[coming]))
        while coming < len(sizes) and arrivals[coming] <= now_s:
            queues.add(coming, float(sizes[coming]))
            coming += 1
        who = queues.take()
        ends[who] = now_s + sizes[who]
        heapq.heappush(free, float(ends[who]))
    return ends - arrivals


def rows(requests: int) -> list[str]:
    """The table's rows, in Markdown."""
    found = []
    for load in LOADS:
        mean_s, p99_s = mean_and_p99_s(1, load, requests, shortest=False)
        found.append(f"| {load:g} | 1, first come first served | {mean_s:.1f} s | {p99_s:.0f} s | | |")
        for gateways in GATEWAYS:
            cells = [mean_and_p99_s(gateways, load, requests, split=split) for split in (False, True)]
            told = " | ".join(f"{mean_s:.1f} s | {p99_s:.0f} s" for mean_s, p99_s in cells)
            found.append(f"| {load:g} | {gateways} | {told} |")
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows(int(sys.argv[1]) if sys.argv[1:] else 400_000)) + "\n")
