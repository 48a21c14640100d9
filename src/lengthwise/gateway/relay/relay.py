"""Relays requests from the edge to the engines and their responses back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.length_prediction import requested_tokens
from lengthwise.gateway.relay.engine_request import SchedulingHints, plan
from lengthwise.gateway.relay.failures import RetryBudget, caller_of
from lengthwise.gateway.relay.request_session import Answer, RequestSession
from lengthwise.gateway.request import ClientRequest, Request
from lengthwise.gateway.scheduler_driver import SchedulerDriver

if TYPE_CHECKING:
    from lengthwise.gateway.fleet import Fleet
    from lengthwise.gateway.length_prediction import Forecaster

PREEMPTIVE_MODES = ("isrtf", "windowed")
_POLL_INTERVAL_S = 1.0


class Relay:
    """Sends requests to engines in the order of the scheduler."""

    def __init__(self, driver: SchedulerDriver, fleet: Fleet, forecaster: Forecaster, config: GatewayConfig) -> None:
        self.budget = RetryBudget(config.resilience.retry_share)
        self.config = config
        self.fleet, self._driver, self._forecaster = fleet, driver, forecaster
        self.add_hints = SchedulingHints(config, driver.scheduler.engine_priority).add_to
        self.track_text = bool(getattr(forecaster, "reads_text", False))  # whether a predictor reads generated text
        self._ids = itertools.count(1)
        self._resumes, self._polled_s = False, float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()

    async def exchange(self, client_request: ClientRequest) -> Answer:
        """Return the answer once its first chunk is known; raise RequestRefusedError if not admitted or expired."""
        self.budget.deposit(caller_of(client_request))
        order, prompt = self.config.order, client_request.prompt
        max_tokens, preempts = client_request.max_tokens, order.mode in PREEMPTIVE_MODES
        resumption = plan(client_request, self._any_resumes(), window_tokens=order.window_tokens, preempts=preempts)
        request = Request(
            id=next(self._ids),
            arrival_s=client_request.arrival_s,
            model=client_request.model,
            prompt_tokens=prompt.tokens,
            max_tokens=self.config.limits.max_tokens if max_tokens is None else max_tokens,
            tenant=client_request.tenant,
            priority=client_request.priority,
            body_bytes=len(client_request.body),
            session=client_request.session,
            prefix=prompt.prefix,
            resumable=resumption.conflict is None,
            deadline_s=client_request.deadline_s,
            requested_tokens=requested_tokens(client_request.body, client_request.fields, max_tokens),
            choices=client_request.n,
            buffered=not client_request.stream,
        )
        request.length_prediction = await self._forecaster.first(request, client_request.prompt.text)
        ticket = await self._driver.enter(request)
        return await RequestSession(self, client_request, resumption, ticket).respond()

    def configure(self, config: GatewayConfig) -> None:
        """Use another configuration for later requests."""
        self.config = config

    async def aclose(self) -> None:
        """Cancel background tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _any_resumes(self) -> bool:
        """Return whether any engine returns token ids; looked up at most once a second once one does."""
        now_s = self._driver.clock()
        if now_s - self._polled_s > _POLL_INTERVAL_S:
            self._resumes = False
            for state in self.fleet.states():
                with contextlib.suppress(KeyError):  # the worker left since the states were taken
                    capabilities = self.fleet.worker(state.name).capabilities
                    self._resumes |= capabilities.ids_each and capabilities.token_ids
            self._polled_s = now_s if self._resumes else float("-inf")
        return self._resumes

    async def predict_again(self, session: RequestSession) -> None:
        """Apply a new prediction of a request whose output has passed a window of tokens."""
        request = session.ticket.request
        text = session.text.text() if session.text is not None else None
        prediction = await self._forecaster.retry(request, session.client_request.prompt.text or None, text)
        if not session.ticket.finished:
            self._driver.reforecast(request.id, prediction)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
