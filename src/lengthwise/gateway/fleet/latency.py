"""How long each engine takes to its first token, heard from the requests themselves."""

from __future__ import annotations

from collections.abc import Callable

from lengthwise.gateway.listener import Listener
from lengthwise.gateway.request import Request


class FirstTokens(Listener):
    """Tells of every first token which engine it came from and how long after the request was sent there.

    Args:
        tell: Called with the engine's name and the seconds.
    """

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        self._tell = tell

    def first_token(self, request: Request, now_s: float) -> None:
        """A request that moved on counts where it began to speak."""
        if request.worker and request.dispatched_s <= now_s:
            self._tell(request.worker, now_s - request.dispatched_s)
