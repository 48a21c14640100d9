"""Lengths in the order of arrival: each once all that came before it have ended.

One very long request so holds back the lengths of all that came behind it until it has ended.
"""

from __future__ import annotations

from collections import deque

from lengthwise.gateway.follow.told import Lengths


class InOrder:
    """Told as they end, the first are the short ones; in the order of arrival they are a fair sample at any time."""

    def __init__(self) -> None:
        self._came: deque[int] = deque()
        self._in: set[int] = set()
        self._over: dict[int, tuple[int, int] | None] = {}

    def arrived(self, request_id: int) -> None:
        """It is in."""
        self._came.append(request_id)
        self._in.add(request_id)

    def ended(self, request_id: int, lengths: tuple[int, int] | None, now_s: float) -> list[Lengths]:
        """It is over; what is known now that was not before. None: it says nothing of lengths."""
        if request_id not in self._in:
            return []
        self._in.remove(request_id)
        self._over[request_id] = lengths
        known: list[Lengths] = []
        while self._came and self._came[0] in self._over:
            pair = self._over.pop(self._came.popleft())
            if pair is not None:
                known.append((*pair, now_s))
        return known
