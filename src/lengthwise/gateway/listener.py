"""Who is told what happens to requests: telemetry, the journal, the learner, the admin page."""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.gateway.decisions import Phase
from lengthwise.gateway.request import Outcome, Refusal, Request


class Listener:
    """Hears of every request; each method is called on the event loop and must be quick and never raise.

    All times are of the gateway's clock. A subclass overrides what it wants to hear.
    """

    def arrived(self, request: Request) -> None:
        """Admitted to the queue, its first forecast made."""

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:
        """Not let in."""

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:
        """Sent to a worker (each time)."""

    def first_token(self, request: Request, now_s: float) -> None:
        """The first token's bytes came from the worker; not told of an answer that comes at once (``at_once``)."""

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:
        """More tokens came; ``request.generated_tokens`` counts them already."""

    def returned(self, request: Request, why: str, now_s: float) -> None:
        """Back in the queue with its tokens: why = "cut", "window", "failed_over" or "retried"."""

    def ended(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
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

    def arrived(self, request: Request) -> None:  # noqa: D102 - as above
        for one in self._all:
            one.arrived(request)

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:  # noqa: D102
        for one in self._all:
            one.refused(reason, refusal, tenant, model)

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        for one in self._all:
            one.dispatched(request, worker, now_s)

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        for one in self._all:
            one.first_token(request, now_s)

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:  # noqa: D102
        for one in self._of_tokens:
            one.tokens(request, new_tokens, now_s)

    def returned(self, request: Request, why: str, now_s: float) -> None:  # noqa: D102
        for one in self._all:
            one.returned(request, why, now_s)

    def ended(  # noqa: D102
        self, request: Request, outcome: Outcome, now_s: float, detail: str = ""
    ) -> None:
        for one in self._all:
            one.ended(request, outcome, now_s, detail)

    def phase(self, phase: Phase) -> None:  # noqa: D102
        for one in self._all:
            one.phase(phase)
