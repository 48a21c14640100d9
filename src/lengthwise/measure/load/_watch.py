"""What the client can say of itself: how late it was, how busy, and whether clocks agreed."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

_TICK_S = 0.02
_LATE_S, _LATE_SHARE = 0.010, 0.05
_LAG_SHARE = 0.5
"""A loop that wakes later than so much of a median TTFT reads many tokens at once."""

_BUSY, _IDLE = 0.8, 0.4
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

    def close(self, late_s: Sequence[float]) -> None:
        """Ends the measurement; ``late_s`` is how late each request left after it was due."""
        span_s = max(time.perf_counter() - self.start_s, 1e-9)
        self.facts = {
            "late_s": _quantiles(late_s),
            "loop_lag_s": _quantiles(self.lags),
            "cpu_share": (time.process_time() - self._cpu_s) / span_s,
            "clock_skew_s": _clocks_apart_s() - self._apart_s,
            "span_s": span_s,
        }

    def doubts(self, median_ttft_s: float) -> list[str]:
        """What of it limits the trust in latencies."""
        late, share = self.facts["late_s"]["p99"], self.facts["cpu_share"]
        made = []
        if late > _LATE_S or late > _LATE_SHARE * median_ttft_s:
            why = (
                ""
                if share > _IDLE
                else f"; it had {100 * share:.0f} % of a core: other work on its machine held it up, or it was blocked"
            )
            made.append(
                f"the client sent 1 % of the requests {1e3 * late:.1f} ms or more after they were due "
                f"(median TTFT {1e3 * median_ttft_s:.1f} ms); latencies, counted from when they were due, hold it{why}"
            )
        lag = self.facts["loop_lag_s"]["p99"]
        if lag > _LATE_S and lag > _LAG_SHARE * median_ttft_s:
            made.append(
                f"the client woke up to {1e3 * lag:.0f} ms late (p99; median TTFT {1e3 * median_ttft_s:.1f} ms): "
                "tokens may have waited to be read, so that TTFT is too long and the times between tokens are too short"
            )
        if share > _BUSY:
            made.append(
                f"the client kept {100 * share:.0f} % of a core busy: it may itself be what was measured; "
                "lower the load, or use a machine of its own"
            )
        skew, span_s = abs(self.facts["clock_skew_s"]), self.facts["span_s"]
        if skew > _SKEW_S + _SKEW_SHARE * span_s:
            made.append(
                f"the wall clock moved by {skew:.2f} s against the monotonic one during the run; times are of the "
                "monotonic one, but logs of others that tell wall times will not fit"
            )
        return made


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


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not len(values):
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99, top = np.quantile(np.asarray(values), [0.5, 0.99, 1.0])
    return {"p50": float(p50), "p99": float(p99), "max": float(top)}
