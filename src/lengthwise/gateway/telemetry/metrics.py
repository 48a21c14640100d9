"""What is counted of requests, and what Prometheus is told of it."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from lengthwise.gateway.config import Phases
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.replanning import ReplanningState
from lengthwise.gateway.request import Outcome, Rejection, Request
from lengthwise.gateway.scheduling import Phase, Statistics, WorkerNumbers
from lengthwise.gateway.telemetry.journal import Row
from lengthwise.schema.errors import MissingExtraError


class Histogram:
    """How many values were at most each edge, and their sum.

    Args:
        edges: Upper edges, ascending; above the last one everything else.
    """

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value so many times."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        """Values that were counted."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper edge, values up to it) as Prometheus tells them."""
        told, below = [], 0
        for edge, count in zip((*self.edges, float("inf")), self.counts, strict=True):
            below += count
            told.append((_edge(edge), float(below)))
        return told


def _edge(edge: float) -> str:
    return "+Inf" if edge == float("inf") else repr(float(edge))


GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
"""Between two tokens."""
WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
"""Until something."""
LENGTHS = tuple(2**k for k in range(18))
"""Tokens."""
LOG_RATIOS = (-3, -2, -1.5, -1, -0.7, -0.4, -0.2, -0.1, 0, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2, 3)
"""ln(predicted / actual)."""
LAGS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
"""Of the event loop."""


RECENT = 2000
MOST_KEPT = 100_000
MOST_NOTED = 10_000


class Pair(NamedTuple):
    """A finished request as it was and as the shadow served it; seconds.

    Attributes:
        finished_s: When it was over, on the gateway's clock.
        jct_s: Arrival to end.
        queued_for_s: In the gateway's queue in all.
        shadow_jct_s: Arrival to end in the shadow.
        shadow_waited_s: For a seat of the shadow.
    """

    finished_s: float
    jct_s: float
    queued_for_s: float
    shadow_jct_s: float
    shadow_waited_s: float


class Regret:
    """A running estimate.

    Attributes:
        max_num_seqs: Places at engines now; who ran the shadow before keeps its seat.
        report: Requests in the sums.
        jct_s: Sum of the JCT that they had.
        shadow_jct_s: Sum of the JCT that FCFS would have given them.
        until_s: When the last of them came; NaN before the first.
    """

    def __init__(self, max_num_seqs: int = 1) -> None:
        self.max_num_seqs = max_num_seqs
        self.report = 0
        self.jct_s = self.shadow_jct_s = 0.0
        self.until_s = math.nan
        self._recorded: list[tuple[float, int]] = []
        self._live: dict[int, float] = {}
        self._over: list[tuple[float, int, Row]] = []
        self._free: list[float] = []
        self._recent: deque[Pair] = deque(maxlen=RECENT)

    def noted(self, now_s: float, max_num_seqs: int) -> None:
        """From now on there are so many seats."""
        if max_num_seqs != self.max_num_seqs or not self._recorded:
            self.max_num_seqs = max_num_seqs
            self._recorded.append((now_s, max_num_seqs))
            if len(self._recorded) > 2 * MOST_NOTED:
                del self._recorded[:MOST_NOTED]

    def on_arrival(self, request_id: int, arrival_s: float) -> None:
        """It is in."""
        self._live[request_id] = arrival_s

    def finished(self, row: Row) -> None:
        """It is over."""
        self._live.pop(row.id, None)
        heapq.heappush(self._over, (row.arrival_s, row.id, row))
        before_s = next(iter(self._live.values()), math.inf)
        if len(self._over) > MOST_KEPT:
            before_s = math.inf
        while self._over and self._over[0][0] < before_s:
            self._serve(heapq.heappop(self._over)[2])

    def mean_s(self) -> float:
        """Of the last requests: mean JCT that they had less that of the shadow; NaN before the first."""
        return self.recent()[0] - self.recent()[1] if self._recent else math.nan

    def recent(self) -> tuple[float, float]:
        """Mean JCT of the last requests, (that they had, under FCFS); NaN before the first."""
        if not self._recent:
            return math.nan, math.nan
        n = len(self._recent)
        return sum(pair.jct_s for pair in self._recent) / n, sum(pair.shadow_jct_s for pair in self._recent) / n

    @property
    def recent_count(self) -> int:
        """The last requests, of which ``recent`` tells."""
        return len(self._recent)

    def pairs(self) -> list[Pair]:
        """The last requests in the order in which they came."""
        return list(self._recent)

    def _serve(self, row: Row) -> None:
        arrival_s, service_s = row.arrival_s, row.served_s
        if not service_s > 0:
            return
        free, (since_s, max_num_seqs) = self._free, self._seats_at(row.dispatched_s)
        while len(free) > max_num_seqs:
            heapq.heappop(free)
        fresh = len(free) < max_num_seqs  # a seat that was added is there from then on
        start_s = max(arrival_s, since_s if fresh else heapq.heappop(free))
        heapq.heappush(free, start_s + service_s)
        if row.outcome == Outcome.FINISHED:
            queued_for_s = start_s - arrival_s
            self.report += 1
            self.until_s = arrival_s
            self.jct_s += row.jct_s
            self.shadow_jct_s += queued_for_s + service_s
            self._recent.append(
                Pair(row.finished_s, row.jct_s, row.queued_for_s, queued_for_s + service_s, queued_for_s)
            )

    def _seats_at(self, now_s: float) -> tuple[float, int]:
        """(since when, how many) when a request was really sent; it is told long after."""
        i = bisect_right(self._recorded, (now_s, 1 << 62)) - 1
        if i < 0:
            return -math.inf, max(1, self.max_num_seqs)
        since_s, max_num_seqs = self._recorded[i]
        return (since_s if i else -math.inf), max(1, max_num_seqs)


