"""Failures between a request and its response: their types, the retry budget, and which engine is at fault."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import TYPE_CHECKING

from lengthwise.gateway.request import Client, ClientRequest

if TYPE_CHECKING:
    from lengthwise.gateway.fleet import EngineWorker, Fleet

IN_STREAM_ERROR = "server error"  # reason of an error that the engine reports inside a stream
MALFORMED, STALLED = "malformed", "stalled"


class UpstreamError(Exception):
    """An attempt at an engine failed for ``reason`` ("no connection", "closed early", "stalled", "http 500", ...).

    ``status`` is the engine's, 0 without one; ``code`` is for the client where no other engine can help, else "".
    """

    def __init__(
        self, reason: str, detail: str = "", *, status: int = 0, engine_fault: bool = True, code: str = ""
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.status, self.engine_fault, self.code = reason, detail, status, engine_fault, code


def response_too_long(max_bytes: int, *, engine_fault: bool) -> UpstreamError:
    """Return the error for a buffered response longer than ``max_bytes``."""
    detail = f"the response has more than {max_bytes} bytes"
    return UpstreamError("answer too long", detail, engine_fault=engine_fault, code="answer_too_long")


class QueueFullError(Exception):
    """The engine accepts no requests now (503, 429), for ``retry_after_s`` if known; it did not fail."""

    def __init__(self, retry_after_s: float | None = None) -> None:
        super().__init__("the engine's queue is full")
        self.retry_after_s = retry_after_s


class AttemptInterruptedError(Exception):
    """The gateway stopped reading a response; the text is the cause.

    It is "preemption", "worker gone", "client gone" or "slow reader".
    """


MAX_RETRIES, MAX_CALLER_RETRIES = 10.0, 5.0  # most retries in a row, in total and of one caller
_ONE = 1.0 - 1e-9  # a sum of shares may round to just below 1
MAX_CALLERS = 4096
"""Callers below their full budget that are remembered; the one that spent longest ago is dropped first."""


def caller_of(client: Client) -> Hashable:
    """Return the key under which retries of a client are counted: tenant, else address, else session."""
    return client.tenant or client.address or client.session


class RetryBudget:
    """Token bucket for retries and repeated fail-overs: each request adds ``share``, a caller has half a bucket."""

    def __init__(self, share: float) -> None:
        self._share, self._left = share, MAX_RETRIES
        self._left_of: dict[Hashable, float] = {}
        self.used = self.refused = 0

    def deposit(self, caller: Hashable) -> None:
        """Add the share of one new request."""
        self._left = min(MAX_RETRIES, self._left + self._share)
        if caller in self._left_of:
            self._left_of[caller] += self._share
            if self._left_of[caller] >= MAX_CALLER_RETRIES:
                del self._left_of[caller]

    def take(self, caller: Hashable) -> bool:
        """Spend one retry of this caller; return False if there is none."""
        if min(self._left, self._left_of.get(caller, MAX_CALLER_RETRIES)) < _ONE:
            self.refused += 1
            return False
        self._left, self.used = self._left - 1, self.used + 1
        # Removed and added again: the dict is in order of last use.
        self._left_of[caller] = self._left_of.pop(caller, MAX_CALLER_RETRIES) - 1
        if len(self._left_of) > MAX_CALLERS:
            del self._left_of[next(iter(self._left_of))]
        return True

    def take_for(self, error: UpstreamError, caller: Hashable, *, failures: int, output_started: bool) -> bool:
        """Return whether a failed request may be retried: free once if its engine is gone, else from the budget."""
        gone = error.reason in ("no connection", "closed early") or (error.reason == STALLED and output_started)
        return (failures == 1 and error.engine_fault and gone) or self.take(caller)


class FailureAttribution:
    """Decides whether failures of one request are the fault of engines or of the request, and reports to the fleet.

    An engine that breaks off or stalls has failed. If an engine answers with an error, a peer gets the same request; if
    the peer answers with an error, too, neither is reported. Workers are compared by identity: a name may pass to a
    replacement.
    """

    def __init__(self, fleet: Fleet, client_request: ClientRequest) -> None:
        self._fleet, self._model, self._session = fleet, client_request.model, client_request.client.session
        self.worker: EngineWorker | None = None  # of the current attempt
        self._errors: dict[int, tuple[EngineWorker, bool]] = {}
        """Workers that answered with an error, by id; True: inside a stream."""
        self._suspect: EngineWorker | None = None  # worker whose 4xx is being checked at a peer
        self.caller = caller_of(client_request.client)

    def on_accepted(self) -> None:
        """Note a 200: a suspect that rejected the same request was wrong."""
        if name := self._current(self._suspect):
            self._fleet.record_outcome(name, self._model, wrong=True)
        self._suspect = None

    def on_error(self, error: UpstreamError) -> None:
        """Note a failure of the current worker."""
        if (worker := self.worker) is None or not self._current(worker):
            return
        if error.status or error.reason == IN_STREAM_ERROR:  # the engine reports it: the request may be at fault
            self._errors[id(worker)] = (worker, not error.status)
        else:
            self._fleet.record_broken_response(worker.name, error.reason)

    def on_first_output(self) -> None:
        """Note the first output of the current worker: workers that answered with an HTTP error are at fault."""
        if name := self._current(self.worker):
            self._fleet.record_first_output(name)
        if self._errors:
            self._report_errors(in_stream=False)

    def on_preempted(self) -> None:
        """Note that the current worker served the request up to its preemption."""
        if name := self._current(self.worker):
            self._fleet.succeeded(name, self._model)

    def on_finished(self) -> None:
        """Note that the worker served the request to its end; if one other alone failed inside a stream, it erred."""
        if sum(in_stream for _, in_stream in self._errors.values()) == 1:
            self._report_errors(in_stream=True)
        self._errors.clear()
        self.on_preempted()

    def is_request_fault(self) -> bool:
        """Return whether two or more workers answered with an HTTP error and no other one is available."""
        names = [worker.name for worker, in_stream in self._errors.values() if not in_stream]
        return len(names) >= 2 and not any(
            state.up and self._model in state.models and state.name not in names for state in self._fleet.states()
        )

    def should_check_rejection(self, budget: RetryBudget) -> bool:
        """Return whether a peer should get a rejected (4xx) request, as this engine rejects suspiciously many; once."""
        name = self._current(self.worker) if self._suspect is None else ""
        if not (name and self._fleet.suspects(name, self._model) and budget.take(self.caller)):
            return False
        self._suspect = self.worker
        return True

    def on_rejected(self) -> None:
        """Note that the request ends with a 4xx; a peer that got the request as well agrees with the suspect."""
        if self._suspect is not None:
            if name := self._current(self._suspect):
                self._fleet.record_outcome(name, self._model, wrong=False)
            self._suspect = None
        elif name := self._current(self.worker):
            self._fleet.record_rejection(name, self._model, self._session)

    def close(self) -> None:
        """End the request: the only worker with an error is reported, once per caller and time window."""
        workers = [worker for worker, _ in self._errors.values()]
        if len(workers) == 1 and (name := self._current(workers[0])):
            self._fleet.record_error_response(name, self.caller)
        self._errors.clear()

    def _report_errors(self, *, in_stream: bool) -> None:
        for key, (worker, inside) in list(self._errors.items()):
            if inside == in_stream:
                del self._errors[key]
                if worker is not self.worker and (name := self._current(worker)):
                    self._fleet.record_error_response(name, None)

    def _current(self, worker: EngineWorker | None) -> str:
        """Return the worker's name; "" if the fleet has another worker under it: a replaced one is not reported."""
        with contextlib.suppress(KeyError):
            if worker is not None and self._fleet.worker(worker.name) is worker:
                return worker.name
        return ""
