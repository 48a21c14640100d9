"""All that the admin page shows, as one plain value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from lengthwise.gateway.admin import figures
from lengthwise.gateway.admin.policies import Policies
from lengthwise.gateway.admin.recent import SAMPLE_S, WINDOW_S, Recent
from lengthwise.gateway.clock import Clock
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.decisions import Statistics, WorkerNumbers, WorkerState
from lengthwise.gateway.observe import Watch
from lengthwise.gateway.telemetry import Telemetry, Trip

SHOWN = 48
MOST_RANKED = 400
"""So many of those who wait are asked for their places; of longer queues those who came first."""


class Hub(Protocol):
    """What is asked of ``gateway.hub.Hub``."""

    def statistics(self) -> Statistics: ...  # noqa: D102
    def position(self, request_id: int, /) -> int | None: ...  # noqa: D102


class Fleet(Protocol):
    """What is asked of ``gateway.fleet.Fleet``."""

    def states(self) -> Sequence[WorkerState]: ...  # noqa: D102
    def worker(self, name: str, /) -> Any: ...  # noqa: D102


class Forecaster(Protocol):
    """What is asked of ``gateway.forecast.Forecaster``."""

    def state(self) -> dict[str, Any]: ...  # noqa: D102


class State:
    """Makes the value when it is asked for.

    Args:
        config: The gateway's.
        hub: Where requests wait.
        fleet: The engines.
        forecaster: Who predicts.
        telemetry: What is known of requests.
        recent: The last minutes.
        watch: Who looks back at the traffic; None: nobody.
        clock: The gateway's.
    """

    def __init__(
        self,
        config: GatewayConfig,
        hub: Hub,
        fleet: Fleet,
        forecaster: Forecaster | None,
        telemetry: Telemetry,
        recent: Recent,
        watch: Watch | None,
        clock: Clock,
    ) -> None:
        self.config = config
        self._hub, self._fleet, self._forecaster = hub, fleet, forecaster
        self._telemetry, self._recent, self._watch, self._clock = telemetry, recent, watch, clock
        self._policies = Policies(clock, WINDOW_S)
        self._began_s = clock()

    def now(self) -> dict[str, Any]:
        """The value; numbers that are not known are None."""
        now_s, statistics = self._clock(), self._hub.statistics()
        rows = self._recent.rows()
        found = self._watch.found if self._watch else None
        told = {
            "mode": self.config.order.mode,
            "max_wait_s": self.config.order.max_wait_s,
            "up_s": now_s - self._began_s,
            "window_s": WINDOW_S,
            "queue": self._queue(statistics, now_s),
            "workers": self._workers(statistics, now_s),
            "lengths": figures.lengths(rows),
            "times": figures.times(rows),
            "policies": self._policies.rows(self.config.order.mode, self._telemetry.regret.pairs(), found),
            "regret": self._regret(now_s),
            "samples": {"every_s": SAMPLE_S, "rows": [(s[0] - now_s, *s[1:]) for s in self._recent.samples]},
            "counts": self._counts(),
            "troubles": [one | {"ago_s": now_s - one["at_s"]} for one in reversed(self._recent.troubles)],
            "forecast": self._forecaster.state() if self._forecaster else {},
            "observed": found,
            "schedule": self._schedule(now_s),
        }
        plain: dict[str, Any] = _plain(told)
        return plain

    def _queue(self, statistics: Statistics, now_s: float) -> dict[str, Any]:
        told = {name: getattr(statistics, name) for name in _TOLD}
        return told | {"order": [_waiting(trip, now_s) for trip in self._order()]}

    def _order(self) -> list[Trip]:
        """Those who go first, in their order."""
        waiting = []
        for trip in self._telemetry.trips:
            if math.isnan(trip.sent_s):
                waiting.append(trip)
                if len(waiting) == MOST_RANKED:
                    break
        placed = [(self._hub.position(trip.request.id), trip) for trip in waiting]
        known = sorted(
            ((place, trip) for place, trip in placed if place is not None), key=lambda pair: pair[0]
        )
        return [trip for _, trip in known[:SHOWN]]

    def _workers(self, statistics: Statistics, now_s: float) -> list[dict[str, Any]]:
        numbers = {worker.name: worker for worker in statistics.workers}
        return [self._worker(state, numbers.get(state.name), now_s) for state in self._fleet.states()]

    def _worker(self, state: WorkerState, numbers: WorkerNumbers | None, now_s: float) -> dict[str, Any]:
        signals = state.signals
        told = {
            "name": state.name,
            "models": list(state.models),
            "up": state.up,
            "slots": state.slots,
            "tokens_per_s": state.tokens_per_s,
            "running": signals.running,
            "waiting": signals.waiting,
            "kv_used": signals.kv_used,
            "in_flight": numbers.in_flight if numbers else 0,
            "cap": numbers.cap if numbers else None,
            "backlog_tokens": numbers.backlog_tokens if numbers else 0.0,
        }
        try:
            worker = self._fleet.worker(state.name)
        except KeyError:
            return told | {"kind": "", "breaker": "", "why": "gone"}
        why = worker.trouble(now_s) if hasattr(worker, "trouble") else ""
        if not why and self.config.order.mode == "engine-priority" and hasattr(worker, "priorities"):
            why = worker.priorities()
        breaker = worker.breaker.state(now_s) if hasattr(worker, "breaker") else ""
        return told | {"kind": worker.kind, "breaker": breaker, "why": str(why)[:200]}

    def _regret(self, now_s: float) -> dict[str, Any]:
        """Means over so many requests; the last of them came so long ago, as who came later waits to be told."""
        regret = self._telemetry.regret
        had_s, fcfs_s = regret.recent()
        told = {"mean_s": regret.mean_s(), "jct_s": had_s, "fcfs_s": fcfs_s, "count": regret.recent_count}
        return told | {"until_ago_s": now_s - regret.until_s}

    def _schedule(self, now_s: float) -> dict[str, Any] | None:
        """What mode rra keeps, and how it follows lengths; None: another mode."""
        phases = self.config.dispatch.phases
        if self.config.order.mode != "rra" or phases is None:
            return None
        follow = self._telemetry.metrics.following
        if follow is None:
            return {"phases": asdict(phases), "follows": None}
        now = follow()
        told = asdict(now) | {"alarm": 1 / now.false_alarms, "last_ago_s": now_s - now.last_s}
        return {"phases": asdict(phases), "follows": told}

    def _counts(self) -> dict[str, Any]:
        outcomes: dict[str, int] = {}
        for (outcome, _, _), count in self._telemetry.metrics.requests.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
        counts = self._telemetry.metrics.counts
        cuts = counts["cut"] + counts["window"]
        return {"outcomes": outcomes, "cuts": cuts, "failovers": counts["failed_over"]}


_TOLD = (
    "waiting", "waiting_bytes", "running", "oldest_wait_s", "backlog_tokens", "backlog_s", "predicted_wait_s",
    "ordering",
)  # fmt: skip


def _waiting(trip: Trip, now_s: float) -> dict[str, Any]:
    request = trip.request
    return {
        "left": request.forecast.remaining_tokens(request.generated_tokens),
        "got": request.generated_tokens,
        "waited_s": now_s - request.arrival_s if math.isnan(trip.dispatched_s) else request.waited_s,
        "priority": request.priority,
        "model": request.model,
    }


def _plain(value: Any) -> Any:
    """Of numbers, texts, lists and dicts alone; six digits are enough for people."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, Iterable):
        return [_plain(one) for one in value]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
