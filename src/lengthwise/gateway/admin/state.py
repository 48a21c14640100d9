"""Compute the state that the admin page shows, as plain values."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.fleet import Fleet
from lengthwise.gateway.length_prediction import LengthPredictor
from lengthwise.gateway.observe import MAX_ERROR, Monitor
from lengthwise.gateway.protocols import Clock
from lengthwise.gateway.request import Outcome, Refusal
from lengthwise.gateway.scheduler_driver import SchedulerDriver
from lengthwise.gateway.scheduling import Statistics, WorkerState, WorkerStatistics
from lengthwise.gateway.telemetry import Row, Telemetry
from lengthwise.statistics import Floats, bootstrap_half_width, circular_blocks

WINDOW_S = 600.0
MAX_ROWS = 2000
MAX_ERRORS = 30
MAX_SAMPLES = 300
SAMPLE_INTERVAL_S = 2.0


class Recent:
    """Recent history for the page: requests that have ended, refusals and failures, and samples of the queue."""

    def __init__(self, telemetry: Telemetry, clock: Clock, statistics: Callable[[], Statistics]) -> None:
        self._telemetry, self._clock, self._statistics = telemetry, clock, statistics
        self._rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self.errors: deque[dict[str, Any]] = deque(maxlen=MAX_ERRORS)
        self.samples: deque[tuple[float, ...]] = deque(maxlen=MAX_SAMPLES)
        self._last_tokens = (clock(), 0)
        telemetry.timelines.subscribe(self.add_row)
        telemetry.refusal_subscribers.append(self.refused)

    def add_row(self, row: Row) -> None:
        """Add a request that has ended."""
        self._rows.append(row)
        if row.outcome not in (Outcome.FINISHED, Outcome.CLIENT_GONE):
            self._add_error(row.finished_s, row.outcome, row.model, row.tenant, row.worker)

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:
        """Add a refused request."""
        del tenant
        self._add_error(self._clock(), f"refused: {reason} ({refusal.status})", model[:80], "", "")

    def rows(self) -> list[Row]:
        """Return the requests that have ended within the last WINDOW_S seconds."""
        since_s = self._clock() - WINDOW_S
        return [row for row in self._rows if row.finished_s >= since_s]

    def sample(self) -> None:
        """Add the current length of the queue and the current output rate to ``samples``."""
        now, now_s = self._statistics(), self._clock()
        tokens = sum(counts.inter_token_s.total for counts in self._telemetry.metrics.by_model.values())
        last_s, last_tokens = self._last_tokens
        rate = (tokens - last_tokens) / (now_s - last_s) if now_s > last_s else 0.0
        self._last_tokens = now_s, tokens
        self.samples.append((now_s, now.waiting, now.running, round(rate, 1), round(now.predicted_wait_s, 3)))

    def _add_error(self, at_s: float, what: str, model: str, tenant: str, worker: str) -> None:
        last = self.errors[-1] if self.errors else None
        error = {"at_s": at_s, "what": what, "model": model, "tenant": tenant, "worker": worker, "count": 1}
        if last and (last["what"], last["model"], last["worker"]) == (what, model, worker):
            last |= {"count": last["count"] + 1, "at_s": at_s}
        else:
            self.errors.append(error)


QUANTILES = (0.5, 0.9, 0.99)
MAX_POINTS, MAX_TENANTS = 400, 8
CALIBRATION_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MIN_SAMPLES = 8  # quartiles of fewer values are not shown


def times(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return JCT, TTFT and queueing times of finished requests.

    The groups are all requests, classes, the tenants with most requests, and quartiles of predicted lengths.
    """
    finished = [row for row in rows if row.outcome == Outcome.FINISHED]
    groups = [("all", finished)]
    classes = sorted({row.priority for row in finished})
    if len(classes) > 1:
        groups += [(f"class {p}", [row for row in finished if row.priority == p]) for p in classes]
    tenants = Counter(row.tenant for row in finished).most_common(MAX_TENANTS)
    if len(tenants) > 1:
        groups += [(f"tenant {name}", [row for row in finished if row.tenant == name]) for name, _ in tenants]
    predicted = np.array([row.predicted_tokens for row in finished])
    if len(predicted) >= MIN_SAMPLES and np.ptp(predicted) > 0:
        edges = np.unique(np.quantile(predicted, (0.25, 0.5, 0.75)))
        quartiles = np.searchsorted(edges, predicted, side="left").tolist()
        for number in range(len(edges) + 1):
            group = [row for row, quartile in zip(finished, quartiles, strict=True) if quartile == number]
            if group:
                low, high = (round(f(row.predicted_tokens for row in group)) for f in (min, max))
                groups.append((f"predicted {low if low == high else f'{low} to {high}'} tokens", group))
    return [
        {
            "name": name,
            "count": len(group),
            "jct": _summary([row.jct_s for row in group]),
            "ttft": _summary([row.ttft_s for row in group if not math.isnan(row.ttft_s)]),
            "queue": _summary([row.queued_for_s for row in group]),
        }
        for name, group in groups
        if group
    ]


