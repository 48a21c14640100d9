"""Who answers questions, and how what goes wrong is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from lengthwise.gateway.forecast._asking import Question
from lengthwise.gateway.request import Floats

Answer = asyncio.Future[Floats | None]
"""[25] quantiles, or None: nothing that can be used."""


class Source(Protocol):
    """A predictor somewhere.

    Attributes:
        waits: Whether an answer may take so long that a deadline is needed.
    """

    waits: bool

    async def start(self) -> None:
        """Ready to be asked, or as ready as it gets."""
        ...

    async def stop(self) -> None:
        """Over; every answer that was promised has come."""
        ...

    def ask(self, question: Question) -> Answer:
        """An answer that will come, whatever happens; it is never an exception."""
        ...

    def state(self) -> dict[str, Any]:
        """For people."""
        ...


class Tally:
    """Faults by kind, and the last that was said of them."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.last_error: str | None = None

    def add(self, faults: Mapping[str, int], error: str | None = None) -> None:
        """Counts some more."""
        for kind, count in faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        if error is not None:
            self.last_error = error[:500]
