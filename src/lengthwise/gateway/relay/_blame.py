"""Whose fault it is that an engine says no: its own, or the request's."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.gateway.relay._budget import Budget, caller_of
from lengthwise.gateway.relay._seams import Asked, Fleet, Worker
from lengthwise.gateway.relay._trouble import Trouble


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
        asked: The request.

    Attributes:
        caller: Who asks.
    """

    def __init__(self, fleet: Fleet, asked: Asked) -> None:
        self._fleet, self._asked = fleet, asked
        self._at: Worker | None = None
        self._erred: dict[int, _No] = {}
        self._doubted: Worker | None = None
        self.caller = caller_of(asked)

    def sent(self, worker: Worker) -> None:
        """It goes there now."""
        self._at = worker

    def served(self) -> None:
        """The engine takes it (200): a peer that called it wrong was wrong itself."""
        if self._doubted is not None and self._is_there(self._doubted):
            self._fleet.judged(self._doubted.name, self._asked.model, wrong=True)
        self._doubted = None

    def failed(self, trouble: Trouble) -> None:
        """The engine failed it."""
        worker = self._at
        if worker is None or not self._is_there(worker):
            return
        if trouble.is_told:
            self._erred[id(worker)] = _No(worker, not trouble.status)  # names pass on
        else:
            self._fleet.failed(worker.name, trouble.reason)

    def began(self) -> None:
        """The first of the engine's output came: whoever said no by an HTTP status is to blame."""
        if self._at is not None and self._is_there(self._at):
            self._fleet.began(self._at.name)
        if self._erred:
            self._to_blame([no for no in self._erred.values() if not no.inside])

    def answered(self) -> None:
        """The engine answered to where it was cut."""
        if self._at is not None and self._is_there(self._at):
            self._fleet.answered(self._at.name, self._asked.model)

    def completed(self) -> None:
        """The engine answered to the end: whoever said no is to blame; of several within streams the request may be."""
        inside = [no for no in self._erred.values() if no.inside]
        if len(inside) == 1:
            self._to_blame(inside)
        self._erred.clear()
        self.answered()

    def is_the_requests(self) -> bool:
        """Whether two engines or more answered with an HTTP error, and nobody else is there to be asked."""
        said = [no.worker.name for no in self._erred.values() if not no.inside]
        if len(said) < 2:
            return False
        model = self._asked.model
        return not any(
            one.up and model in one.models and one.name not in said for one in self._fleet.states()
        )

    def doubts(self, budget: Budget) -> bool:
        """Whether a peer is to be asked, since the engine calls so many requests wrong (4xx); at most once."""
        worker = self._at
        if worker is None or self._doubted is not None or not self._is_there(worker):
            return False
        if not self._fleet.suspects(worker.name, self._asked.model) or not budget.take(self.caller):
            return False
        self._doubted = worker
        return True

    def rejected(self) -> None:
        """The engine called it wrong (4xx), and so it ends; a peer that was asked as well agrees."""
        if self._doubted is not None:
            if self._is_there(self._doubted):
                self._fleet.judged(self._doubted.name, self._asked.model, wrong=False)
            self._doubted = None
        elif self._at is not None and self._is_there(self._at):
            self._fleet.rejected(self._at.name, self._asked.model, self._asked.session)

    def over(self) -> None:
        """No engine is asked any more; who alone said no counts once for its caller."""
        if len(self._erred) == 1:
            (no,) = self._erred.values()
            if self._is_there(no.worker):
                self._fleet.erred(no.worker.name, self.caller)
        self._erred.clear()

    def _to_blame(self, said: list[_No]) -> None:
        for no in said:
            if no.worker is not self._at and self._is_there(no.worker):
                self._fleet.erred(no.worker.name, None)
        self._erred = {one: no for one, no in self._erred.items() if not any(no is other for other in said)}

    def _is_there(self, worker: Worker) -> bool:
        """Whether it is still the engine of its name: one that was replaced says nothing of the next."""
        try:
            return self._fleet.worker(worker.name) is worker
        except KeyError:
            return False
