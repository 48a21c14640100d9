"""Interfaces between the gateway's packages: listeners to requests, the clock, and a client's connection."""
# ruff: noqa: D102 - the implementations document their methods

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lengthwise.gateway.request import Outcome, Refusal, Request
from lengthwise.gateway.scheduling import Phase


class Listener:
    """Receives the events of all requests. Its methods run on the event loop, must return soon, and must not raise."""

    def on_admission(self, request: Request) -> None:
        """A request is admitted to the queue, with its first prediction."""

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:
        """A request is refused before its admission. ``tenant`` is UNAUTHENTICATED if no key was accepted."""

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:
        """A request is dispatched to a worker, for the first time or again."""

    def first_token(self, request: Request, now_s: float) -> None:
        """The first token arrives from the worker. Not called for a response in a single chunk."""

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:
        """Tokens arrive: ``new_tokens`` more, which ``request.generated_tokens`` already includes."""

    def requeued(self, request: Request, cause: str, now_s: float) -> None:
        """A request returns to the queue with its tokens. Causes: "preemption", "window", "failed_over", "retried"."""

    def on_end(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        """An admitted request ends, exactly once, with any outcome."""

    def phase(self, phase: Phase) -> None:
        """A phase of a worker has ended (mode rra)."""


def _to_all(name: str) -> Any:
    """Return a method of ``Listeners`` that calls the method ``name`` of every listener, in order."""

    def call(self: Listeners, *arguments: Any) -> None:
        for one in self._all:
            getattr(one, name)(*arguments)

    return call


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

    on_admission, refused, dispatched = _to_all("on_admission"), _to_all("refused"), _to_all("dispatched")
    first_token, requeued, on_end = _to_all("first_token"), _to_all("requeued"), _to_all("on_end")
    phase = _to_all("phase")

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:
        for one in self._of_tokens:
            one.tokens(request, new_tokens, now_s)


Clock = Callable[[], float]  # a clock in seconds from an arbitrary start that never goes back
monotonic: Clock = time.monotonic  # the real clock; jumps of the wall clock do not move it


class ChunkWriter(Protocol):
    """A client's connection, to which the relay writes chunks directly while ``can_write`` returns True."""

    def can_write(self) -> bool: ...
    def write_chunk(self, chunk: bytes) -> None: ...