def _summary(values: Sequence[float]) -> list[float | None]:
    if not values:
        return [None] * (1 + len(QUANTILES))
    return [round(value, 4) for value in (float(np.mean(values)), *np.quantile(values, QUANTILES).tolist())]


def lengths(rows: Sequence[Row]) -> dict[str, Any]:
    """Return points (predicted length, actual length) of finished requests, and scores of their predictions."""
    finished = [row for row in rows if row.outcome == Outcome.FINISHED and row.output_tokens >= 1]
    values: dict[str, Any] = {"count": len(finished), "points": [], "calibration": []}
    if not finished:
        return values
    predicted = np.array([max(row.predicted_tokens, 1.0) for row in finished])
    actual = np.array([row.output_tokens for row in finished], float)
    values["points"] = [[round(row.predicted_tokens, 1), row.output_tokens] for row in finished[-MAX_POINTS:]]
    values["bias"] = float(np.median(predicted / actual))
    values["within_2x"] = float(np.mean(np.abs(np.log2(predicted / actual)) <= 1))
    p, a = predicted[-MAX_POINTS:], actual[-MAX_POINTS:]
    differs = a[:, None] != a[None, :]
    agreement = (np.sign(p[:, None] - p[None, :]) * np.sign(a[:, None] - a[None, :]))[differs]
    # Share of pairs of different lengths that predictions order correctly; a tie counts half.
    values["concordance"] = float((agreement + 1).mean() / 2) if differs.any() else None
    levels = np.array([row.predicted_level for row in finished])
    levels = levels[np.isfinite(levels)]
    if len(levels) >= MIN_SAMPLES:
        values["calibration"] = [[level, round(float(np.mean(levels <= level)), 4)] for level in CALIBRATION_LEVELS]
    return values


POLICY_INTERVAL_S = 5.0
_DRAWS, _BLOCKS = 30, 12
MAX_POLICY_REQUESTS = 1000  # requests in the table, whose computation blocks the event loop for milliseconds
MIN_INTERVAL_REQUESTS = 4 * _BLOCKS  # requests from which on statistics have intervals
_MIN_BEYOND = 5  # requests beyond a quantile from which on it has an interval


