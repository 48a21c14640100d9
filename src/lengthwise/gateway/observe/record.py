"""What passes, kept for a look back: the last so many requests."""

from __future__ import annotations

from collections import deque

from lengthwise.gateway.observe.trace import Trace, of_rows
from lengthwise.gateway.telemetry import Row, Trips

KEPT = 5000


class Record(Trips):
    """A listener of its own; or, where ``telemetry.trips`` follows requests already, subscribe ``over`` to those.

    Args:
        kept: So many requests, the last ones.
    """

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self.rows: deque[Row] = deque(maxlen=kept)
        self.subscribe(self.over)

    def over(self, row: Row) -> None:
        """A request is over."""
        self.rows.append(row)

    def trace(self) -> Trace:
        """Its columns now."""
        return of_rows(self.rows)
