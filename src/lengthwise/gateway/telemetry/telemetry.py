"""All telemetry of a gateway as one listener: timelines of live requests, metrics, log, and journal."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Self

import numpy as np

from lengthwise.gateway.background import background
from lengthwise.gateway.config import GatewayConfig, Limits
from lengthwise.gateway.protocols import Clock, Listener, Listeners, monotonic
from lengthwise.gateway.request import UNAUTHENTICATED, Client, LengthPrediction, Outcome, Refusal, Request
from lengthwise.gateway.scheduling import Statistics
from lengthwise.gateway.telemetry.events import EventLog, Tracing
from lengthwise.gateway.telemetry.journal import Journal, PrefixKey, Reprediction, Row
from lengthwise.gateway.telemetry.metrics import Histogram, Metrics

MAX_REPREDICTIONS = 64  # of a request; beyond it every second one is dropped, so that the others cover the same span
FAILED_OVER = "failed_over"


class RequestTimeline:
    """Times and predictions of a live request."""

    __slots__ = (
        "at_worker_since_s", "dispatched_s", "failovers", "first_prediction", "first_token_s", "inter_token_s",
        "last_s", "length_prediction", "repredictions", "request", "resumed_tokens", "served_s", "worker",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.inter_token_s: Histogram | None = None
        self.first_prediction = self.length_prediction = request.length_prediction
        self.repredictions: list[Reprediction] = []
        self.dispatched_s = self.first_token_s = self.last_s = self.at_worker_since_s = math.nan
        self.served_s, self.worker = 0.0, ""
        self.failovers = self.resumed_tokens = 0

    def update_prediction(self, length_prediction: LengthPrediction) -> None:
        """Record a new prediction."""
        self.length_prediction = length_prediction
        if length_prediction.at_tokens == 0:
            self.first_prediction = length_prediction
            return
        if len(self.repredictions) >= MAX_REPREDICTIONS:
            del self.repredictions[1::2]
        self.repredictions.append((length_prediction.at_tokens, round(float(length_prediction.total_tokens), 1)))

    def leave_worker(self, now_s: float) -> None:
        """If the request is at a worker, record that it leaves the worker now."""
        if not math.isnan(self.at_worker_since_s):
            self.served_s += now_s - self.at_worker_since_s
            self.at_worker_since_s = math.nan

    def row(
        self,
        tenant: str,
        outcome: Outcome,
        now_s: float,
        *,
        max_tokens: int,
        session: int = 0,
        prefix: tuple[PrefixKey, ...] = (),
    ) -> Row:
        """Return the journal's row of the request, which ends now, with hashes of its session and its prompt.

        ``max_tokens`` is the gateway's limit. The row's ``max_tokens`` is 0 if the request's limit is not below it.
        """
        request = self.request
        return Row(
            **{name: getattr(request, name) for name in _REQUEST_FIELDS},
            **{name: getattr(self, name) for name in _TIMELINE_FIELDS},
            prompt_tokens=request.dispatch.reported_prompt_tokens or request.prompt_tokens,
            max_tokens=request.max_tokens if request.max_tokens < max_tokens else 0,
            tenant=tenant,
            priority=request.client.priority,
            predicted_tokens=float(self.first_prediction.total_tokens),
            source=self.first_prediction.source,
            predicted_level=level_of(self.first_prediction, request.generated_tokens),
            repredictions=tuple(self.repredictions),
            output_tokens=request.generated_tokens,
            queued_for_s=request.dispatch.queued_for_s if self.worker else now_s - request.arrival_s,
            finished_s=now_s,
            preemptions=request.dispatch.preemptions,
            outcome=outcome.value,
            session=session,
            prefix=prefix,
            cached_tokens=request.dispatch.reported_cached_tokens,
            kv_tokens=request.dispatch.kv_tokens,
        )


_MAX_HASH = (1 << 53) - 1  # larger integers lose digits in JSON readers that use doubles
_REQUEST_FIELDS = ("id", "model", "arrival_s")
_TIMELINE_FIELDS = ("dispatched_s", "first_token_s", "served_s", "worker", "failovers", "resumed_tokens")


class RequestTimelines(Listener):
    """Records the timelines of all live requests, and calls the subscribers with the row of each request that ends.

    ``tenant`` returns a tenant's name by its number, ``inter_token_s`` the histogram of a model's times between tokens.
    Rows have the hashes of prompts' prefixes if ``prefixes`` is set. ``max_tokens`` is the gateway's limit.
    """

    def __init__(
        self,
        tenant: Callable[[int], str] = str,
        inter_token_s: Callable[[str], Histogram] | None = None,
        *,
        prefixes: bool = False,
        max_tokens: int = Limits.max_tokens,
    ) -> None:
        self.max_tokens = max_tokens
        self._tenant, self._inter_token_s, self._prefixes = tenant, inter_token_s, prefixes
        self._live: dict[int, RequestTimeline] = {}
        self._keyed = blake2b(digest_size=8, key=os.urandom(32))
        self._subscribers: list[Callable[[Row], None]] = []

    def subscribe(self, on_row: Callable[[Row], None]) -> None:
        """Call a function with every later row, on the event loop. It must return soon and must not raise."""
        self._subscribers.append(on_row)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestTimeline]:
        return iter(self._live.values())

    def on_admission(self, request: Request) -> None:  # noqa: D102 - as Listener
        self._live[request.id] = RequestTimeline(request)

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        if (timeline := self._live.get(request.id)) is None:
            return
        if request.length_prediction is not timeline.length_prediction:
            timeline.update_prediction(request.length_prediction)
        if math.isnan(timeline.dispatched_s):
            timeline.dispatched_s = now_s
        timeline.at_worker_since_s, timeline.worker = now_s, worker
        if self._inter_token_s is not None:
            timeline.inter_token_s = self._inter_token_s(request.model)

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        if (timeline := self._live.get(request.id)) is not None and math.isnan(timeline.first_token_s):
            timeline.first_token_s = timeline.last_s = now_s

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:  # noqa: D102
        if (timeline := self._live.get(request.id)) is None:
            return
        last_s, timeline.last_s = timeline.last_s, now_s
        if last_s == last_s:  # noqa: PLR0124 - not NaN; this is the hot path
            if timeline.inter_token_s is not None and now_s > last_s:
                timeline.inter_token_s.add((now_s - last_s) / new_tokens, new_tokens)
        elif not request.dispatch.single_chunk:
            timeline.first_token_s = now_s
        if request.length_prediction is not timeline.length_prediction:
            timeline.update_prediction(request.length_prediction)

    def requeued(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        timeline = self._live.get(request.id)
        if timeline is not None:
            timeline.leave_worker(now_s)
            timeline.resumed_tokens += request.generated_tokens
            timeline.failovers += cause == FAILED_OVER

    def on_end(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        del detail
        timeline = self._live.pop(request.id, None)
        if timeline is not None:
            timeline.leave_worker(now_s)
            row = timeline.row(
                self._tenant(request.client.tenant),
                outcome,
                now_s,
                max_tokens=self.max_tokens,
                session=self._session_of(request.client),
                prefix=request.prefix.levels(_MAX_HASH) if self._prefixes else (),
            )
            for on_row in self._subscribers:
                on_row(row)

    def _session_of(self, client: Client) -> int:
        if not client.session:
            return 0
        digest = self._keyed.copy()
        digest.update(repr((client.tenant, client.session)).encode("utf-8", "surrogatepass"))
        return int.from_bytes(digest.digest(), "little") & _MAX_HASH or 1


def level_of(length_prediction: LengthPrediction, output_tokens: int) -> float:
    """Return the predicted probability that the length is at most ``output_tokens``, or NaN without quantiles."""
    if length_prediction.quantiles is None or output_tokens < 1:
        return math.nan
    from lengthwise.predict import LEVELS

    return float(np.interp(output_tokens, length_prediction.quantiles, LEVELS, left=0.0, right=1.0))


LAG_INTERVAL_S = 0.2


class Telemetry(Listeners):
    """Metrics, log, journal and traces of a gateway, as an async context manager.

    ``statistics`` returns the scheduler's numbers, and ``tenants`` are the names of tenants by number.
    ``refusal_subscribers`` are called with reason, refusal, tenant and model of every refusal. Raises OutputError if
    the journal is not writable, and MissingExtraError if traces are configured without the extra ``tracing``.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Clock = monotonic,
        *,
        statistics: Callable[[], Statistics] | None = None,
        tenants: Sequence[str] = ("anonymous",),
    ) -> None:
        self._tenants = tenants
        mode = config.order.mode
        phases = config.dispatch.phases if mode == "rra" else None
        self.metrics = Metrics(statistics, mode=mode, phases=phases)
        has_journal = config.listen.journal is not None
        self.timelines = RequestTimelines(
            self._tenant, self.metrics.inter_token_s, prefixes=has_journal, max_tokens=config.limits.max_tokens
        )
        self.log = EventLog(clock)
        listen = config.listen
        self.journal = Journal(listen.journal, clock) if listen.journal else None
        self.tracing = Tracing(listen.trace, clock) if listen.trace else None
        # A model gets its label from ``metrics`` before ``timelines`` uses the label.
        listeners = (self.metrics, self.timelines, self.metrics.phases, self.log, self.tracing)
        super().__init__([listener for listener in listeners if listener is not None])
        self._detail = ""
        self.refusal_subscribers: list[Callable[[str, Refusal, int, str], None]] = []
        self._stack = contextlib.AsyncExitStack()
        for on_row in (self.metrics.add_row, lambda row: self.log.log_row(row, self._detail)):
            self.timelines.subscribe(on_row)
        if self.journal is not None:
            journal = self.journal
            self.timelines.subscribe(journal.append)
            self.metrics.journal = lambda: (journal.written, journal.lost)

    def _tenant(self, number: int) -> str:
        return self._tenants[number] if number != UNAUTHENTICATED else "unauthenticated"

    async def __aenter__(self) -> Self:
        if self.journal is not None:
            await self._stack.enter_async_context(self.journal)
        await self._stack.enter_async_context(background(self._measure_lag()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def configure(self, config: GatewayConfig) -> None:
        """Apply ``dispatch.phases`` of another configuration to the metrics, ``limits.max_tokens`` to the journal."""
        self.timelines.max_tokens = config.limits.max_tokens
        if config.order.mode == "rra":
            self.metrics.phases.plan = config.dispatch.phases

    def traced(self, serve: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """Wrap the relay's ``serve`` in spans if traces are configured. Otherwise return ``serve`` unchanged."""
        return serve if self.tracing is None else self.tracing.traced(serve)

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:  # noqa: D102
        self.metrics.count_refusal(reason, self._tenant(tenant), model)
        self.log.refused(reason, refusal, tenant, model)
        for on_refusal in self.refusal_subscribers:
            on_refusal(reason, refusal, tenant, model)

    def on_end(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        self._detail = detail
        super().on_end(request, outcome, now_s, detail)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.metrics.lag_s.add(max(0.0, loop.time() - due_s))
