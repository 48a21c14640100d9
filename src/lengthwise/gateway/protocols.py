"""Who is told what happens to requests: telemetry, the journal, the learner, the admin page."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from lengthwise.backend.openai_protocol import Abilities
from lengthwise.gateway.request import LengthPrediction, Outcome, PromptPrefix, Rejection, Request
from lengthwise.gateway.scheduling import Phase, WorkerState


class Listener:
    """Hears of every request; each method is called on the event loop and must be quick and never raise.

    All times are of the gateway's clock. A subclass overrides what it wants to hear.
    """

    def on_arrival(self, request: Request) -> None:
        """Admitted to the queue, its first forecast made."""

    def refused(self, reason: str, rejection: Rejection, tenant: int, model: str) -> None:
        """Not let in."""

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:
        """Sent to a worker (each time)."""

    def first_token(self, request: Request, now_s: float) -> None:
        """The first token's bytes came from the worker; not told of an answer that comes at once (``at_once``)."""

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:
        """More tokens came; ``request.generated_tokens`` counts them already."""

    def returned(self, request: Request, cause: str, now_s: float) -> None:
        """Back in the queue with its tokens: why = "cut", "window", "failed_over" or "retried"."""

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        """It is over; exactly once for every one that arrived."""

    def phase(self, phase: Phase) -> None:
        """A phase of a worker is over (mode rra)."""


class Listeners(Listener):
    """Several as one, told in order."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._all: list[Listener] = []
        self._of_tokens: list[Listener] = []
        for one in listeners:
            self.add(one)

    def add(self, listener: Listener) -> None:
        """One more."""
        self._all.append(listener)
        if type(listener).tokens is not Listener.tokens:
            self._of_tokens.append(listener)

    def on_arrival(self, request: Request) -> None:  # noqa: D102 - as above
        for one in self._all:
            one.on_arrival(request)

    def refused(self, reason: str, rejection: Rejection, tenant: int, model: str) -> None:  # noqa: D102
        for one in self._all:
            one.refused(reason, rejection, tenant, model)

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        for one in self._all:
            one.dispatched(request, worker, now_s)

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        for one in self._all:
            one.first_token(request, now_s)

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:  # noqa: D102
        for one in self._of_tokens:
            one.tokens(request, new_tokens, now_s)

    def returned(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        for one in self._all:
            one.returned(request, cause, now_s)

    def finished(  # noqa: D102
        self, request: Request, outcome: Outcome, now_s: float, detail: str = ""
    ) -> None:
        for one in self._all:
            one.finished(request, outcome, now_s, detail)

    def phase(self, phase: Phase) -> None:  # noqa: D102
        for one in self._all:
            one.phase(phase)


class Clock(Protocol):
    """Seconds that never go back."""

    def __call__(self) -> float:
        """Now, in seconds from an arbitrary start."""
        ...


monotonic: Clock = time.monotonic
"""A real one. A jump of the wall clock does not move it."""


class ClientRequest(Protocol):
    """A request as the edge hands it on (``edge.Asked``)."""

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

    def release(self, *, text: bool, others_bytes: int) -> None:
        """Forgets its body."""
        ...

    def fields(self) -> dict[str, Any]:
        """The whole body."""
        ...


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
    """Who predicts lengths (``forecast.Forecaster``).

    ``retry`` is told the prompt as long as it is kept: throughout only where ``reads_text`` says so.
    """

    async def first(self, request: Request, text: str | None) -> LengthPrediction: ...
    async def retry(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction: ...
