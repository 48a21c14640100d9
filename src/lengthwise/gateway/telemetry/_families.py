"""Counts as Prometheus' families: names by its conventions, base units, one prefix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lengthwise.gateway.decisions import Statistics, WorkerNumbers
from lengthwise.gateway.telemetry.histogram import Histogram
from lengthwise.gateway.telemetry.regret import Regret

if TYPE_CHECKING:
    from lengthwise.gateway.telemetry.metrics import Metrics, OfModel

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
    (
        "backlog_s",
        "backlog_seconds",
        "Seconds in which all engines together would make the backlog: scale by it",
    ),
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
    yield _counter(
        "requests", "Requests by the bucket in which they ended", ("outcome", "model", "tenant"), m.requests
    )
    yield _counter("refusals", "Requests that were not let in", ("reason",), _keyed(m.refusals))
    yield _counter("forecasts", "First forecasts by their source", ("source",), _keyed(m.forecasts))
    counts = m.counts
    cuts = counts["cut"] + counts["window"]
    yield _counter("preemptions", "Requests cut to make room", (), {(): cuts})
    yield _counter(
        "resumed_tokens", "Tokens kept over cuts and fail-overs", (), {(): counts["resumed_tokens"]}
    )
    yield _counter(
        "failovers", "Requests taken over from an engine that failed", (), {(): counts["failed_over"]}
    )
    hits = "Requests sent to an engine that has probably the beginning of their prompt in its cache"
    yield _counter("prefix_hits", hits, (), {(): counts["prefix_hits"]})
    tokens = "Prompt tokens that were probably in the cache of the engine that they were sent to"
    yield _counter("prefix_hit_tokens", tokens, (), {(): counts["prefix_tokens"]})
    yield _counter("retries", "Requests sent again before anything came", (), {(): counts["retried"]})


def of_models(by_model: Mapping[str, OfModel]) -> Iterator[Any]:
    """Times, lengths and predictions by model."""
    for name in ("prompt_tokens", "output_tokens"):
        values = {(model,): getattr(of, name) for model, of in by_model.items()}
        yield _counter(
            name, f"{name.replace('_', ' ').capitalize()} of requests that are over", ("model",), values
        )
    for attribute, name, what in _HISTOGRAMS:
        yield _histogram(name, what, ((model, getattr(of, attribute)) for model, of in by_model.items()))


def of_regret(regret: Regret) -> Iterator[Any]:
    """The order in use against first come, first served."""
    mean_s = regret.mean_s()
    if not math.isnan(mean_s):
        what = "Mean JCT of the last requests less that of a shadow FCFS queue; below 0 the order gains"
        yield _gauge("regret_seconds", what, (), {(): mean_s})
    yield _counter("shadow_requests", "Requests in the shadow FCFS queue", (), {(): regret.told})
    yield _counter(
        "shadow_fcfs_request_seconds", "Their JCT under shadow FCFS", (), {(): regret.shadow_jct_s}
    )
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
        yield _gauge(name, what, ("worker",), _told(now.workers, attribute))


def _told(workers: Iterable[WorkerNumbers], attribute: str) -> dict[tuple[str, ...], float]:
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
