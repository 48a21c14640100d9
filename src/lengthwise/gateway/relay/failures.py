"""Failures of attempts: exceptions, the retry budget, and the attribution of failures to engines or requests."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import TYPE_CHECKING

from lengthwise.gateway.apis import APIS
from lengthwise.gateway.request import Client, ClientRequest, Refusal

if TYPE_CHECKING:
    from lengthwise.gateway.fleet import EngineWorker, Fleet

IN_STREAM_ERROR = "server error"  # reason of an error that the engine reports inside a stream
MALFORMED, STALLED = "malformed", "stalled"


class UpstreamError(Exception):
    """An attempt at an engine failed for ``reason`` ("no connection", "closed early", "stalled", "http 500", ...).

    ``status`` is the engine's HTTP status, or 0 if there is none. ``code`` is the error code for the client if a retry
    at another engine is useless, otherwise "".
    """

    def __init__(
        self, reason: str, detail: str = "", *, status: int = 0, engine_fault: bool = True, code: str = ""
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.status, self.engine_fault, self.code = reason, detail, status, engine_fault, code


def response_too_long(max_bytes: int, *, engine_fault: bool) -> UpstreamError:
    """Return the error for a buffered response of more than ``max_bytes``."""
    detail = f"the response has more than {max_bytes} bytes"
    return UpstreamError("answer too long", detail, engine_fault=engine_fault, code="answer_too_long")


class QueueFullError(Exception):
    """The engine answers or streams 503 or 429, which is no failure. ``retry_after_s`` is 0 if it states none."""

    def __init__(self, status: int, detail: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"http {status}: {detail}")
        self.retry_after_s = retry_after_s
        # The answer to the client if the request is not queued again.
        self.refusal = Refusal(
            status, "overloaded", f"The engine is full, or refuses this request: {self}", retry_after_s or 1.0
        )


class AttemptInterruptedError(Exception):
    """The gateway stopped an attempt: "preemption", "worker gone", "stopped", "request ended" or "slow reader"."""


MAX_RETRIES, MAX_OWNER_RETRIES = 10.0, 5.0  # retries in a row, in total and of one owner
_ONE = 1.0 - 1e-9  # a sum of shares may be rounded to just below 1
MAX_OWNERS = 4096  # owners with used retries; beyond it, the owner whose last retry is the oldest gets all of them back


def request_owner(client: Client) -> Hashable:
    """Return the key by which retries and errors are counted, the first of tenant, address and session that is set."""
    return client.tenant or client.address or client.session


class RetryBudget:
    """Token buckets: MAX_RETRIES for all, MAX_OWNER_RETRIES for an owner. A request adds ``share`` to both."""

    def __init__(self, share: float) -> None:
        self.share, self._left = share, MAX_RETRIES
        self._left_of: dict[Hashable, float] = {}
        self.used = self.refused = 0

    def deposit(self, owner: Hashable) -> None:
        """Add the share of a new request."""
        self._left = min(MAX_RETRIES, self._left + self.share)
        if owner in self._left_of:
            self._left_of[owner] += self.share
            if self._left_of[owner] >= MAX_OWNER_RETRIES:
                del self._left_of[owner]

    def take(self, owner: Hashable) -> bool:
        """Take one retry for this owner. Return False if none is left."""
        if min(self._left, self._left_of.get(owner, MAX_OWNER_RETRIES)) < _ONE:
            self.refused += 1
            return False
        self._left, self.used = self._left - 1, self.used + 1
        # Removed and added again, so that the dict is in order of last use.
        self._left_of[owner] = self._left_of.pop(owner, MAX_OWNER_RETRIES) - 1
        if len(self._left_of) > MAX_OWNERS:
            del self._left_of[next(iter(self._left_of))]
        return True

    def take_for(self, error: UpstreamError, owner: Hashable, *, failures: int, output_started: bool) -> bool:
        """Take a retry for a failed request, and return whether it is allowed.

        The first retry of a request is free if its engine could not be reached, broke off, or stalled after the first
        output. Every other retry is taken from the budget.
        """
        gone = error.reason in ("no connection", "closed early") or (error.reason == STALLED and output_started)
        return (failures == 1 and error.engine_fault and gone) or self.take(owner)


class FailureAttribution:
    """Decides whether the failures of a request are the fault of engines or of the request, and reports to the fleet.

    An engine that breaks a response or stalls is at fault. If an engine answers with an error, a peer gets the same
    request. If the peer answers with an error as well, the request may be at fault, and neither engine is reported.
    Workers are compared by identity, because another worker may take over a name.
    """

    def __init__(self, fleet: Fleet, client_request: ClientRequest) -> None:
        self._fleet, self._model, self._session = fleet, client_request.model, client_request.client.session
        self.worker: EngineWorker | None = None  # of the current attempt
        # By id(worker): a worker that answered with an error, and whether inside a stream.
        self._errors: dict[int, tuple[EngineWorker, bool]] = {}
        self._suspect: EngineWorker | None = None  # worker whose 4xx a peer checks
        self.owner = request_owner(client_request.client)
        self._continues = APIS[client_request.api].continues

    def on_accepted(self) -> None:
        """Record that the worker accepted the request, so that a suspect that rejected it was wrong."""
        if name := self._current(self._suspect):
            self._fleet.record_rejection_check(name, self._model, wrong=True)
        self._suspect = None

    def on_error(self, error: UpstreamError) -> None:
        """Record a failure of the current worker."""
        if (worker := self.worker) is None or not self._current(worker):
            return
        if error.status or error.reason == IN_STREAM_ERROR:  # the engine reports it: the request may be at fault
            self._errors[id(worker)] = (worker, not error.status)
        else:
            self._fleet.record_broken_response(worker.name, error.reason)

    def on_first_output(self) -> None:
        """Record the first output of the current worker: others that answered with an HTTP error are at fault."""
        if name := self._current(self.worker):
            self._fleet.record_first_output(name)
        if self._errors:
            self._report_errors(in_stream=False)

    def on_preempted(self) -> None:
        """Record that the current worker served the request up to a preemption."""
        self._record_success()

    def on_finished(self) -> None:
        """Record that the worker finished. If exactly one other worker failed inside a stream, report that worker."""
        if sum(in_stream for _, in_stream in self._errors.values()) == 1:
            self._report_errors(in_stream=True)
        self._errors.clear()
        self._record_success()

    def is_request_fault(self) -> bool:
        """Return whether at least two workers answered with an HTTP error and no other worker is available."""
        names = [worker.name for worker, in_stream in self._errors.values() if not in_stream]
        return len(names) >= 2 and not any(
            state.up and self._model in state.models and state.name not in names for state in self._fleet.states()
        )

    def should_check_rejection(self, budget: RetryBudget) -> bool:
        """Return whether a peer should check the rejection of this worker. A request is checked at most once."""
        name = self._current(self.worker) if self._suspect is None else ""
        if not (name and self._fleet.is_suspect(name, self._model) and budget.take(self.owner)):
            return False
        self._suspect = self.worker
        return True

    def on_rejected(self, status: int) -> None:
        """Record that the request ends with a 4xx or 501. If a peer has rejected it as well, the suspect was right.

        An engine that lacks a route may serve all others.
        """
        if status in (404, 405, 501) and not self._continues:
            return
        if self._suspect is not None:
            if name := self._current(self._suspect):
                self._fleet.record_rejection_check(name, self._model, wrong=False)
            self._suspect = None
        elif name := self._current(self.worker):
            self._fleet.record_rejection(name, self._model, self._session)

    def close(self) -> None:
        """End the request. If only one worker answered with an error, report it, once per owner and time window."""
        workers = [worker for worker, _ in self._errors.values()]
        if len(workers) == 1 and (name := self._current(workers[0])):
            self._fleet.record_error_response(name, self.owner)
        self._errors.clear()

    def _record_success(self) -> None:
        if name := self._current(self.worker):
            self._fleet.succeeded(name, self._model)

    def _report_errors(self, *, in_stream: bool) -> None:
        for key, (worker, inside) in list(self._errors.items()):
            if inside == in_stream:
                del self._errors[key]
                if worker is not self.worker and (name := self._current(worker)):
                    self._fleet.record_error_response(name, None)

    def _current(self, worker: EngineWorker | None) -> str:
        """Return the worker's name, or "" if another worker has this name by now."""
        with contextlib.suppress(KeyError):
            if worker is not None and self._fleet.worker(worker.name) is worker:
                return worker.name
        return ""
