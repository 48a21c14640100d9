"""JCT and queueing by policy: what requests had, what FCFS would have given the same ones, what was simulated.

Intervals of 95 %: stretches of consecutive requests are drawn with replacement (Künsch 1989), the same ones for what
was and for the shadow, and the draws' scatter is laid around the value with Student's factor. They hold that where
bursts are short against a stretch. A queue remembers longer: the mean time in an M/M/1 queue at a load of 0.8 lay
within for 63 % of 300 requests, 80 % of 1,000. A quantile of too few requests has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.clock import Clock
from lengthwise.gateway.telemetry import Pair

Floats = npt.NDArray[np.float64]
QUANTILES = (0.5, 0.9, 0.99)
EVERY_S = 5.0
DRAWS, BLOCKS = 30, 12
MOST = 1000
"""So many requests at most, the last ones: live requests wait while this is computed, a few ms."""
LEAST = 4 * BLOCKS
"""Of fewer requests no interval is told."""
LEAST_BEYOND = 5
"""So many requests beyond a quantile at least, or it gets no interval: the largest of few says nothing."""
T_975 = 2.201
"""Student's, of BLOCKS - 1 degrees of freedom."""
HAD, SHADOW, SIMULATED = "had", "shadow", "simulated"


class Policies:
    """The table's rows, made anew at most every few seconds, and only when somebody asks.

    Args:
        clock: The gateway's.
        window_s: Requests that ended longer ago do not count.
        every_s: Between two makings.
        seed: Of the draws.
    """

    def __init__(self, clock: Clock, window_s: float, *, every_s: float = EVERY_S, seed: int = 0) -> None:
        self._clock, self._window_s, self._every_s, self._seed = clock, window_s, every_s, seed
        self._made_s = -math.inf
        self._live: list[dict[str, Any]] = []

    def rows(self, mode: str, pairs: Sequence[Pair], found: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """A row a policy: times as [value, low, high] of mean, median, 90 % and 99 %; changes are against FCFS.

        Args:
            mode: Under which all requests of this gateway were ordered.
            pairs: ``Regret.pairs``.
            found: What a look back found, as JSON.
        """
        now_s = self._clock()
        if now_s - self._made_s >= self._every_s:
            self._made_s = now_s
            recent = [pair for pair in pairs if pair.ended_s >= now_s - self._window_s][-MOST:]
            self._live = lived(mode, recent, seed=self._seed)
        return self._live + simulated(found)


def lived(mode: str, pairs: Sequence[Pair], *, seed: int = 0) -> list[dict[str, Any]]:
    """What requests had, and what the shadow of FCFS gave the same ones; nothing of none."""
    if not pairs:
        return []
    of = np.array([pair[1:] for pair in pairs]).T.copy()
    n = len(pairs)
    values = _statistics(of)
    scattered = _statistics(of[:, _draws(n, seed)]) if n >= LEAST else np.full((4, 2, 4), math.nan)
    scattered[..., [False, *(n * (1 - q) < LEAST_BEYOND for q in QUANTILES)]] = math.nan
    half = T_975 * scattered.std(axis=1, ddof=1)
    told = np.stack([values, np.maximum(values - half, 0.0), values + half], axis=-1)
    had = _row(HAD, mode, n, told[0], told[1])
    had["mean_change"], had["p99_change"] = (_change(values, scattered, which) for which in (0, 3))
    return [had, _row(SHADOW, "fcfs", n, told[2], told[3])]


def simulated(found: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The policies that a look back simulated."""
    if not found:
        return []
    changes = {one["name"]: (one["mean"], one["p99"]) for one in found["orders"]}
    rows = []
    for one in found["times"]:
        jct, queue = ([[value, None, None] for value in one[name]] for name in ("jct_s", "queue_s"))
        row = _row(SIMULATED, one["name"], found["requests"], jct, queue)
        if one["name"] in changes:
            mean, p99 = ([told["value"], told["low"], told["high"]] for told in changes[one["name"]])
            row |= {"mean_change": mean, "p99_change": p99}
        rows.append(row)
    return rows


def _row(kind: str, name: str, count: int, jct: Any, queue: Any) -> dict[str, Any]:
    empty = {"mean_change": None, "p99_change": None}
    return {"kind": kind, "name": name, "count": count, "jct": jct, "queue": queue, **empty}


def _draws(n: int, seed: int) -> npt.NDArray[np.int64]:
    """[DRAWS, n] requests: stretches of consecutive ones, the last followed by the first."""
    rng = np.random.default_rng(seed)
    length = -(-n // BLOCKS)
    starts = rng.integers(0, n, (DRAWS, BLOCKS))
    return ((starts[:, :, None] + np.arange(length)) % n).reshape(DRAWS, -1)[:, :n]


def _statistics(of: Floats) -> Floats:
    """[column, ..., (mean, *QUANTILES)] of [column, ..., request]; a quantile is one of the values."""
    n = of.shape[-1]
    ranks = [min(n - 1, int(q * n)) for q in QUANTILES]
    quantiles = np.partition(of, ranks, axis=-1)[..., ranks]
    return np.concatenate([of.mean(axis=-1, keepdims=True), quantiles], axis=-1)


def _change(values: Floats, scattered: Floats, which: int) -> list[float]:
    """A statistic of the JCT that was over that of the shadow, less 1, with its ends."""
    ratio = math.log(values[0, which] / values[2, which])
    half = T_975 * float(np.log(scattered[0, :, which] / scattered[2, :, which]).std(ddof=1))
    return [math.expm1(ratio), math.expm1(ratio - half), math.expm1(ratio + half)]
