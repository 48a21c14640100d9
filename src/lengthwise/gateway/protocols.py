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
    """Return a method of ``Listeners`` that calls the method ``name`` of every listener that overrides it, in order."""

    def call(self: Listeners, *arguments: Any) -> None:
        for method in self._methods[name]:
            method(*arguments)

    return call


_EVENTS = ("on_admission", "refused", "dispatched", "first_token", "tokens", "requeued", "on_end", "phase")


class Listeners(Listener):
    """Passes events on to several listeners, in order."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._methods: dict[str, list[Callable[..., None]]] = {name: [] for name in _EVENTS}
        for one in listeners:
            self.add(one)

    def add(self, listener: Listener) -> None:
        """Add a listener. Only the methods that it has beyond those of ``Listener`` are called."""
        for name, methods in self._methods.items():
            if getattr(type(listener), name, None) is not getattr(Listener, name):
                methods.append(getattr(listener, name))

    on_admission, refused, dispatched, first_token, tokens, requeued, on_end, phase = map(_to_all, _EVENTS)


Clock = Callable[[], float]  # a clock in seconds from an arbitrary start that never goes back
monotonic: Clock = time.monotonic  # the real clock; jumps of the wall clock do not move it


class ChunkWriter(Protocol):
    """A client's connection, to which the relay writes chunks directly while ``can_write`` returns True."""

    def can_write(self) -> bool: ...
    def write_chunk(self, chunk: bytes) -> None: ...