_HISTOGRAMS = (
    ("ttft_s", "time_to_first_token_seconds", "From a request's arrival to its first token, where seen"),
    ("gap_s", "inter_token_latency_seconds", "Between two tokens of a request, as they came from the engine"),
    ("queue_s", "queue_seconds", "In the gateway's queue in all"),
    ("jct_s", "request_seconds", "From a request's arrival to its end (JCT), of finished ones"),
    ("predicted", "predicted_tokens", "Output tokens predicted before the first one, of finished requests"),
    ("actual", "actual_tokens", "Output tokens of finished requests"),
    ("log_ratio", "prediction_log_ratio", "ln(predicted / actual output tokens) of finished requests"),
)
_GAUGES = (
    ("waiting", "queue_requests", "Requests that wait"),
    ("waiting_bytes", "queue_bytes", "Bytes of the bodies of requests that wait"),
    ("running", "running_requests", "Requests at engines"),
    ("oldest_wait_s", "oldest_wait_seconds", "The longest that a waiting request has waited"),
    ("backlog_tokens", "backlog_tokens", "Predicted output tokens still to come, waiting and running"),
    ("backlog_s", "backlog_seconds", "Seconds in which all engines together would make the backlog: scale by it"),
    ("predicted_wait_s", "predicted_wait_seconds", "What a request that arrives now would wait"),
    ("ordering", "ordering_active", "1 where requests wait, so that their order matters"),
)
_WORKER = (
    ("in_flight", "in_flight", "Requests at the engine"),
    ("cap", "cap", "Requests that the engine is given at most; not there where it is given all"),
    ("up", "worker_up", "1 where the engine may be given requests"),
    ("backlog_tokens", "worker_backlog_tokens", "Predicted output tokens still to come at the engine"),
    ("backlog_token_s", "worker_backlog_token_seconds", "Predicted backlog of the engine in token-seconds"),
)
_SIGNALS = (
    ("running", "engine_running_requests", "Requests in the engine's batch, as it tells"),
    ("waiting", "engine_waiting_requests", "Requests in the engine's own queue, as it tells"),
    ("kv_used", "engine_kv_used_ratio", "Share of the KV cache in use, as the engine tells"),
    ("preemptions", "engine_preemptions", "Preemptions since the engine started, as it tells"),
)


