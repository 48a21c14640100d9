"""What the order in use costs against first come, first served: a shadow queue of the same requests.

The shadow has as many seats as there really were: requests at engines while somebody waited, else the sum of the caps.
It takes the requests that really came, in the order in which they came, and gives each a seat as soon as one
is free, for as long as the request was really at engines:

    start = max(arrival, the earliest free seat);  JCT of the shadow = start - arrival + seconds at engines

Regret is the mean JCT that requests really had less that of the shadow: below 0 the order in use gains. It is
an estimate: the seconds at engines are those of the batches that really ran, and what was computed again after
a cut counts in both. A request can be told only when all who came before it are over.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from lengthwise.gateway.request import Outcome
from lengthwise.gateway.telemetry.row import Row

RECENT = 2000
MOST_KEPT = 100_000
MOST_NOTED = 10_000


class Pair(NamedTuple):
    """A finished request as it was and as the shadow served it; seconds.

    Attributes:
        ended_s: When it was over, on the gateway's clock.
        jct_s: Arrival to end.
        waited_s: In the gateway's queue in all.
        shadow_jct_s: Arrival to end in the shadow.
        shadow_waited_s: For a seat of the shadow.
    """

    ended_s: float
    jct_s: float
    waited_s: float
    shadow_jct_s: float
    shadow_waited_s: float


class Regret:
    """A running estimate.

    Attributes:
        seats: Places at engines now; who ran the shadow before keeps its seat.
        told: Requests in the sums.
        jct_s: Sum of the JCT that they had.
        shadow_jct_s: Sum of the JCT that FCFS would have given them.
        until_s: When the last of them came; NaN before the first.
    """

    def __init__(self, seats: int = 1) -> None:
        self.seats = seats
        self.told = 0
        self.jct_s = self.shadow_jct_s = 0.0
        self.until_s = math.nan
        self._noted: list[tuple[float, int]] = []
        self._live: dict[int, float] = {}
        self._over: list[tuple[float, int, Row]] = []
        self._free: list[float] = []
        self._recent: deque[Pair] = deque(maxlen=RECENT)

    def noted(self, now_s: float, seats: int) -> None:
        """From now on there are so many seats."""
        if seats != self.seats or not self._noted:
            self.seats = seats
            self._noted.append((now_s, seats))
            if len(self._noted) > 2 * MOST_NOTED:
                del self._noted[:MOST_NOTED]

    def arrived(self, request_id: int, arrival_s: float) -> None:
        """It is in."""
        self._live[request_id] = arrival_s

    def ended(self, row: Row) -> None:
        """It is over."""
        self._live.pop(row.id, None)
        heapq.heappush(self._over, (row.arrival_s, row.id, row))
        before_s = next(iter(self._live.values()), math.inf)
        if len(self._over) > MOST_KEPT:
            before_s = math.inf
        while self._over and self._over[0][0] < before_s:
            self._serve(heapq.heappop(self._over)[2])

    def mean_s(self) -> float:
        """Of the last requests: mean JCT that they had less that of the shadow; NaN before the first."""
        return self.recent()[0] - self.recent()[1] if self._recent else math.nan

    def recent(self) -> tuple[float, float]:
        """Mean JCT of the last requests, (that they had, under FCFS); NaN before the first."""
        if not self._recent:
            return math.nan, math.nan
        n = len(self._recent)
        return sum(pair.jct_s for pair in self._recent) / n, sum(
            pair.shadow_jct_s for pair in self._recent
        ) / n

    @property
    def recent_count(self) -> int:
        """The last requests, of which ``recent`` tells."""
        return len(self._recent)

    def pairs(self) -> list[Pair]:
        """The last requests in the order in which they came."""
        return list(self._recent)

    def _serve(self, row: Row) -> None:
        arrival_s, service_s = row.arrival_s, row.served_s
        if not service_s > 0:
            return
        free, (since_s, seats) = self._free, self._seats_at(row.dispatched_s)
        while len(free) > seats:
            heapq.heappop(free)
        fresh = len(free) < seats  # a seat that was added is there from then on
        start_s = max(arrival_s, since_s if fresh else heapq.heappop(free))
        heapq.heappush(free, start_s + service_s)
        if row.outcome == Outcome.FINISHED:
            waited_s = start_s - arrival_s
            self.told += 1
            self.until_s = arrival_s
            self.jct_s += row.jct_s
            self.shadow_jct_s += waited_s + service_s
            self._recent.append(Pair(row.ended_s, row.jct_s, row.waited_s, waited_s + service_s, waited_s))

    def _seats_at(self, now_s: float) -> tuple[float, int]:
        """(since when, how many) when a request was really sent; it is told long after."""
        i = bisect_right(self._noted, (now_s, 1 << 62)) - 1
        if i < 0:
            return -math.inf, max(1, self.seats)
        since_s, seats = self._noted[i]
        return (since_s if i else -math.inf), max(1, seats)
