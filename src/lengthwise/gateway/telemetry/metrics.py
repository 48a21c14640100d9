"""Count requests, and export metrics for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lengthwise.gateway.audit import AuditLog
from lengthwise.gateway.config import Phases
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.replanning import ReplanningState
from lengthwise.gateway.request import Outcome, Request
from lengthwise.gateway.scheduling import Phase, SharedState, Statistics
from lengthwise.gateway.telemetry.journal import Row
from lengthwise.schema.errors import MissingExtraError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Histogram:
    """Counts values in buckets, and sums them. ``edges`` are the buckets' upper edges; a last bucket has none."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value, ``times`` times."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return Prometheus's cumulative buckets: (upper edge, number of values up to it)."""
        edges = (*(repr(float(edge)) for edge in self.edges), "+Inf")
        return list(zip(edges, map(float, accumulate(self.counts)), strict=True))


INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
LENGTHS = tuple(2**k for k in range(18))
LOG_RATIOS = (-3, -2, -1.5, -1, -0.7, -0.4, -0.2, -0.1, 0, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2, 3)
LAGS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


OTHER = "other"


class Labels:
    """Labels for an unbounded set of names: the first ``limit`` names, cut to 128 characters; for others "other"."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the label of a name. A new name is added while there are fewer than the limit."""
        if name not in self._known and len(self._known) < self._limit:
            self._known[name] = name[:128]
        return self.known(name)

    def known(self, name: str) -> str:
        """Return the label of a name if it was added, otherwise "other"."""
        return self._known.get(name, OTHER)


MAX_WORKERS = 200
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_PHASE_HISTOGRAMS = (
    ("prefill_batch", SIZES, "phase_prefill_batch_requests", "New requests of a phase's prefill (B_E)"),
    ("decode_batch", SIZES, "phase_decode_batch_requests", "Requests at the engine after a phase's prefill (B_D)"),
    ("remaining_batch", SIZES, "phase_remaining_batch_requests", "Requests at the engine at the end of a phase"),
    ("decode_steps", SIZES, "phase_decode_steps", "Decode iterations of a phase, estimated from tokens (N_D)"),
    ("seconds", WAITS_S, "phase_seconds", "From one phase to the next, or until the engine is idle"),
)


