"""Log requests as JSON lines and OpenTelemetry traces, without prompts, texts or keys."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any, TextIO

from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.request import Outcome, Refusal, Request
from lengthwise.gateway.scheduling import Phase
from lengthwise.gateway.telemetry.journal import Row, as_dict
from lengthwise.schema.errors import MissingExtraError

LOGGER = "lengthwise.gateway.requests"
MAX_LINES_PER_S = 50  # of refusals, and of failed requests
_MAX_LENGTH = 120
_ENGINE_FAILED = "The engine failed"  # followed by a colon and a reason of the relay ("stalled", "http 500")
_SAFE_OUTCOMES = (Outcome.EXPIRED, Outcome.CLIENT_GONE)
_RECORD_FIELDS = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """Formats a log record as a line of JSON: time, level, logger, event, and the fields of ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _RECORD_FIELDS}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


def json_lines(stream: TextIO | None = None, level: int = logging.INFO) -> logging.Handler:
    """Make all loggers of the gateway and its server write JSON lines to a stream (by default stderr).

    Returns the handler.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name, least in (("lengthwise.gateway", level), ("uvicorn.error", max(level, logging.WARNING))):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(least)
        logger.propagate = False
    return handler


class _LogLimit:
    """Limits the lines of an event to MAX_LINES_PER_S. Of further ones in the same second only the number is logged."""

    def __init__(self, event: str, level: int, clock: Clock) -> None:
        self._event, self._level, self._clock = event, level, clock
        self._second, self._num_logged, self._num_suppressed = 0, 0, 0

    def allows(self, logger: logging.Logger) -> bool:
        """Count a line, and return whether to log it."""
        second = int(self._clock())
        if second != self._second:
            if self._num_suppressed:
                logger.log(self._level, self._event, extra={"requests": self._num_suppressed})
            self._second, self._num_logged, self._num_suppressed = second, 0, 0
        is_allowed = self._num_logged < MAX_LINES_PER_S
        self._num_logged += is_allowed
        self._num_suppressed += not is_allowed
        return is_allowed


class EventLog(Listener):
    """Logs the ends of phases (mode rra), and requests that are refused, return to the queue or end."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._logger = logging.getLogger(LOGGER)
        self._refusals = _LogLimit("refused_more", logging.INFO, clock)
        self._failures = _LogLimit("failed_more", logging.WARNING, clock)

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:  # noqa: D102 - as Listener
        if not self._refusals.allows(self._logger):
            return
        fields = {"reason": reason, "status": refusal.status, "tenant": tenant, "model": model[:128]}
        self._logger.info("refused", extra=fields)

    def requeued(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        del now_s
        if self._logger.isEnabledFor(logging.INFO):
            fields = {"id": request.id, "cause": cause, "generated_tokens": request.generated_tokens}
            self._logger.info("requeued", extra=fields)

    def phase(self, phase: Phase) -> None:  # noqa: D102
        if self._logger.isEnabledFor(logging.INFO):
            self._logger.info("phase", extra=asdict(phase))

    def log_row(self, row: Row, detail: str = "") -> None:
        """Log a request that has ended."""
        level = logging.WARNING if row.outcome == Outcome.FAILED else logging.INFO
        if not self._logger.isEnabledFor(level):
            return
        if level == logging.WARNING and not self._failures.allows(self._logger):
            return
        fields = as_dict(row)
        del fields["repredictions"], fields["prefix"]
        fields["jct_s"] = round(row.jct_s, 6)
        if cause := safe_detail(row.outcome, detail):
            fields["cause"] = cause
        self._logger.log(level, "request", extra=fields)


def safe_detail(outcome: str, detail: str) -> str:
    """Return the part of ``detail`` that may be logged without prompts of clients, at most 120 characters.

    ``detail`` describes the end of a request. The gateway itself writes it if the request expired or its client left:
    then the complete detail is safe. After a failure, a message of the engine may follow a colon and repeat the prompt:
    the detail is cut before it ("The engine failed: http 500: ..." becomes "The engine failed: http 500"). For other
    outcomes the result is "".
    """
    if outcome in _SAFE_OUTCOMES:
        return detail[:_MAX_LENGTH]
    if outcome != Outcome.FAILED:
        return ""
    parts = detail.split(":")
    return ":".join(parts[: 2 if parts[0] == _ENGINE_FAILED else 1])[:_MAX_LENGTH]


TRACE_HEADERS = ("traceparent", "tracestate")
SERVICE = "lengthwise-gateway"


class Tracing(Listener):
    """Creates an OpenTelemetry span for each request, and exports spans in batches from a thread.

    ``endpoint`` is the collector's OTLP/HTTP address ("http://collector:4318/v1/traces"; the path is optional).
    ``exporter`` replaces the OTLP exporter. ``epoch`` returns the seconds since 1970, and is called once, at the start.
    Raises MissingExtraError if the extra ``tracing`` is not installed.
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
        url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("lengthwise.gateway")
        self._shift_s = epoch() - clock()
        self._clock = clock
        self._current_span: ContextVar[Any] = ContextVar("lengthwise_span", default=None)
        self._spans: dict[int, Any] = {}

    def traced(self, serve: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """Wrap ``serve`` so that each call has a span, as child of the client's span and parent of the engine's."""

        async def traced(client_request: Any) -> Any:
            span = self._start(client_request)
            token = self._current_span.set(span)
            try:
                return await serve(client_request)
            except BaseException as error:
                self._end(span, type(error).__name__, self._clock())
                raise
            finally:
                self._current_span.reset(token)

        return traced

    def on_admission(self, request: Request) -> None:  # noqa: D102 - as Listener
        if (span := self._current_span.get()) is None:
            return
        self._spans[request.id] = span
        span.set_attributes({
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "lengthwise.predicted_tokens": request.length_prediction.total_tokens,
            "lengthwise.prediction_source": request.length_prediction.source,
        })  # fmt: skip

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        self._event(request, "dispatched", now_s, {"worker": worker, "queued_for_s": request.dispatch.queued_for_s})

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        self._event(request, "first token", now_s, {})

    def requeued(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        self._event(request, "requeued", now_s, {"cause": cause, "generated_tokens": request.generated_tokens})

    def on_end(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        if (span := self._spans.pop(request.id, None)) is None:
            return
        span.set_attributes({
            "gen_ai.usage.output_tokens": request.generated_tokens,
            "lengthwise.outcome": outcome.value,
            "lengthwise.queued_for_s": request.dispatch.queued_for_s,
            "lengthwise.preemptions": request.dispatch.preemptions,
        })  # fmt: skip
        is_error = outcome in (Outcome.FAILED, Outcome.EXPIRED)
        self._end(span, (safe_detail(outcome, detail) or outcome.value) if is_error else "", now_s)

    def close(self) -> None:
        """Export the remaining spans. This call blocks."""
        self._provider.shutdown()

    def _start(self, client_request: Any) -> Any:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.lower(): value for name, value in client_request.headers if name.lower() in TRACE_HEADERS}
        propagator = TraceContextTextMapPropagator()
        context, start_ns = propagator.extract(carrier), self._ns(client_request.arrival_s)
        span = self._tracer.start_span("lengthwise.request", context, SpanKind.SERVER, start_time=start_ns)
        forwarded: dict[str, str] = {}
        propagator.inject(forwarded, set_span_in_context(span))
        headers = [pair for pair in client_request.headers if pair[0].lower() not in TRACE_HEADERS]
        client_request.headers[:] = [*headers, *forwarded.items()]
        return span

    def _event(self, request: Request, name: str, now_s: float, attributes: dict[str, Any]) -> None:
        if (span := self._spans.get(request.id)) is not None:
            span.add_event(name, attributes, timestamp=self._ns(now_s))

    def _end(self, span: Any, error: str, now_s: float) -> None:
        from opentelemetry.trace import Status, StatusCode

        if not span.is_recording():
            return
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._ns(now_s))

    def _ns(self, now_s: float) -> int:
        return int((now_s + self._shift_s) * 1e9)
