"""What a client gets of a journey, whatever happens on the way."""

from __future__ import annotations

import asyncio

from lengthwise.gateway.hub import Over
from lengthwise.gateway.relay._answer import EVENTS, Answer, Outlet, error_event, failed, whole
from lengthwise.gateway.relay._assembled import Assembled
from lengthwise.gateway.relay._journey import Journey
from lengthwise.gateway.relay._plain import Whole
from lengthwise.gateway.relay._sending import Rejected
from lengthwise.gateway.relay._trouble import Final
from lengthwise.gateway.request import Outcome


class Reply:
    """Makes an answer of a journey's pieces, and an error of what ends it.

    Args:
        journey: Whose pieces.
    """

    def __init__(self, journey: Journey) -> None:
        self._journey, self._gone = journey, False

    async def answer(self) -> Answer:
        """The answer, as soon as there is something to tell."""
        journey = self._journey
        try:
            first = await journey.piece()
        except Rejected as no:
            journey.blame.rejected()
            return self._rejected(no)
        except Final as final:
            if journey.no is not None:  # nobody else could be asked
                return self._rejected(journey.no)
            journey.end(Outcome.FAILED, str(final))
            return failed(final)
        except Over:
            journey.end(Outcome.FAILED, "it was ended")
            return failed(_stopped())
        except BaseException as error:
            gone = isinstance(error, asyncio.CancelledError)
            journey.end(Outcome.CLIENT_GONE if gone else Outcome.FAILED, "before its answer began")
            raise
        if not isinstance(journey.state, Whole | Assembled):
            return Answer(200, EVENTS, first or b"", self._following, self._close, self._pass_to)
        kind = journey.kind if isinstance(journey.state, Whole) else "application/json"
        return whole(200, first or b"", kind or "application/json")

    async def _following(self) -> bytes | None:
        """The next piece, an error in place of one that does not come; None at the end."""
        try:
            return await self._journey.piece()
        except Over:
            final = _stopped()
        except Rejected as no:
            final = Final(502, "engine_failed", f"the engine refused to go on: {no}")
        except Final as told:
            final = told
        self._journey.end(Outcome.FAILED, str(final))
        return None if self._gone else error_event(final)

    def _pass_to(self, outlet: Outlet) -> None:
        self._journey.outlet = outlet

    def _rejected(self, no: Rejected) -> Answer:
        self._journey.end(Outcome.REJECTED, str(no))
        return whole(no.status, no.body, no.kind)

    def _close(self) -> None:
        """The client takes no more."""
        self._gone = True
        self._journey.end(Outcome.CLIENT_GONE, "while its answer came")


def _stopped() -> Final:
    return Final(503, "stopped", "The gateway stopped this request.", 1.0)
