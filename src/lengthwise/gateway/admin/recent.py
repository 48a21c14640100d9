"""The last minutes, as the admin page shows them. No prompts are ever here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lengthwise.gateway.clock import Clock
from lengthwise.gateway.decisions import Statistics
from lengthwise.gateway.request import Outcome, Refusal
from lengthwise.gateway.telemetry import Row, Telemetry

WINDOW_S = 600.0
MOST_ROWS = 2000
MOST_TROUBLES = 30
SAMPLES = 300
SAMPLE_S = 2.0
GOOD = (Outcome.FINISHED, Outcome.CLIENT_GONE)


class Recent:
    """Rows, refusals and failures of the last minutes, and samples of the queue.

    Args:
        telemetry: Whose rows and refusals are kept.
        clock: The gateway's.
        statistics: The scheduler now.
    """

    def __init__(self, telemetry: Telemetry, clock: Clock, statistics: Callable[[], Statistics]) -> None:
        self._telemetry, self._clock, self._statistics = telemetry, clock, statistics
        self._rows: deque[Row] = deque(maxlen=MOST_ROWS)
        self.troubles: deque[dict[str, Any]] = deque(maxlen=MOST_TROUBLES)
        self.samples: deque[tuple[float, ...]] = deque(maxlen=SAMPLES)
        self._tokens = (clock(), 0)
        telemetry.trips.subscribe(self.over)
        telemetry.subscribe_refusals(self.refused)

    def over(self, row: Row) -> None:
        """A request is over."""
        self._rows.append(row)
        if row.outcome not in GOOD:
            self._trouble(row.ended_s, row.outcome, row.model, row.tenant, row.worker)

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:
        """A request was not let in."""
        del tenant
        self._trouble(self._clock(), f"refused: {reason} ({refusal.status})", model[:80], "", "")

    def rows(self) -> list[Row]:
        """Of requests that ended within the window."""
        since_s = self._clock() - WINDOW_S
        return [row for row in self._rows if row.ended_s >= since_s]

    def sample(self) -> None:
        """Notes the queue now."""
        now, now_s = self._statistics(), self._clock()
        tokens = sum(of.gap_s.total for of in self._telemetry.metrics.by_model.values())
        before_s, before = self._tokens
        rate = (tokens - before) / (now_s - before_s) if now_s > before_s else 0.0
        self._tokens = now_s, tokens
        self.samples.append((now_s, now.waiting, now.running, round(rate, 1), round(now.predicted_wait_s, 3)))

    def _trouble(self, at_s: float, what: str, model: str, tenant: str, worker: str) -> None:
        last = self.troubles[-1] if self.troubles else None
        if last and (last["what"], last["model"], last["worker"]) == (what, model, worker):
            last["count"] += 1
            last["at_s"] = at_s
            return
        fresh = {"at_s": at_s, "what": what, "model": model, "tenant": tenant, "worker": worker, "count": 1}
        self.troubles.append(fresh)
