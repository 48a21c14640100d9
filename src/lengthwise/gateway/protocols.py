"""Interfaces between the parts of the gateway: listeners of requests, clock, requests, workers, forecaster."""
# ruff: noqa: D102 - the implementations document their methods

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from lengthwise.backend.openai_protocol import Abilities
from lengthwise.gateway.request import LengthPrediction, Outcome, PromptPrefix, Rejection, Request
from lengthwise.gateway.scheduling import Phase, WorkerState


class Listener:
    """Receives the events of every request; methods run on the event loop, must be quick, and never raise.

    All times are on the gateway's clock. A subclass overrides the methods that it needs.
    """

    def on_arrival(self, request: Request) -> None:
        """A request with its first prediction is admitted to the queue."""

    def refused(self, reason: str, rejection: Rejection, tenant: int, model: str) -> None:
        """A request is not admitted."""

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:
        """A request is dispatched to a worker (each time)."""

    def first_token(self, request: Request, now_s: float) -> None:
        """The first token's bytes arrive from the worker; not called for a response in a single chunk."""

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:
        """More tokens arrive; ``request.generated_tokens`` counts them already."""

    def returned(self, request: Request, cause: str, now_s: float) -> None:
        """A request is queued again with its tokens: cause "cut", "window", "failed_over" or "retried"."""

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        """A request ends: exactly once for each that arrived."""

    def phase(self, phase: Phase) -> None:
        """A phase of a worker is finished (mode rra)."""


class Listeners(Listener):
    """Passes events on to several listeners, in order."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._all: list[Listener] = []
        self._of_tokens: list[Listener] = []
        for one in listeners:
            self.add(one)

    def add(self, listener: Listener) -> None:
        """Add a listener."""
        self._all.append(listener)
        if type(listener).tokens is not Listener.tokens:  # the hot path calls only listeners that override it
            self._of_tokens.append(listener)

    def on_arrival(self, request: Request) -> None:
        for one in self._all:
            one.on_arrival(request)

    def refused(self, reason: str, rejection: Rejection, tenant: int, model: str) -> None:
        for one in self._all:
            one.refused(reason, rejection, tenant, model)

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:
        for one in self._all:
            one.dispatched(request, worker, now_s)

    def first_token(self, request: Request, now_s: float) -> None:
        for one in self._all:
            one.first_token(request, now_s)

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:
        for one in self._of_tokens:
            one.tokens(request, new_tokens, now_s)

    def returned(self, request: Request, cause: str, now_s: float) -> None:
        for one in self._all:
            one.returned(request, cause, now_s)

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        for one in self._all:
            one.finished(request, outcome, now_s, detail)

    def phase(self, phase: Phase) -> None:
        for one in self._all:
            one.phase(phase)


class Clock(Protocol):
    """A clock in seconds from an arbitrary start that never goes back."""

    def __call__(self) -> float: ...


monotonic: Clock = time.monotonic
"""The real clock; jumps of the wall clock do not move it."""


class ClientRequest(Protocol):
    """A request as the edge passes it on (``edge.ClientRequest``)."""

    api: str
    body: bytes
    model: str
    stream: bool
    text: str
    prompt_tokens: int
    max_tokens: int | None
    n: int
    tenant: int
    priority: int
    session: str
    prefix: PromptPrefix
    arrival_s: float
    deadline_s: float
    request_id: str
    headers: list[tuple[str, str]]
    address: str

    def release(self, *, text: bool, others_bytes: int) -> None: ...
    def fields(self) -> dict[str, Any]: ...


class Worker(Protocol):
    """An engine (``fleet.Worker``)."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def capabilities(self) -> Abilities: ...
    @property
    def session(self) -> Any: ...


class Fleet(Protocol):
    """The engines (``fleet.Fleet``)."""

    def worker(self, name: str) -> Worker: ...
    def failed(self, name: str, cause: str) -> None: ...
    def erred(self, name: str, caller: Hashable | None) -> None: ...
    def started(self, name: str) -> None: ...
    def succeeded(self, name: str, model: str) -> None: ...
    def rejected(self, name: str, model: str, session: str) -> None: ...
    def suspects(self, name: str, model: str) -> bool: ...
    def record_outcome(self, name: str, model: str, *, wrong: bool) -> None: ...
    def states(self) -> Sequence[WorkerState]: ...


class Forecaster(Protocol):
    """Predicts output lengths (``length_prediction.Forecaster``).

    ``retry`` gets the prompt's text as long as it is retained: throughout only where ``reads_text`` is set.
    """

    async def first(self, request: Request, text: str | None) -> LengthPrediction: ...
    async def retry(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction: ...