class Policies:
    """The page's table of policies. It computes the row of served requests at most every ``interval_s`` seconds."""

    def __init__(self, clock: Clock, *, interval_s: float = POLICY_INTERVAL_S) -> None:
        self._clock, self._interval_s = clock, interval_s
        self._computed_s = -math.inf
        self._measured: list[dict[str, Any]] = []

    def rows(self, mode: str, recent: Sequence[Row], estimate: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Return a row for the mode in use, from ``recent`` requests, and one for each simulated policy.

        ``estimate`` is the last estimate of the gain, from the simulations, or None. Statistics are
        [value, low, high]; changes are relative to FCFS.
        """
        now_s = self._clock()
        if now_s - self._computed_s >= self._interval_s:
            self._computed_s = now_s
            finished = [row for row in recent if row.outcome == Outcome.FINISHED][-MAX_POLICY_REQUESTS:]
            self._measured = measured(mode, finished)
        return self._measured + simulated(estimate)


def measured(mode: str, rows: Sequence[Row], *, seed: int = 0) -> list[dict[str, Any]]:
    """Return one row of statistics of requests served in ``mode``, with bootstrap intervals, or [] without requests."""
    if not rows:
        return []
    n = len(rows)
    columns = np.array([(row.jct_s, row.queued_for_s) for row in sorted(rows, key=lambda row: row.arrival_s)]).T.copy()
    values = _statistics(columns)
    samples = np.full((2, 2, 4), math.nan)
    if n >= MIN_INTERVAL_REQUESTS:  # a block bootstrap whose blocks wrap around
        starts = np.random.default_rng(seed).integers(0, n, (_DRAWS, _BLOCKS))
        samples = _statistics(columns[:, circular_blocks(starts, -(-n // _BLOCKS), n)])
    samples[..., [False, *(n * (1 - q) < _MIN_BEYOND for q in QUANTILES)]] = math.nan
    half = bootstrap_half_width(samples, _BLOCKS, 0.95, axis=1)
    intervals = np.stack([values, np.maximum(values - half, 0.0), values + half], axis=-1)
    return [_row("served", mode, n, intervals[0], intervals[1])]


def _statistics(columns: Floats) -> Floats:
    """Return mean and QUANTILES over the last axis, as an array [..., 1 + len(QUANTILES)], without interpolation."""
    n = columns.shape[-1]
    ranks = [min(n - 1, int(q * n)) for q in QUANTILES]
    quantiles = np.partition(columns, ranks, axis=-1)[..., ranks]
    return np.concatenate([columns.mean(axis=-1, keepdims=True), quantiles], axis=-1)


def simulated(estimate: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return a row for each policy that was simulated to estimate the gain, or [] if there is no estimate."""
    if not estimate:
        return []
    changes = {order["name"]: (order["mean"], order["p99"]) for order in estimate["orders"]}
    rows = []
    for order in estimate["times"]:
        jct, queue = ([[value, None, None] for value in order[name]] for name in ("jct_s", "queue_s"))
        row = _row("simulated", order["name"], estimate["requests"], jct, queue)
        if order["name"] in changes:
            mean, p99 = ([change["value"], change["low"], change["high"]] for change in changes[order["name"]])
            row |= {"mean_change": mean, "p99_change": p99}
        rows.append(row)
    return rows


def change_against_fcfs(mode: str, estimate: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the simulated change of the mean JCT from FCFS to ``mode``, or to srtf if ``mode`` was not simulated."""
    orders = {order["name"]: order for order in estimate["orders"]} if estimate else {}
    if estimate is None or not orders:
        return None
    in_use = mode in orders
    order, observed_s = orders[mode if in_use else "srtf"], estimate["observed_jct_s"]
    return {
        **order["mean"],
        "order": order["name"],
        "in_use": in_use,
        "requests": estimate["requests"],
        "jct_s": order["mean_jct_s"],
        "fcfs_s": order["fcfs_s"][0] if order["fcfs_s"] else estimate["fcfs_jct_s"],
        "is_known": not in_use or abs(order["mean_jct_s"] / observed_s - 1) <= MAX_ERROR,
    }


def _row(kind: str, name: str, count: int, jct: Any, queue: Any) -> dict[str, Any]:
    unknown = {"mean_change": None, "p99_change": None}
    return {"kind": kind, "name": name, "count": count, "jct": jct, "queue": queue, **unknown}


MAX_SHOWN = 48  # waiting requests on the page
MAX_RANKED = 400  # oldest waiting requests, of which the page shows the first in order


@dataclass
class State:
    """Collects the data that the page shows. Without a ``monitor`` there is no estimate of the gain."""

    config: GatewayConfig
    driver: SchedulerDriver
    fleet: Fleet
    length_predictor: LengthPredictor | None
    telemetry: Telemetry
    monitor: Monitor | None
    clock: Clock

    def __post_init__(self) -> None:
        self.recent = Recent(self.telemetry, self.clock, self.driver.statistics)
        self._policies, self._started_s = Policies(self.clock), self.clock()

    def now(self) -> dict[str, Any]:
        """Return the current data of the page as plain JSON values. Unknown numbers are None."""
        now_s, statistics, rows = self.clock(), self.driver.statistics(), self.recent.rows()
        mode, metrics = self.config.order.mode, self.telemetry.metrics
        num_preempted = metrics.counts["preemption"] + metrics.counts["window"]
        estimate = self.monitor.estimate if self.monitor else None
        numbers = {worker.name: worker for worker in statistics.workers}
        outcomes: Counter[str] = Counter()
        for (outcome, _, _), count in metrics.requests.items():
            outcomes[outcome] += count
        state = {
            "mode": mode,
            "max_wait_s": self.config.order.max_wait_s,
            "up_s": now_s - self._started_s,
            "window_s": WINDOW_S,
            "queue": {name: getattr(statistics, name) for name in _QUEUE_FIELDS} | {"order": self._queue(now_s)},
            "router": statistics.router,
            "shared_queue": None if statistics.shared_queue is None else asdict(statistics.shared_queue),
            "workers": [self._worker(w, numbers.get(w.name), now_s) for w in self.fleet.states()],
            "lengths": lengths(rows),
            "times": times(rows),
            "policies": self._policies.rows(mode, rows, estimate),
            "change": change_against_fcfs(mode, estimate),
            "samples": {"every_s": SAMPLE_INTERVAL_S, "rows": [(s[0] - now_s, *s[1:]) for s in self.recent.samples]},
            "counts": {"outcomes": outcomes, "preemptions": num_preempted, "failovers": metrics.counts["failed_over"]},
            "troubles": [error | {"ago_s": now_s - error["at_s"]} for error in reversed(self.recent.errors)],
            "length_prediction": self.length_predictor.state() if self.length_predictor else {},
            "observed": estimate if mode in ("observe", "fcfs") else None,
            "schedule": self._schedule(now_s),
        }
        plain: dict[str, Any] = _plain(state)
        return plain

    def _queue(self, now_s: float) -> list[dict[str, Any]]:
        waiting = list(islice((t for t in self.telemetry.timelines if math.isnan(t.at_worker_since_s)), MAX_RANKED))
        positions = [(self.driver.position(timeline.request.id), timeline) for timeline in waiting]
        known = sorted(((at, timeline) for at, timeline in positions if at is not None), key=lambda pair: pair[0])
        rows = []
        for _, timeline in known[:MAX_SHOWN]:
            q, is_new = timeline.request, math.isnan(timeline.dispatched_s)
            left = q.length_prediction.remaining_tokens(q.generated_tokens)
            queued_for_s = now_s - q.arrival_s if is_new else q.dispatch.queued_for_s
            row = {"left": left, "got": q.generated_tokens, "queued_for_s": queued_for_s}
            rows.append(row | {"priority": q.client.priority, "model": q.model})
        return rows

    def _worker(self, state: WorkerState, numbers: WorkerStatistics | None, now_s: float) -> dict[str, Any]:
        row = {name: getattr(state, name) for name in ("name", "models", "up", "slots", "tokens_per_s")}
        row |= {name: getattr(state.signals, name) for name in ("running", "waiting", "kv_used")}
        row |= {"in_flight": 0, "limit": None, "backlog_tokens": 0.0, "dispatched": None}
        if numbers:
            row["dispatched"] = asdict(numbers.dispatched)
            row |= {name: getattr(numbers, name) for name in ("in_flight", "limit", "backlog_tokens")}
        try:
            worker = self.fleet.worker(state.name)
        except KeyError:
            return row | {"kind": "", "breaker": "", "cause": "stopped"}
        cause = worker.unavailable_reason(now_s)
        if not cause and self.config.order.mode == "engine-priority":
            cause = worker.priority_notice()
        return row | {"kind": worker.kind, "breaker": worker.breaker.state(now_s), "cause": cause[:200]}

    def _schedule(self, now_s: float) -> dict[str, Any] | None:
        phases = self.config.dispatch.phases
        if self.config.order.mode != "rra" or phases is None:
            return None
        follows = None
        if (tracker := self.telemetry.metrics.tracker) is not None:
            now = tracker()
            follows = asdict(now) | {"alarm": 1 / now.false_positive_rate, "last_ago_s": now_s - now.last_s}
        return {"phases": asdict(phases), "follows": follows}


_QUEUE_FIELDS = (
    "waiting", "waiting_bytes", "running", "oldest_wait_s", "backlog_tokens", "backlog_s", "predicted_wait_s",
    "ordering",
)  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, dict):
        return {str(name): _plain(v) for name, v in value.items()}
    if isinstance(value, Iterable):
        return [_plain(v) for v in value]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
