"""All that the admin page shows, as one plain value."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.observe import Monitor
from lengthwise.gateway.protocols import Clock
from lengthwise.gateway.request import Outcome, Rejection
from lengthwise.gateway.scheduling import Statistics, WorkerNumbers, WorkerState
from lengthwise.gateway.telemetry import Pair, Row, Telemetry, Trip

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
            self._trouble(row.finished_s, row.outcome, row.model, row.tenant, row.worker)

    def refused(self, reason: str, rejection: Rejection, tenant: int, model: str) -> None:
        """A request was not let in."""
        del tenant
        self._trouble(self._clock(), f"refused: {reason} ({rejection.status})", model[:80], "", "")

    def rows(self) -> list[Row]:
        """Of requests that ended within the window."""
        since_s = self._clock() - WINDOW_S
        return [row for row in self._rows if row.finished_s >= since_s]

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


QUANTILES = (0.5, 0.9, 0.99)
MAX_POINTS = 400
CALIBRATION_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MIN_SAMPLES = 8
"""Fewer values have no quartiles worth telling."""


def times(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """JCT, time to first token and wait of finished requests: all, by class, by quartile of predicted length."""
    done = [row for row in rows if row.outcome == Outcome.FINISHED]
    groups: list[tuple[str, list[Row]]] = [("all", done)]
    classes = sorted({row.priority for row in done})
    if len(classes) > 1:
        groups += [(f"class {one}", [row for row in done if row.priority == one]) for one in classes]
    return [_group(name, some) for name, some in groups + _quartiles(done) if some]


def lengths(rows: Sequence[Row]) -> dict[str, Any]:
    """Predicted against actual output lengths: points, and how far the predictions can be believed."""
    done = [row for row in rows if row.outcome == Outcome.FINISHED and row.output_tokens >= 1]
    told: dict[str, Any] = {"count": len(done), "points": [], "calibration": []}
    if not done:
        return told
    predicted = np.array([max(row.predicted_tokens, 1.0) for row in done])
    actual = np.array([row.output_tokens for row in done], float)
    told["points"] = [[round(row.predicted_tokens, 1), row.output_tokens] for row in done[-MAX_POINTS:]]
    told["bias"] = float(np.median(predicted / actual))
    told["within_2x"] = float(np.mean(np.abs(np.log2(predicted / actual)) <= 1))
    told["concordance"] = _concordance(predicted[-MAX_POINTS:], actual[-MAX_POINTS:])
    levels = np.array([row.predicted_level for row in done])
    levels = levels[np.isfinite(levels)]
    if len(levels) >= MIN_SAMPLES:
        told["calibration"] = [[level, round(float(np.mean(levels <= level)), 4)] for level in CALIBRATION_LEVELS]
    return told


def _quartiles(done: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Groups of like predicted length, where lengths differ."""
    predicted = np.array([row.predicted_tokens for row in done])
    if len(predicted) < MIN_SAMPLES or np.ptp(predicted) == 0:
        return []
    cuts = np.unique(np.quantile(predicted, (0.25, 0.5, 0.75)))
    number = np.searchsorted(cuts, predicted, side="left")
    groups = []
    for one in range(len(cuts) + 1):
        some = [row for row, of in zip(done, number.tolist(), strict=True) if of == one]
        if some:
            low, high = (round(pick(row.predicted_tokens for row in some)) for pick in (min, max))
            groups.append((f"predicted {low if low == high else f'{low} to {high}'} tokens", some))
    return groups


