"""A request's place: it waits for a worker, has one, gives it back, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from lengthwise.gateway.request import Outcome, Refusal, Request

if TYPE_CHECKING:
    from lengthwise.gateway.hub import Hub

CUT, GONE = "cut", "worker gone"


class Refused(Exception):  # noqa: N818 - what happened, not an error of ours
    """A request is not served.

    Attributes:
        refusal: Status, reason, what to tell.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Over(Exception):  # noqa: N818
    """The request ended while somebody waited for its turn."""


class Turn:
    """A request that is in: it waits, or is at ``worker``, or is over.

    Attributes:
        request: Whose.
        worker: Where it may run; "" while it waits.
        cut: Set when the scheduler wants the worker's place back: abort, then ``again``.
        on_interrupt: Called with CUT or GONE when the worker's place is to be given back at once.
        kept: Whether it was said that it cannot be cut where it is.
    """

    __slots__ = ("_future", "_hub", "_over", "cut", "kept", "on_interrupt", "request", "worker")

    def __init__(self, hub: Hub, request: Request) -> None:
        self._hub, self.request, self.worker = hub, request, ""
        self.cut = asyncio.Event()
        self.on_interrupt: Callable[[str], None] | None = None
        self._future: asyncio.Future[str] | None = None
        self._over = self.kept = False

    async def placed(self) -> None:
        """Returns once a worker is assigned; raises Refused or Over."""
        self.worker = ""
        self.cut.clear()
        self.kept = False
        self._future = asyncio.get_running_loop().create_future()
        self._hub.wake()
        try:
            await self._future
        except asyncio.CancelledError:
            self.end(Outcome.CLIENT_GONE, "while it waited")
            raise
        finally:
            if self._future.done() and not self._future.cancelled():
                self._future.exception()  # seen, should the task have been cancelled meanwhile
            self._future = None

    def first_token(self) -> None:
        """The first token's bytes came; nobody knows when of an answer that comes at once."""
        self._hub.listeners.first_token(self.request, self._hub.clock())

    def tokens(self, total_generated: int) -> None:
        """So many tokens have come in all; fewer than before say nothing (a run that began again)."""
        if not self._over and total_generated > self.request.generated_tokens:
            self._hub.progressed(self.request, total_generated)

    def uncuttable(self) -> None:
        """It cannot be cut where it is now; at another worker it may be."""
        if self.kept or self._over:
            return
        self.kept = True
        if self.request.resumable:
            self.cut.clear()
            self._hub.uncuttable(self.request)

    async def again(self, why: str, *, avoid: str = "", generated: int | None = None) -> Turn:
        """This turn at another worker (or the same), once it has come again.

        Args:
            why: "cut", "window", "failed_over" or "retried".
            avoid: A worker that failed it.
            generated: Tokens that it keeps; None: all that were told.

        Raises:
            Refused: It waited in vain.
            Over: It was ended meanwhile.
        """
        if self._over:
            raise Over
        kept = self.request.generated_tokens if generated is None else generated
        self._hub.returned(self.request, why, kept, avoid)
        await self.placed()
        return self

    async def full(self, hold_s: float = 0.0) -> Turn:
        """This turn again, after the engine said that its queue is full, for so long: no failure, nothing was lost."""
        if self._over:
            raise Over
        self._hub.full(self.request, self.place, hold_s)
        await self.placed()
        return self

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """It is over, in whatever state; the first call counts."""
        if self._over:
            return
        self._over = True
        self._hub.left(self.request, outcome, detail)
        if self._future is not None and not self._future.done():
            self._future.set_exception(Over())

    @property
    def place(self) -> str:
        """Where it may run, by the name that the worker has now; "" while it waits."""
        return self.worker and (self.request.worker or self.worker)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over

    # What the hub tells:

    def assigned(self, worker: str) -> None:
        """It may go there."""
        if self._future is not None and not self._future.done():
            self.worker = worker
            self._future.set_result(worker)

    def expired(self, refusal: Refusal) -> None:
        """It waited in vain."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(Refused(refusal))
        self.end(Outcome.EXPIRED, refusal.reason)

    def stopped(self, refusal: Refusal) -> None:
        """The gateway ends: who waits is told so."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(Refused(refusal))
        self.end(Outcome.FAILED, "the gateway stopped")

    def interrupt(self, why: str) -> None:
        """Its place is wanted back, or its worker is gone."""
        if self.worker:
            self.cut.set()
            if self.on_interrupt is not None:
                self.on_interrupt(why)
