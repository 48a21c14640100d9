"""Requests that may have killed an engine, and beside how many others they may run."""

from __future__ import annotations

from collections.abc import Iterable


class Suspects:
    """When an engine dies, each request that it worked on may be why.

    After each death they run in groups of a quarter, so that whoever kills engines is soon alone, and takes nobody
    along for long; whoever is answered is suspect no more.
    """

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def __contains__(self, place: int) -> bool:
        return place in self._deaths

    def beside(self, place: int, seats: int) -> int:
        """How many may run at once with this one among them."""
        return max(1, seats >> 2 * self._deaths.get(place, 0))

    def may_join(self, place: int, others: Iterable[int], seats: int) -> bool:
        """Whether one may run beside others on an engine."""
        there = list(others)
        return len(there) < min(self.beside(one, seats) for one in (place, *there))

    def died(self, places: Iterable[int]) -> None:
        """All of them were on an engine that died."""
        for place in places:
            self._deaths[place] = self._deaths.get(place, 0) + 1

    def cleared(self, place: int) -> None:
        """It was answered, or has ended."""
        self._deaths.pop(place, None)