def of_requests(m: Metrics) -> Iterator[Any]:
    """How requests ended, and what happened to them on the way."""
    yield _counter("requests", "Requests by the bucket in which they ended", ("outcome", "model", "tenant"), m.requests)
    yield _counter("refusals", "Requests that were not let in", ("reason",), _keyed(m.refusals))
    yield _counter("forecasts", "First forecasts by their source", ("source",), _keyed(m.forecasts))
    counts = m.counts
    cuts = counts["cut"] + counts["window"]
    yield _counter("preemptions", "Requests cut to make room", (), {(): cuts})
    yield _counter("resumed_tokens", "Tokens kept over cuts and fail-overs", (), {(): counts["resumed_tokens"]})
    yield _counter("failovers", "Requests taken over from an engine that failed", (), {(): counts["failed_over"]})
    hits = "Requests sent to an engine that has probably the beginning of their prompt in its cache"
    yield _counter("prefix_hits", hits, (), {(): counts["prefix_hits"]})
    tokens = "Prompt tokens that were probably in the cache of the engine that they were sent to"
    yield _counter("prefix_hit_tokens", tokens, (), {(): counts["prefix_tokens"]})
    yield _counter("retries", "Requests sent again before anything came", (), {(): counts["retried"]})


def of_models(by_model: Mapping[str, OfModel]) -> Iterator[Any]:
    """Times, lengths and predictions by model."""
    for name in ("prompt_tokens", "output_tokens"):
        values = {(model,): getattr(of, name) for model, of in by_model.items()}
        yield _counter(name, f"{name.replace('_', ' ').capitalize()} of requests that are over", ("model",), values)
    for attribute, name, what in _HISTOGRAMS:
        yield _histogram(name, what, ((model, getattr(of, attribute)) for model, of in by_model.items()))


def of_regret(regret: Regret) -> Iterator[Any]:
    """The order in use against first come, first served."""
    mean_s = regret.mean_s()
    if not math.isnan(mean_s):
        what = "Mean JCT of the last requests less that of a shadow FCFS queue; below 0 the order gains"
        yield _gauge("regret_seconds", what, (), {(): mean_s})
    yield _counter("shadow_requests", "Requests in the shadow FCFS queue", (), {(): regret.report})
    yield _counter("shadow_fcfs_request_seconds", "Their JCT under shadow FCFS", (), {(): regret.shadow_jct_s})
    yield _counter("shadow_real_request_seconds", "The JCT that they had", (), {(): regret.jct_s})


def of_gateway(m: Metrics) -> Iterator[Any]:
    """The process itself."""
    yield _histogram("event_loop_lag_seconds", "How late the event loop is", [("", m.lag_s)])
    if m.journal is not None:
        written, lost = m.journal()
        yield _counter("journal_rows", "Rows written to the journal", (), {(): written})
        yield _counter("journal_rows_lost", "Rows that could not be written", (), {(): lost})
    from importlib.metadata import version

    yield _gauge("build_info", "What runs", ("version", "mode"), {(version("lengthwise"), m.mode): 1})


def of_scheduler(now: Statistics) -> Iterator[Any]:
    """The queue and the engines."""
    for attribute, name, what in _GAUGES:
        yield _gauge(name, what, (), {(): getattr(now, attribute)})
    for attribute, name, what in _WORKER:
        yield _gauge(name, what, ("worker",), _known((w.name, getattr(w, attribute)) for w in now.workers))
    for attribute, name, what in _SIGNALS:
        yield _gauge(name, what, ("worker",), _report(now.workers, attribute))


def _report(workers: Iterable[WorkerNumbers], attribute: str) -> dict[tuple[str, ...], float]:
    return _known((w.name, getattr(w.signals, attribute)) for w in workers)


def _known(values: Iterable[tuple[str, float | None]]) -> dict[tuple[str, ...], float]:
    return {(name,): value for name, value in values if value is not None}


