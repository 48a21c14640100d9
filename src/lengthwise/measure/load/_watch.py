"""What the client can say of itself: how late it was, how busy, and whether clocks agreed."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.measure.load._often import LEAST_P99, beyond
from lengthwise.schema.measured import IDLE_SHARE

Floats = npt.NDArray[np.float64]

_TICK_S = 0.02
_LATE_S, _LATE_SHARE, _LEAST_LATE_S = 0.010, 0.05, 0.001
"""Late is who left more than 10 ms, or 5 % of a median TTFT, after it was due; nobody is within 1 ms, as no loop wakes
more exactly."""

_LAG_SHARE = 0.5
"""A loop that wakes later than so much of a median TTFT reads many tokens at once."""

_BUSY = 0.8
_READINGS = 5
_SKEW_S, _SKEW_SHARE = 0.05, 2e-4


class Watch:
    """Runs beside the requests; ``facts`` and ``doubts`` tell what it saw."""

    def __init__(self) -> None:
        self.start = datetime.now(UTC)
        self.start_s, self._cpu_s, self._apart_s = time.perf_counter(), time.process_time(), _clocks_apart_s()
        self.lags: list[float] = []
        self.facts: dict[str, Any] = {}

    async def run(self) -> None:
        """Measures for ever how late the event loop wakes."""
        while True:
            due_s = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lags.append(max(0.0, time.perf_counter() - due_s))

    def close(self, late_s: Sequence[float] | Floats, median_ttft_s: float = math.inf) -> None:
        """Ends the measurement; ``late_s`` is how late each request left after it was due."""
        span_s = max(time.perf_counter() - self.start_s, 1e-9)
        self.facts = {
            "late_s": _quantiles(late_s),
            "late": beyond(late_s, min(_LATE_S, max(_LEAST_LATE_S, _LATE_SHARE * median_ttft_s))),
            "loop_lag_s": _quantiles(self.lags),
            "loop_lag": beyond(self.lags, max(_LATE_S, _LAG_SHARE * median_ttft_s)),
            "cpu_share": (time.process_time() - self._cpu_s) / span_s,
            "clock_skew_s": _clocks_apart_s() - self._apart_s,
            "span_s": span_s,
            "median_ttft_s": median_ttft_s if math.isfinite(median_ttft_s) else None,
        }
        self.facts["late_doubt"] = self._late_doubt()  # which of the doubts a calibration may weigh

    def doubts(self) -> list[str]:
        """What of it limits the trust in latencies."""
        return [*self._lateness(), *self._business(), *self._clocks()]

    def _late_doubt(self) -> str | None:
        late, share = self.facts["late"], self.facts["cpu_share"]
        if not late["surely_often"]:
            return None
        why = (
            ""
            if share > IDLE_SHARE
            else f"; it had {100 * share:.0f} % of a core: other work on its machine held it up, or it was blocked"
        )
        return (
            f"the client sent {late['count']:,} of {late['of']:,} requests ({100 * late['share']:.1f} %) more than "
            f"{1e3 * late['limit_s']:.1f} ms after they were due (the worst "
            f"{1e3 * self.facts['late_s']['max']:.1f} ms{self._ttft()}); latencies, counted from when they were due, "
            f"hold it{why}"
        )

    def _ttft(self) -> str:
        ttft_s = self.facts["median_ttft_s"]
        return "" if ttft_s is None else f"; median TTFT {1e3 * ttft_s:.1f} ms"

    def _lateness(self) -> Iterator[str]:
        if self.facts["late_doubt"] is not None:
            yield self.facts["late_doubt"]
        lag, ttft = self.facts["loop_lag"], self._ttft()
        if lag["surely_often"]:
            yield (
                f"the client woke more than {1e3 * lag['limit_s']:.0f} ms late in {lag['count']:,} of {lag['of']:,} "
                f"looks (the worst {1e3 * self.facts['loop_lag_s']['max']:.0f} ms{ttft}): tokens may have waited to be "
                "read, so that TTFT is too long and the times between tokens are too short"
            )

    def _business(self) -> Iterator[str]:
        share = self.facts["cpu_share"]
        if share > _BUSY:
            yield (
                f"the client kept {100 * share:.0f} % of a core busy: it may itself be what was measured; "
                "lower the load, or use a machine of its own"
            )

    def _clocks(self) -> Iterator[str]:
        skew, span_s = abs(self.facts["clock_skew_s"]), self.facts["span_s"]
        if skew > _SKEW_S + _SKEW_SHARE * span_s:
            yield (
                f"the wall clock moved by {skew:.2f} s against the monotonic one during the run; times are of the "
                "monotonic one, but logs of others that tell wall times will not fit"
            )


def _clocks_apart_s() -> float:
    """The wall clock less the monotonic one; of several readings the one that was interrupted least."""
    readings = []
    for _ in range(_READINGS):
        before_s, wall_s, after_s = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after_s - before_s, wall_s - (before_s + after_s) / 2))
    return min(readings)[1]


def machine() -> dict[str, Any]:
    """The machine that the client runs on."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
    }


def _quantiles(values: Sequence[float] | Floats) -> dict[str, float | None]:
    """Median, 99th percentile (None below so many that one of them alone would be it) and largest."""
    if not len(values):
        return {"p50": 0.0, "p99": None, "max": 0.0}
    p50, p99, top = np.quantile(np.asarray(values), [0.5, 0.99, 1.0])
    return {"p50": float(p50), "p99": float(p99) if len(values) >= LEAST_P99 else None, "max": float(top)}
