"""Requests from the edge to the engines, and their answers back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.protocols import ClientRequest, Fleet, Forecaster, Worker
from lengthwise.gateway.relay.engine_request import Rejected, plan
from lengthwise.gateway.relay.failures import Budget, Final, caller_of
from lengthwise.gateway.relay.request_session import (
    EVENTS,
    Answer,
    Journey,
    ChunkWriter,
    Surroundings,
    error_event,
    failed,
    whole,
)
from lengthwise.gateway.relay.responses import Assembled, BufferedResponse
from lengthwise.gateway.request import Outcome, Request
from lengthwise.gateway.scheduler_driver import SchedulerDriver, RequestFinishedError


class Reply:
    """Makes an answer of a journey's pieces, and an error of what ends it.

    Args:
        journey: Whose pieces.
    """

    def __init__(self, journey: Journey) -> None:
        self._journey, self._lost = journey, False

    async def answer(self) -> Answer:
        """The answer, as soon as there is something to tell."""
        journey = self._journey
        try:
            first = await journey.piece()
        except Rejected as no:
            journey.blame.rejected()
            return self._rejected(no)
        except Final as final:
            if journey.no is not None:  # nobody else could be asked
                return self._rejected(journey.no)
            journey.end(Outcome.FAILED, str(final))
            return failed(final)
        except RequestFinishedError:
            journey.end(Outcome.FAILED, "it was ended")
            return failed(_stopped())
        except BaseException as error:
            gone = isinstance(error, asyncio.CancelledError)
            journey.end(Outcome.CLIENT_GONE if gone else Outcome.FAILED, "before its answer began")
            raise
        if not isinstance(journey.state, BufferedResponse | Assembled):
            return Answer(200, EVENTS, first or b"", self._tracker, self._close, self._pass_to)
        kind = journey.kind if isinstance(journey.state, BufferedResponse) else "application/json"
        return whole(200, first or b"", kind or "application/json")

    async def _tracker(self) -> bytes | None:
        """The next piece, an error in place of one that does not come; None at the end."""
        try:
            return await self._journey.piece()
        except RequestFinishedError:
            final = _stopped()
        except Rejected as no:
            final = Final(502, "engine_failed", f"the engine refused to go on: {no}")
        except Final as told:
            final = told
        self._journey.end(Outcome.FAILED, str(final))
        return None if self._lost else error_event(final)

    def _pass_to(self, writer: ChunkWriter) -> None:
        self._journey.writer = writer

    def _rejected(self, no: Rejected) -> Answer:
        self._journey.end(Outcome.REJECTED, str(no))
        return whole(no.status, no.body, no.kind)

    def _close(self) -> None:
        """The client takes no more."""
        self._lost = True
        self._journey.end(Outcome.CLIENT_GONE, "while its answer came")


def _stopped() -> Final:
    return Final(503, "stopped", "The gateway stopped this request.", 1.0)


CUTTING = ("isrtf", "windowed")
_POLL_INTERVAL_S = 1.0


class Relay:
    """Relays requests.

    Args:
        hub: Where they wait for their turn.
        fleet: The engines.
        forecaster: Who predicts their lengths.
        config: The gateway's.
        hinted: Adds to a body what an engine is told besides; None adds nothing.
        report: The length that a client fixed, of body, fields and longest output; 0 none.
    """

    def __init__(
        self,
        driver: SchedulerDriver,
        fleet: Fleet,
        forecaster: Forecaster,
        config: GatewayConfig,
        *,
        hinted: Callable[[Request, Worker, bytes], bytes] | None = None,
        report: Callable[[bytes, Callable[[], dict[str, Any]], int | None], int] | None = None,
    ) -> None:
        self.budget = Budget(config.resilience.retry_share)
        self.config = config
        self._hub, self._fleet, self._forecaster = driver, fleet, forecaster
        self._report = report or _empty
        self._ids = itertools.count(1)
        self._resumes, self._looked_s = False, float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = Surroundings(
            fleet,
            config,
            self.budget,
            hinted or _as_it_is,
            self._window,
            self._spawn,
            bool(getattr(forecaster, "reads_text", False)),
        )

    async def exchange(self, client_request: ClientRequest) -> Answer:
        """The answer, as soon as there is something to tell.

        Raises:
            Refused: The request is not let in, or waited in vain.
        """
        self.budget.request(caller_of(client_request))
        order = self.config.order
        what = plan(
            client_request, resumes=self._any_resumes(), window_tokens=order.window_tokens, cuts=order.mode in CUTTING
        )
        request = self._request(client_request, resumable=what.obstacle is None)
        request.length_prediction = await self._forecaster.first(request, client_request.text)
        ticket = await self._hub.enter(request)
        return await Reply(Journey(self._context, client_request, what, ticket)).answer()

    def configure(self, config: GatewayConfig) -> None:
        """Another configuration for requests from now on."""
        self.config = config
        self._context = replace(self._context, config=config)

    async def aclose(self) -> None:
        """Ends what runs beside."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _request(self, client_request: ClientRequest, *, resumable: bool) -> Request:
        most = self.config.limits.max_tokens
        return Request(
            id=next(self._ids),
            arrival_s=client_request.arrival_s,
            model=client_request.model,
            prompt_tokens=client_request.prompt_tokens,
            max_tokens=most if client_request.max_tokens is None else client_request.max_tokens,
            tenant=client_request.tenant,
            priority=client_request.priority,
            body_bytes=len(client_request.body),
            session=client_request.session,
            prefix=client_request.prefix,
            resumable=resumable,
            deadline_s=client_request.deadline_s,
            requested_tokens=self._report(client_request.body, client_request.fields, client_request.max_tokens),
            choices=client_request.n,
            buffered=not client_request.stream,
        )

    def _any_resumes(self) -> bool:
        """Whether any engine tells token ids; looked up once a second."""
        now_s = self._hub.clock()
        if now_s - self._looked_s > _POLL_INTERVAL_S:
            self._resumes = any(self._tells_ids(state.name) for state in self._fleet.states())
            self._looked_s = now_s if self._resumes else float("-inf")
        return self._resumes

    def _tells_ids(self, name: str) -> bool:
        try:
            able = self._fleet.worker(name).capabilities
        except KeyError:
            return False
        return able.ids_each and able.token_ids

    def _window(self, journey: Journey) -> None:
        if self.config.order.mode != "fcfs":
            self._spawn(self._reforecast(journey))

    async def _reforecast(self, journey: Journey) -> None:
        request = journey.ticket.request
        so_far = journey.received.text() if journey.received is not None else None
        length_prediction = await self._forecaster.retry(request, journey.client_request.text or None, so_far)
        if not journey.ticket.finished:
            self._hub.reforecast(request, length_prediction)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _empty(_body: bytes, _fields: Callable[[], dict[str, Any]], _most: int | None) -> int:
    return 0


def _as_it_is(_request: Request, _worker: Worker, body: bytes) -> bytes:
    return body