def _keyed(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


def _counter(name: str, what: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"lengthwise_{name}", what, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family


def _gauge(name: str, what: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"lengthwise_{name}", what, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family


def _histogram(name: str, what: str, by_model: Iterable[tuple[str, Histogram]]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    rows = list(by_model)
    labels = ("model",) if any(model for model, _ in rows) else ()
    family = HistogramMetricFamily(f"lengthwise_{name}", what, labels=labels)
    for model, histogram in rows:
        family.add_metric((model,) if labels else (), histogram.buckets(), histogram.sum)
    return family


def replan_families(now: ReplanningState) -> Iterator[Any]:
    """The drift statistic beside the threshold of an alarm, and what came of alarms."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, what, value in (
        ("lengths_watched", "1 while somebody watches whether lengths move", float(now.up)),
        ("lengths_evidence", "Evidence that lengths moved since the last alarm; 1: none", now.evidence),
        ("lengths_alarm", "Evidence from which on there is an alarm", 1 / now.false_positive_rate),
    ):
        yield GaugeMetricFamily(f"lengthwise_{name}", what, value=value)
    yield CounterMetricFamily(
        "lengthwise_lengths_observed", "Requests whose lengths were watched", value=float(now.observed)
    )
    plans = CounterMetricFamily(
        "lengthwise_plans", "Schedules planned anew after lengths moved, by what came of it", labels=("result",)
    )
    for result in ("changed", "left", "failed"):
        plans.add_metric((result,), float(getattr(now, result)))
    yield plans


OTHER = "other"


class Labels:
    """The first ``most`` names that come keep their own; all others are "other".

    Whoever may send any name would else make as many time series as he likes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The label of a name; learns it while there is room."""
        label = self._known.get(name)
        if label is None:
            if len(self._known) >= self._most:
                return OTHER
            label = self._known[name] = name[:128]
        return label

    def known(self, name: str) -> str:
        """The label of a name that has been learnt, else "other"."""
        return self._known.get(name, OTHER)


MOST_WORKERS = 200
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Of batches and phases."""
_PHASE_HISTOGRAMS = (
    ("encode_batch", SIZES, "phase_encode_batch_requests", "New requests of an encoding (B_E)"),
    ("decode_batch", SIZES, "phase_decode_batch_requests", "Requests at the engine after an encoding (B_D)"),
    ("left_batch", SIZES, "phase_left_batch_requests", "Requests at the engine at the end of a phase"),
    ("decode_steps", SIZES, "phase_decode_steps", "Decode iterations of a phase, as tokens tell (N_D)"),
    ("seconds", WAITS_S, "phase_seconds", "From one encoding to the next, or to the engine's idling"),
)


class PhaseCounts:
    """What phases were, by worker.

    Attributes:
        plan: The schedule that is kept; None: none.
    """

    def __init__(self, plan: Phases | None) -> None:
        self.plan = plan
        self._workers = Labels(MOST_WORKERS)
        self._finished: Counter[tuple[str, str]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._overdue: Counter[str] = Counter()
        self._of: dict[str, dict[str, Histogram]] = {}

    def phase(self, phase: Phase) -> None:
        """One is over."""
        worker = self._workers.of(phase.worker)
        self._finished[worker, phase.cause] += 1
        self._overdue[worker] += phase.overdue
        self._prompt_tokens[worker] += phase.prompt_tokens
        of = self._of.get(worker)
        if of is None:
            of = self._of[worker] = {name: Histogram(edges) for name, edges, _, _ in _PHASE_HISTOGRAMS}
        for name in ("encode_batch", "decode_batch", "left_batch", "decode_steps"):
            of[name].add(getattr(phase, name))
        of["seconds"].add(phase.finished_s - phase.started_s)

    def families(self) -> Iterator[Any]:
        """All of it, where a schedule is kept."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        if self.plan is None:
            return
        plan = GaugeMetricFamily("lengthwise_phase_plan", "The schedule that engines keep", labels=("of",))
        for name, value in asdict(self.plan).items():
            if value is not None:
                plan.add_metric((name,), float(value))
        yield plan
        ended = CounterMetricFamily(
            "lengthwise_phases", "Phases that are over, by what ended them", labels=("worker", "ended")
        )
        for (worker, why), count in self._finished.items():
            ended.add_metric((worker, why), float(count))
        yield ended
        for name, what, counts in (
            ("phase_prompt_tokens", "Prompt tokens of all encodings", self._prompt_tokens),
            ("phase_overdue", "Requests sent in the midst of a phase after max_wait_s", self._overdue),
        ):
            family = CounterMetricFamily(f"lengthwise_{name}", what, labels=("worker",))
            for worker, count in counts.items():
                family.add_metric((worker,), float(count))
            yield family
        for key, _, name, what in _PHASE_HISTOGRAMS:
            shown = HistogramMetricFamily(f"lengthwise_{name}", what, labels=("worker",))
            for worker, of in self._of.items():
                shown.add_metric((worker,), of[key].buckets(), of[key].sum)
            yield shown


if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_TENANTS = 50
MOST_MODELS = 50


class OfModel:
    """What is counted of one model."""

    __slots__ = (
        "actual", "gap_s", "jct_s", "log_ratio", "output_tokens", "predicted", "prompt_tokens", "queue_s", "ttft_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ttft_s, self.queue_s, self.jct_s = Histogram(WAITS_S), Histogram(WAITS_S), Histogram(WAITS_S)
        self.gap_s = Histogram(GAPS_S)
        self.predicted, self.actual = Histogram(LENGTHS), Histogram(LENGTHS)
        self.log_ratio = Histogram(LOG_RATIOS)
        self.prompt_tokens = self.output_tokens = 0


class Metrics(Listener):
    """Counts, and collects for a registry of its own.

    The queue, the workers and the regret are read when somebody asks, by the functions that are given.

    Args:
        statistics: The scheduler now; None tells nothing of it.
        regret: The running estimate against FCFS.
        tenants: So many names of tenants at most; further ones are "other".
        mode: The order's mode.
        phases: The schedule that engines keep; None: none.
    """

    def __init__(
        self,
        statistics: Callable[[], Statistics] | None = None,
        regret: Regret | None = None,
        *,
        tenants: int = MAX_TENANTS,
        mode: str = "",
        phases: Phases | None = None,
    ) -> None:
        self.statistics, self.regret, self.mode = statistics, regret or Regret(), mode
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.forecasts: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.by_model: dict[str, OfModel] = {}
        self.phases = PhaseCounts(phases)
        self.lag_s = Histogram(LAGS_S)
        self.journal: Callable[[], tuple[int, int]] | None = None
        self.tracker: Callable[[], ReplanningState] | None = None
        self._models, self._tenants = Labels(MOST_MODELS), Labels(tenants)

    # What happens to requests:

    def gaps(self, model: str) -> Histogram:
        """Where the times between tokens of a model are counted."""
        return self._of(model).gap_s

    def on_arrival(self, request: Request) -> None:  # noqa: D102 - as Listener
        self.forecasts[request.length_prediction.source] += 1
        self._of(request.model)

    def refused(self, reason: str, rejection: Rejection, tenant: int, model: str) -> None:  # noqa: D102
        del rejection
        self.refused_by(reason, str(tenant), model)

    def refused_by(self, reason: str, tenant: str, model: str) -> None:
        """A request of a tenant by name was not let in."""
        self.refusals[reason] += 1
        self.requests[Outcome.REFUSED.value, self._models.known(model), self._tenants.of(tenant)] += 1

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        del worker, now_s
        if request.cached_tokens:
            self.counts["prefix_hits"] += 1
            self.counts["prefix_tokens"] += request.cached_tokens

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        self._of(request.model).ttft_s.add(now_s - request.arrival_s)

    def returned(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        del now_s
        self.counts[cause] += 1
        self.counts["resumed_tokens"] += request.generated_tokens

    def over(self, row: Row) -> None:
        """A request is over."""
        label = self._models.of(row.model)
        self.requests[row.outcome, label, self._tenants.of(row.tenant)] += 1
        of = self._of(row.model)
        if row.worker:
            of.queue_s.add(row.queued_for_s)
        of.prompt_tokens += row.prompt_tokens
        of.output_tokens += row.output_tokens
        if row.outcome != Outcome.FINISHED:
            return
        of.jct_s.add(row.jct_s)
        if row.output_tokens >= 1:
            of.predicted.add(row.predicted_tokens)
            of.actual.add(row.output_tokens)
            of.log_ratio.add(math.log(max(row.predicted_tokens, 1.0) / row.output_tokens))

    def _of(self, model: str) -> OfModel:
        label = self._models.of(model)
        of = self.by_model.get(label)
        if of is None:
            of = self.by_model[label] = OfModel()
        return of

    # What Prometheus is told:

    def collect(self) -> Iterator[Any]:
        """All families now."""
        yield from of_requests(self)
        yield from of_models(self.by_model)
        yield from of_regret(self.regret)
        yield from of_gateway(self)
        yield from self.phases.families()
        if self.tracker is not None:
            yield from replan_families(self.tracker())
        if self.statistics is not None:
            yield from of_scheduler(self.statistics())

    def registry(self) -> CollectorRegistry:
        """A registry of these, and of the process.

        Raises:
            MissingExtraError: prometheus-client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
        except ImportError as error:
            raise MissingExtraError("lengthwise serve", "gateway") from error
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        return registry
