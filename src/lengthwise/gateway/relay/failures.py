"""What can come between a request and its answer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from lengthwise.gateway.protocols import ClientRequest, Fleet, Worker

TOLD_INSIDE = "server error"
"""The reason of what an engine tells of itself within a stream."""
MALFORMED = "malformed"
"""The reason of what is no JSON, or no HTTP."""
_OFF, STALLED = ("no connection", "closed early"), "stalled"


class Trouble(Exception):  # noqa: N818
    """An engine failed a request.

    Attributes:
        reason: A few words that repeat: "no connection", "closed early", "stalled", "http 500", ...
        detail: What it said.
        status: Its HTTP status, 0 where there is none.
        engine: Whether it is the engine's failure (and not, say, of the request).
        code: What the client is told where asking another engine would be of no use, "" where it may be.
    """

    def __init__(self, reason: str, detail: str = "", *, status: int = 0, engine: bool = True, code: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.status, self.engine, self.code = reason, detail, status, engine, code

    @property
    def is_told(self) -> bool:
        """Whether the engine itself says so, by an HTTP status or within its stream: the request may be at fault."""
        return bool(self.status) or self.reason == TOLD_INSIDE

    def breaks_all(self, *, spoke: bool) -> bool:
        """Whether whatever else the engine has under way breaks with it: it is gone, or silent after it had spoken."""
        return self.engine and (self.reason in _OFF or (self.reason == STALLED and spoke))


def too_long(max_bytes: int, *, engine: bool) -> Trouble:
    """An answer that has to be held, and is longer than what is held of one."""
    detail = f"its answer has more than {max_bytes} bytes"
    return Trouble("answer too long", detail, engine=engine, code="answer_too_long")


class Full(Exception):  # noqa: N818
    """The engine takes no more now (503, 429): it did not fail.

    Attributes:
        retry_after_s: When it wants to be asked again, if it told.
    """

    def __init__(self, retry_after_s: float | None = None) -> None:
        super().__init__("the engine's queue is full")
        self.retry_after_s = retry_after_s


class Interrupted(Exception):  # noqa: N818
    """We stopped reading.

    Attributes:
        cause: "cut", "worker gone", "client gone" or "slow reader".
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Final(Exception):  # noqa: N818
    """There will be no (further) answer.

    Attributes:
        status: To be told where nothing has been sent yet.
        reason: One word for programs.
        message: For people.
        retry_after_s: When to come again.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_after_s = status, reason, message, retry_after_s


AT_ONCE, OF_ONE = 10.0, 5.0
_ONE = 1.0 - 1e-9  # sums of shares round
CALLERS = 4096
"""Those are remembered who spent something last."""


def caller_of(client_request: ClientRequest) -> Hashable:
    """Who asks: a tenant, else an address, else a session."""
    return client_request.tenant or client_request.address or client_request.session


class Budget:
    """Retries and further fail-overs: a share of requests, ``AT_ONCE`` together, ``OF_ONE`` of one caller.

    Without it every failure of an overloaded fleet would add to the load. A caller has as large a share of its own
    requests: one whose requests always fail leaves the others half of what there is.

    An engine that dies breaks all that it has in one moment. What it had is a bound, so the first fail-over of each
    of them is free; a request that has failed before may be what kills engines, and has to be paid for.
    """

    def __init__(self, share: float) -> None:
        self._share, self._left = share, AT_ONCE
        self._spenders: dict[Hashable, float] = {}
        self.used = self.refused = 0

    def request(self, caller: Hashable) -> None:
        """One more request came."""
        self._left = min(AT_ONCE, self._left + self._share)
        if caller in self._spenders:
            left = self._spenders[caller] + self._share
            if left < OF_ONE:
                self._spenders[caller] = left
            else:
                del self._spenders[caller]

    def take(self, caller: Hashable) -> bool:
        """Whether one more may be tried for this caller."""
        left = self._spenders.get(caller, OF_ONE)
        if min(self._left, left) < _ONE:
            self.refused += 1
            return False
        self._left -= 1
        self._note(caller, left - 1)
        self.used += 1
        return True

    def retry(self, trouble: Trouble, caller: Hashable, *, failures: int, spoke: bool) -> bool:
        """Whether a request goes on elsewhere.

        Args:
            trouble: What came between.
            caller: Whose request.
            failures: Engines that failed it, this one with them.
            spoke: Whether this one had begun to answer.
        """
        return (failures == 1 and trouble.breaks_all(spoke=spoke)) or self.take(caller)

    def _note(self, caller: Hashable, left: float) -> None:
        """It has so much left; who spent longest ago is forgotten first."""
        self._spenders.pop(caller, None)
        self._spenders[caller] = left
        if len(self._spenders) > CALLERS:
            del self._spenders[next(iter(self._spenders))]


@dataclass(frozen=True, slots=True)
class _No:
    """Who said no, and whether within a stream: then more of the output says nothing of who is right."""

    worker: Worker
    inside: bool


class Blame:
    """What the fleet is told of the engines that one request was sent to.

    An engine that breaks off, or is silent, has failed. One that answers with an error (an HTTP status, or an event
    within its stream) may be right: that is known once a peer was sent the same request. Where the peer serves it (of
    an error within a stream: to its end), the engine is to blame; where the peer says no as well, the request is, and
    nobody is told of it.

    Args:
        fleet: Of the engines.
        client_request: The request.

    Attributes:
        caller: Who asks.
    """

    def __init__(self, fleet: Fleet, client_request: ClientRequest) -> None:
        self._fleet, self._client_request = fleet, client_request
        self._at: Worker | None = None
        self._erred: dict[int, _No] = {}
        self._failed_worker: Worker | None = None
        self.caller = caller_of(client_request)

    def sent(self, worker: Worker) -> None:
        """It goes there now."""
        self._at = worker

    def served(self) -> None:
        """The engine takes it (200): a peer that called it wrong was wrong itself."""
        if self._failed_worker is not None and self._is_there(self._failed_worker):
            self._fleet.record_outcome(self._failed_worker.name, self._client_request.model, wrong=True)
        self._failed_worker = None

    def failed(self, trouble: Trouble) -> None:
        """The engine failed it."""
        worker = self._at
        if worker is None or not self._is_there(worker):
            return
        if trouble.is_told:
            self._erred[id(worker)] = _No(worker, not trouble.status)  # names pass on
        else:
            self._fleet.failed(worker.name, trouble.reason)

    def started(self) -> None:
        """The first of the engine's output came: whoever said no by an HTTP status is to blame."""
        if self._at is not None and self._is_there(self._at):
            self._fleet.started(self._at.name)
        if self._erred:
            self._to_blame([no for no in self._erred.values() if not no.inside])

    def succeeded(self) -> None:
        """The engine answered to where it was cut."""
        if self._at is not None and self._is_there(self._at):
            self._fleet.succeeded(self._at.name, self._client_request.model)

    def completed(self) -> None:
        """The engine answered to the end: whoever said no is to blame; of several within streams the request may be."""
        inside = [no for no in self._erred.values() if no.inside]
        if len(inside) == 1:
            self._to_blame(inside)
        self._erred.clear()
        self.succeeded()

    def is_the_requests(self) -> bool:
        """Whether two engines or more answered with an HTTP error, and nobody else is there to be asked."""
        said = [no.worker.name for no in self._erred.values() if not no.inside]
        if len(said) < 2:
            return False
        model = self._client_request.model
        return not any(one.up and model in one.models and one.name not in said for one in self._fleet.states())

    def warnings(self, budget: Budget) -> bool:
        """Whether a peer is to be asked, since the engine calls so many requests wrong (4xx); at most once."""
        worker = self._at
        if worker is None or self._failed_worker is not None or not self._is_there(worker):
            return False
        if not self._fleet.suspects(worker.name, self._client_request.model) or not budget.take(self.caller):
            return False
        self._failed_worker = worker
        return True

    def rejected(self) -> None:
        """The engine called it wrong (4xx), and so it ends; a peer that was asked as well agrees."""
        if self._failed_worker is not None:
            if self._is_there(self._failed_worker):
                self._fleet.record_outcome(self._failed_worker.name, self._client_request.model, wrong=False)
            self._failed_worker = None
        elif self._at is not None and self._is_there(self._at):
            self._fleet.rejected(self._at.name, self._client_request.model, self._client_request.session)

    def over(self) -> None:
        """No engine is asked any more; who alone said no counts once for its caller."""
        if len(self._erred) == 1:
            (no,) = self._erred.values()
            if self._is_there(no.worker):
                self._fleet.erred(no.worker.name, self.caller)
        self._erred.clear()

    def _to_blame(self, message: list[_No]) -> None:
        for no in message:
            if no.worker is not self._at and self._is_there(no.worker):
                self._fleet.erred(no.worker.name, None)
        self._erred = {one: no for one, no in self._erred.items() if not any(no is other for other in message)}

    def _is_there(self, worker: Worker) -> bool:
        """Whether it is still the engine of its name: one that was replaced says nothing of the next."""
        try:
            return self._fleet.worker(worker.name) is worker
        except KeyError:
            return False
