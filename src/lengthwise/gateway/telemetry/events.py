"""A line of JSON an event, on the logger "lengthwise.gateway.requests". No prompts, no texts, no keys."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any, Protocol, TextIO, TypeVar

from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.request import Outcome, Rejection, Request
from lengthwise.gateway.scheduling import Phase
from lengthwise.gateway.telemetry.journal import Row, as_dict
from lengthwise.schema.errors import MissingExtraError

LOGGER = "lengthwise.gateway.requests"
MOST_A_SECOND = 50
"""Refusals told one by one; further ones of that second are only counted."""
_LONGEST = 120
_ITS_REASON = "The engine failed"
"""What follows these is one of the relay's few reasons ("stalled", "http 500")."""
_OWN_WORDS = (Outcome.EXPIRED, Outcome.CLIENT_GONE)
_PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and what ``extra`` it has."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        told |= {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, separators=(",", ":"), default=str)


def json_lines(stream: TextIO | None = None, level: int = logging.INFO) -> logging.Handler:
    """Has all of the gateway's loggers tell JSON lines to a stream (stderr); returns the handler, to be removed."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("lengthwise.gateway")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler


class EventLog(Listener):
    """Tells of requests: refused, back in the queue, over."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock, self._logger = clock, logging.getLogger(LOGGER)
        self._second, self._report, self._untold = 0, 0, 0

    def refused(self, reason: str, rejection: Rejection, tenant: int, model: str) -> None:  # noqa: D102 - as Listener
        second = int(self._clock())
        if second != self._second:
            if self._untold:
                self._logger.info("refused_more", extra={"requests": self._untold})
            self._second, self._report, self._untold = second, 0, 0
        if self._report >= MOST_A_SECOND:
            self._untold += 1
            return
        self._report += 1
        metadata = {"reason": reason, "status": rejection.status, "tenant": tenant, "model": model[:128]}
        self._logger.info("refused", extra=metadata)

    def returned(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        del now_s
        if self._logger.isEnabledFor(logging.INFO):
            metadata = {"id": request.id, "cause": cause, "generated_tokens": request.generated_tokens}
            self._logger.info("returned", extra=metadata)

    def phase(self, phase: Phase) -> None:
        """A phase of a worker is over."""
        if self._logger.isEnabledFor(logging.INFO):
            self._logger.info("phase", extra=asdict(phase))

    def over(self, row: Row, detail: str = "") -> None:
        """A request is over."""
        level = logging.WARNING if row.outcome == Outcome.FAILED else logging.INFO
        if not self._logger.isEnabledFor(level):
            return
        metadata = as_dict(row)
        del metadata["retry"]
        metadata |= {"jct_s": round(row.jct_s, 6)}
        if why := safe_detail(row.outcome, detail):
            metadata["cause"] = why
        self._logger.log(level, "request", extra=metadata)


def safe_detail(outcome: str, detail: str) -> str:
    """What may be told of why a request ended.

    Engines repeat prompts in their errors: of what an engine may have said only our own words, which stand
    before the first colon, are kept, and of a rejection nothing.
    """
    if outcome in _OWN_WORDS:
        return detail[:_LONGEST]
    if outcome != Outcome.FAILED:
        return ""
    words = detail.split(":")
    return ":".join(words[: 2 if words[0] == _ITS_REASON else 1])[:_LONGEST]


FORWARDED_FIELDS = ("traceparent", "tracestate")
SERVICE = "lengthwise-gateway"


class Traced(Protocol):
    """What is asked, as far as traces go: ``edge.Asked``."""

    headers: list[tuple[str, str]]
    arrival_s: float


A = TypeVar("A", bound=Traced)
R = TypeVar("R")


class Tracing(Listener):
    """Makes spans and sends them to a collector, in batches on a thread of their own.

    Args:
        endpoint: OTLP/HTTP address of the collector ("http://collector:4318/v1/traces"; the path may be left out).
        clock: The gateway's.
        exporter: Where spans go instead.
        epoch: Seconds since 1970, asked once.

    Raises:
        MissingExtraError: The extra ``tracing`` is not installed.
    """

    def __init__(
        self, endpoint: str, clock: Clock = monotonic, *, exporter: Any = None, epoch: Callable[[], float] = time.time
    ) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise MissingExtraError("tracing (listen.trace)", "tracing") from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        out = exporter or OTLPSpanExporter(endpoint=_traces_path(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(out))
        self._tracer = self._provider.get_tracer("lengthwise.gateway")
        self._shift_s = epoch() - clock()
        self._clock = clock
        self._now: ContextVar[Any] = ContextVar("lengthwise_span", default=None)
        self._spans: dict[int, Any] = {}

    def exchange(self, inner: Callable[[A], Awaitable[R]]) -> Callable[[A], Awaitable[R]]:
        """The exchange within spans: of the client's trace, and told on to the engine."""

        async def traced(client_request: A) -> R:
            span = self._begin(client_request)
            token = self._now.set(span)
            try:
                return await inner(client_request)
            except BaseException as error:
                self._end(span, type(error).__name__, self._clock())
                raise
            finally:
                self._now.reset(token)

        return traced

    def on_arrival(self, request: Request) -> None:  # noqa: D102 - as Listener
        span = self._now.get()
        if span is None:
            return
        self._spans[request.id] = span
        span.set_attributes({
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "lengthwise.predicted_tokens": request.length_prediction.total_tokens,
            "lengthwise.forecast_source": request.length_prediction.source,
        })  # fmt: skip

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        self._event(request, "dispatched", now_s, {"worker": worker, "queued_for_s": request.queued_for_s})

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        self._event(request, "first token", now_s, {})

    def returned(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        self._event(request, "returned", now_s, {"cause": cause, "generated_tokens": request.generated_tokens})

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        span = self._spans.pop(request.id, None)
        if span is None:
            return
        span.set_attributes({
            "gen_ai.usage.output_tokens": request.generated_tokens,
            "lengthwise.outcome": outcome.value,
            "lengthwise.waited_s": request.queued_for_s,
            "lengthwise.preemptions": request.preemptions,
        })  # fmt: skip
        failed = outcome in (Outcome.FAILED, Outcome.EXPIRED)
        self._end(span, (safe_detail(outcome, detail) or outcome.value) if failed else "", now_s)

    def close(self) -> None:
        """Sends what is left; blocks a moment."""
        self._provider.shutdown()

    def _begin(self, client_request: Traced) -> Any:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.lower(): value for name, value in client_request.headers if name.lower() in FORWARDED_FIELDS}
        propagator = TraceContextTextMapPropagator()
        parent = propagator.extract(carrier)
        span = self._tracer.start_span(
            "lengthwise.request", parent, SpanKind.SERVER, start_time=self._ns(client_request.arrival_s)
        )
        from opentelemetry.trace import set_span_in_context

        onward: dict[str, str] = {}
        propagator.inject(onward, set_span_in_context(span))
        kept = [pair for pair in client_request.headers if pair[0].lower() not in FORWARDED_FIELDS]
        client_request.headers[:] = kept + list(onward.items())
        return span

    def _event(self, request: Request, name: str, now_s: float, metadata: dict[str, Any]) -> None:
        span = self._spans.get(request.id)
        if span is not None:
            span.add_event(name, metadata, timestamp=self._ns(now_s))

    def _end(self, span: Any, error: str, now_s: float) -> None:
        from opentelemetry.trace import Status, StatusCode

        if not span.is_recording():
            return
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._ns(now_s))

    def _ns(self, now_s: float) -> int:
        return int((now_s + self._shift_s) * 1e9)


def _traces_path(endpoint: str) -> str:
    bare = endpoint.rstrip("/")
    return bare if bare.endswith("/v1/traces") else f"{bare}/v1/traces"