class PhaseCounts(Listener):
    """Counts phases by worker. ``plan`` is the schedule in use in mode rra, or None in all other modes."""

    def __init__(self, plan: Phases | None) -> None:
        self.plan = plan
        self._workers = Labels(MAX_WORKERS)
        self._finished: Counter[tuple[str, str]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._overdue: Counter[str] = Counter()
        self._histograms: dict[str, dict[str, Histogram]] = {}

    def phase(self, phase: Phase) -> None:  # noqa: D102 - as Listener
        worker = self._workers.of(phase.worker)
        self._finished[worker, phase.cause] += 1
        self._overdue[worker] += phase.overdue
        self._prompt_tokens[worker] += phase.prompt_tokens
        if worker not in self._histograms:
            self._histograms[worker] = {name: Histogram(edges) for name, edges, _, _ in _PHASE_HISTOGRAMS}
        values = asdict(phase) | {"seconds": phase.finished_s - phase.started_s}
        for name, histogram in self._histograms[worker].items():
            histogram.add(values[name])

    def families(self) -> Iterator[Any]:
        """Yield Prometheus's metric families of phases, or nothing if no schedule is in use."""
        if self.plan is None:
            return
        plan = {(name,): value for name, value in asdict(self.plan).items() if value is not None}
        yield _gauge("phase_plan", "Schedule in use", plan, "parameter")
        yield _counter("phases", "Finished phases by the event that ended them", self._finished, "worker", "cause")
        tokens, overdue = _keyed(self._prompt_tokens), _keyed(self._overdue)
        yield _counter("phase_prompt_tokens", "Prompt tokens of all prefills", tokens, "worker")
        yield _counter("phase_overdue", "Requests dispatched within a phase after max_wait_s", overdue, "worker")
        for key, _, name, description in _PHASE_HISTOGRAMS:
            by_worker = {(worker,): histograms[key] for worker, histograms in self._histograms.items()}
            yield _histogram(name, description, by_worker, "worker")


MAX_TENANTS = 50
MAX_MODELS = 50


class ModelCounts:
    """Histograms of times and lengths, and token counts, of all requests to one model."""

    def __init__(self) -> None:
        self.ttft_s, self.queue_s, self.jct_s = Histogram(WAITS_S), Histogram(WAITS_S), Histogram(WAITS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_S)
        self.predicted, self.actual = Histogram(LENGTHS), Histogram(LENGTHS)
        self.log_ratio = Histogram(LOG_RATIOS)
        self.prompt_tokens = self.output_tokens = 0


class Metrics(Listener):
    """Counts requests, and collects all metrics of the gateway for a Prometheus registry.

    ``statistics`` returns the scheduler's numbers at each collection. Without it there are no metrics of queue and
    workers. ``phases`` is the schedule in use in mode rra, or None in all other modes.
    """

    def __init__(
        self, statistics: Callable[[], Statistics] | None = None, *, mode: str = "", phases: Phases | None = None
    ) -> None:
        self.statistics, self.mode = statistics, mode
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.predictions: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.by_model: dict[str, ModelCounts] = {}
        self.phases = PhaseCounts(phases)
        self.lag_s = Histogram(LAGS_S)
        self.journal: Callable[[], tuple[int, int]] | None = None
        self.audit: AuditLog | None = None
        self.tracker: Callable[[], ReplanningState] | None = None
        self.gain: Callable[[], Mapping[str, Any] | None] | None = None  # of ordering, as from ``observe.as_json``
        self._models, self._tenants = Labels(MAX_MODELS), Labels(MAX_TENANTS)

    def inter_token_s(self, model: str) -> Histogram:
        """Return the histogram of the times between tokens of a model's requests."""
        return self._of(model).inter_token_s

    def on_admission(self, request: Request) -> None:  # noqa: D102 - as Listener
        self.predictions[request.length_prediction.source] += 1

    def count_refusal(self, reason: str, tenant: str, model: str) -> None:
        """Count a refused request. ``tenant`` is the name of the tenant."""
        self.refusals[reason] += 1
        self.requests[Outcome.REFUSED.value, self._models.known(model), self._tenants.of(tenant)] += 1

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        del worker, now_s
        self._models.of(request.model)  # only here, where an engine serves the model: clients may send any name
        if cached_tokens := request.dispatch.cached_tokens:
            self.counts["prefix_hits"] += 1
            self.counts["prefix_tokens"] += cached_tokens

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        self._of(request.model).ttft_s.add(now_s - request.arrival_s)

    def requeued(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        del now_s
        self.counts[cause] += 1
        self.counts["resumed_tokens"] += request.generated_tokens

    def add_row(self, row: Row) -> None:
        """Count a request that has ended, with any outcome."""
        self.requests[row.outcome, self._models.known(row.model), self._tenants.of(row.tenant)] += 1
        counts = self._of(row.model)
        if row.worker:
            counts.queue_s.add(row.queued_for_s)
        counts.prompt_tokens += row.prompt_tokens
        counts.output_tokens += row.output_tokens
        if row.outcome != Outcome.FINISHED:
            return
        counts.jct_s.add(row.jct_s)
        if row.output_tokens >= 1:
            counts.predicted.add(row.predicted_tokens)
            counts.actual.add(row.output_tokens)
            counts.log_ratio.add(math.log(max(row.predicted_tokens, 1.0) / row.output_tokens))

    def _of(self, model: str) -> ModelCounts:
        label = self._models.known(model)
        if (counts := self.by_model.get(label)) is None:
            counts = self.by_model[label] = ModelCounts()
        return counts

    def collect(self) -> Iterator[Any]:
        """Yield all metric families. Prometheus's registry calls this at each scrape."""
        from importlib.metadata import version

        c, (written, lost), audit = self.counts, self.journal() if self.journal else (0, 0), self.audit
        labels = ("outcome", "model", "tenant")
        yield _counter("requests", "Requests by outcome", self.requests, *labels)
        yield _counter("refusals", "Refused requests", _keyed(self.refusals), "reason")
        yield _counter("predictions", "First length predictions by source", _keyed(self.predictions), "source")
        prefix_hits = "Requests dispatched to an engine that probably caches a prefix of their prompt"
        for name, description, value in (
            ("preemptions", "Preempted requests", c["preemption"] + c["window"]),
            ("resumed_tokens", "Tokens retained when requests returned to the queue", c["resumed_tokens"]),
            ("failovers", "Requests moved away from an engine that failed", c["failed_over"]),
            ("prefix_hits", prefix_hits, c["prefix_hits"]),
            ("prefix_hit_tokens", "Prompt tokens that the chosen engine probably caches", c["prefix_tokens"]),
            ("retries", "Requests queued again: rejected, queue full, or failed before output", c["retried"]),
            ("certificate_renewals", "Certificates read again after their files changed", c["certificates"]),
            ("certificate_failures", "Changed certificates that could not be used", c["certificates_failed"]),
            ("audit_lines", "Lines written to the audit log", audit.written if audit else 0),
            ("audit_failures", "Attempts to write the audit log that failed", audit.failures if audit else 0),
            ("journal_rows", "Rows written to the journal", written),
            ("journal_rows_lost", "Rows that could not be written", lost),
        ):
            if self.journal is not None or not name.startswith("journal"):
                yield _counter(name, description, {(): value})
        for name in ("prompt_tokens", "output_tokens"):
            values = {(model,): getattr(counts, name) for model, counts in self.by_model.items()}
            yield _counter(name, f"{name.replace('_', ' ').capitalize()} of requests that have ended", values, "model")
        for attribute, name, description in _MODEL_HISTOGRAMS:
            histograms = {(model,): getattr(counts, attribute) for model, counts in self.by_model.items()}
            yield _histogram(name, description, histograms, *(("model",) if any(self.by_model) else ()))
        if self.gain is not None and (found := self.gain()):
            ends = {(one["name"], end): value for one in found["orders"] for end, value in one["mean"].items()}
            description = "Simulated relative change of the mean JCT by an order against FCFS; negative: a gain"
            known = {key: value for key, value in ends.items() if value is not None}
            yield _gauge("jct_change_ratio", description, known, "order", "bound")
        yield _histogram("event_loop_lag_seconds", "Delay of the event loop", {(): self.lag_s})
        with contextlib.suppress(RuntimeError):  # without an event loop, as in a script that reads the metrics
            yield _gauge("tasks", "Tasks of the event loop", {(): len(asyncio.all_tasks())})
        yield _gauge("build_info", "Version and mode", {(version("lengthwise"), self.mode): 1}, "version", "mode")
        yield from self.phases.families()
        if self.tracker is not None:
            yield from _replanning_families(self.tracker())
        if self.statistics is not None:
            yield from _scheduler_families(self.statistics())

    def registry(self) -> CollectorRegistry:
        """Return a registry of these metrics and of the process's metrics. Raises MissingExtraError."""
        try:
            from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
        except ImportError as error:
            raise MissingExtraError("lengthwise serve", "gateway") from error
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        return registry


_MODEL_HISTOGRAMS = (
    ("ttft_s", "time_to_first_token_seconds", "Arrival to first token, of responses in several chunks"),
    ("inter_token_s", "inter_token_latency_seconds", "Time between two tokens of a request at the gateway"),
    ("queue_s", "queue_seconds", "Total time in the gateway's queue until the last dispatch"),
    ("jct_s", "request_seconds", "Arrival to finish (JCT) of finished requests"),
    ("predicted", "predicted_tokens", "Output tokens predicted before the first one, of finished requests"),
    ("actual", "actual_tokens", "Output tokens of finished requests"),
    ("log_ratio", "prediction_log_ratio", "ln(predicted / actual output tokens) of finished requests"),
)
_GAUGES = (
    ("waiting", "queue_requests", "Waiting requests"),
    ("waiting_bytes", "queue_bytes", "Bytes of the bodies of waiting requests"),
    ("running", "running_requests", "Requests at engines"),
    ("oldest_wait_s", "oldest_wait_seconds", "Longest wait of a waiting request"),
    ("backlog_tokens", "backlog_tokens", "Predicted remaining output tokens of waiting and running requests"),
    ("backlog_s", "backlog_seconds", "Seconds in which all engines together would generate the backlog: scale by it"),
    ("predicted_wait_s", "predicted_wait_seconds", "Predicted wait of a request that arrives now"),
    ("ordering", "ordering_active", "1 while requests wait, so that their order matters"),
)
_WORKER_GAUGES = (
    ("in_flight", "worker_in_flight", "Requests at the engine"),
    ("limit", "worker_limit", "Maximum requests at the engine; absent where unlimited"),
    ("up", "worker_up", "1 while the engine may get requests"),
    ("backlog_tokens", "worker_backlog_tokens", "Predicted remaining output tokens at the engine"),
    ("backlog_s", "worker_backlog_seconds", "Seconds of prefill and decode left at the engine"),
)
_SIGNAL_GAUGES = (
    ("running", "engine_running_requests", "Running requests, reported by the engine"),
    ("waiting", "engine_waiting_requests", "Requests in the engine's own queue, reported by the engine"),
    ("kv_used", "engine_kv_used_ratio", "Share of the KV cache in use, reported by the engine"),
    ("preemptions", "engine_preemptions", "Preemptions since the engine started, reported by the engine"),
)


def _scheduler_families(statistics: Statistics) -> Iterator[Any]:
    for attribute, name, description in _GAUGES:
        yield _gauge(name, description, {(): getattr(statistics, attribute)})
    if statistics.shared_queue is not None:
        yield from _shared_queue_families(statistics.shared_queue)
    sources = [(entry, {w.name: w for w in statistics.workers}) for entry in _WORKER_GAUGES]
    sources += [(entry, {w.name: w.signals for w in statistics.workers}) for entry in _SIGNAL_GAUGES]  # type: ignore[misc]
    for (attribute, name, description), workers in sources:
        values = {(worker,): getattr(source, attribute) for worker, source in workers.items()}
        yield _gauge(name, description, {key: v for key, v in values.items() if v is not None}, "worker")


def _shared_queue_families(state: SharedState) -> Iterator[Any]:
    yield _gauge("shared_queue", "1 while a leader orders the requests of all gateways", {(): state.shared})
    yield _gauge("shared_queue_leader", "1 while this gateway is the leader", {(): state.leads})
    yield _gauge("shared_queue_gateways", "Gateways of the shared queue that are alive", {(): state.gateways})


def _replanning_families(state: ReplanningState) -> Iterator[Any]:
    yield _gauge("lengths_watched", "1 while output lengths are monitored for drift", {(): state.up})
    yield _gauge("lengths_evidence", "Evidence of drift since the last alarm; 1: none", {(): state.evidence})
    yield _gauge("lengths_alarm", "Evidence that raises an alarm", {(): 1 / state.false_positive_rate})
    yield _counter("lengths_observed", "Requests whose lengths were monitored", {(): state.observed})
    plans = {(result,): getattr(state, result) for result in ("changed", "unchanged", "failed")}
    yield _counter("plans", "Schedules replanned after drift, by result", plans, "result")


def _keyed(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


def _family(kind: str, name: str, description: str, values: Mapping[Any, Any], *labels: str) -> Any:
    from prometheus_client import core

    family = getattr(core, f"{kind}MetricFamily")(f"lengthwise_{name}", description, labels=labels)
    for key, value in values.items():
        family.add_metric(key, *((value.buckets(), value.sum) if kind == "Histogram" else (float(value),)))
    return family


_counter, _gauge, _histogram = (partial(_family, kind) for kind in ("Counter", "Gauge", "Histogram"))