def _group(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    columns = {
        "jct": [row.jct_s for row in rows],
        "ttft": [row.ttft_s for row in rows if row.ttft_s == row.ttft_s],
        "queue": [row.queued_for_s for row in rows],
    }
    told = {column: _numbers(values) for column, values in columns.items()}
    return {"name": name, "count": len(rows), **told}


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Mean, then QUANTILES."""
    if not values:
        return [None] * (1 + len(QUANTILES))
    told = [float(np.mean(values)), *np.quantile(values, QUANTILES).tolist()]
    return [round(value, 4) for value in told]


def _concordance(predicted: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float | None:
    """Of all pairs of different lengths, the share that predictions put in the right order (a tie is half)."""
    above = np.sign(predicted[:, None] - predicted[None, :]) * np.sign(actual[:, None] - actual[None, :])
    differ = actual[:, None] != actual[None, :]
    if not differ.any():
        return None
    return float((above[differ] + 1).mean() / 2)


Floats = npt.NDArray[np.float64]
POLICY_QUANTILES = (0.5, 0.9, 0.99)
POLICY_INTERVAL_S = 5.0
DRAWS, BLOCKS = 30, 12
MAX_POLICY_REQUESTS = 1000
"""So many requests at most, the last ones: live requests wait while this is computed, a few ms."""
MIN_INTERVAL_REQUESTS = 4 * BLOCKS
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

    def __init__(self, clock: Clock, window_s: float, *, every_s: float = POLICY_INTERVAL_S, seed: int = 0) -> None:
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
            recent = [pair for pair in pairs if pair.finished_s >= now_s - self._window_s][-MAX_POLICY_REQUESTS:]
            self._live = lived(mode, recent, seed=self._seed)
        return self._live + simulated(found)


def lived(mode: str, pairs: Sequence[Pair], *, seed: int = 0) -> list[dict[str, Any]]:
    """What requests had, and what the shadow of FCFS gave the same ones; nothing of none."""
    if not pairs:
        return []
    of = np.array([pair[1:] for pair in pairs]).T.copy()
    n = len(pairs)
    values = _statistics(of)
    scattered = _statistics(of[:, _draws(n, seed)]) if n >= MIN_INTERVAL_REQUESTS else np.full((4, 2, 4), math.nan)
    scattered[..., [False, *(n * (1 - q) < LEAST_BEYOND for q in POLICY_QUANTILES)]] = math.nan
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
    ranks = [min(n - 1, int(q * n)) for q in POLICY_QUANTILES]
    quantiles = np.partition(of, ranks, axis=-1)[..., ranks]
    return np.concatenate([of.mean(axis=-1, keepdims=True), quantiles], axis=-1)


def _change(values: Floats, scattered: Floats, which: int) -> list[float]:
    """A statistic of the JCT that was over that of the shadow, less 1, with its ends."""
    ratio = math.log(values[0, which] / values[2, which])
    half = T_975 * float(np.log(scattered[0, :, which] / scattered[2, :, which]).std(ddof=1))
    return [math.expm1(ratio), math.expm1(ratio - half), math.expm1(ratio + half)]


SHOWN = 48
MOST_RANKED = 400
"""So many of those who wait are asked for their places; of longer queues those who came first."""


class SchedulerDriver(Protocol):
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
        monitor: Who looks back at the traffic; None: nobody.
        clock: The gateway's.
    """

    def __init__(
        self,
        config: GatewayConfig,
        driver: SchedulerDriver,
        fleet: Fleet,
        forecaster: Forecaster | None,
        telemetry: Telemetry,
        recent: Recent,
        monitor: Monitor | None,
        clock: Clock,
    ) -> None:
        self.config = config
        self._hub, self._fleet, self._forecaster = driver, fleet, forecaster
        self._telemetry, self._recent, self._monitor, self._clock = telemetry, recent, monitor, clock
        self._policies = Policies(clock, WINDOW_S)
        self._began_s = clock()

    def now(self) -> dict[str, Any]:
        """The value; numbers that are not known are None."""
        now_s, statistics = self._clock(), self._hub.statistics()
        rows = self._recent.rows()
        found = self._monitor.found if self._monitor else None
        told = {
            "mode": self.config.order.mode,
            "max_wait_s": self.config.order.max_wait_s,
            "up_s": now_s - self._began_s,
            "window_s": WINDOW_S,
            "queue": self._queue(statistics, now_s),
            "workers": self._workers(statistics, now_s),
            "lengths": lengths(rows),
            "times": times(rows),
            "policies": self._policies.rows(self.config.order.mode, self._telemetry.regret.pairs(), found),
            "regret": self._regret(now_s),
            "samples": {"every_s": SAMPLE_S, "rows": [(s[0] - now_s, *s[1:]) for s in self._recent.samples]},
            "counts": self._counts(),
            "troubles": [one | {"ago_s": now_s - one["at_s"]} for one in reversed(self._recent.troubles)],
            "length_prediction": self._forecaster.state() if self._forecaster else {},
            "observed": found,
            "schedule": self._schedule(now_s),
        }
        plain: dict[str, Any] = _plain(told)
        return plain

    def _queue(self, statistics: Statistics, now_s: float) -> dict[str, Any]:
        told = {name: getattr(statistics, name) for name in _REPORTED}
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
        known = sorted(((place, trip) for place, trip in placed if place is not None), key=lambda pair: pair[0])
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
            return told | {"kind": "", "breaker": "", "cause": "stopped"}
        why = worker.unavailable_reason(now_s) if hasattr(worker, "unavailable_reason") else ""
        if not why and self.config.order.mode == "engine-priority" and hasattr(worker, "priority_notice"):
            why = worker.priority_notice()
        breaker = worker.breaker.state(now_s) if hasattr(worker, "breaker") else ""
        return told | {"kind": worker.kind, "breaker": breaker, "cause": str(why)[:200]}

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
        follow = self._telemetry.metrics.tracker
        if follow is None:
            return {"phases": asdict(phases), "follows": None}
        now = follow()
        told = asdict(now) | {"alarm": 1 / now.false_positive_rate, "last_ago_s": now_s - now.last_s}
        return {"phases": asdict(phases), "follows": told}

    def _counts(self) -> dict[str, Any]:
        outcomes: dict[str, int] = {}
        for (outcome, _, _), count in self._telemetry.metrics.requests.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
        counts = self._telemetry.metrics.counts
        cuts = counts["cut"] + counts["window"]
        return {"outcomes": outcomes, "cuts": cuts, "failovers": counts["failed_over"]}


_REPORTED = (
    "waiting", "waiting_bytes", "running", "oldest_wait_s", "backlog_tokens", "backlog_s", "predicted_wait_s",
    "ordering",
)  # fmt: skip


def _waiting(trip: Trip, now_s: float) -> dict[str, Any]:
    request = trip.request
    return {
        "left": request.length_prediction.remaining_tokens(request.generated_tokens),
        "got": request.generated_tokens,
        "queued_for_s": now_s - request.arrival_s if math.isnan(trip.dispatched_s) else request.queued_for_s,
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
