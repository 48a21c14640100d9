"""Follows every request from its arrival to its end, and then tells its row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lengthwise.gateway.listener import Listener
from lengthwise.gateway.request import Forecast, Outcome, Request
from lengthwise.gateway.telemetry.histogram import Histogram
from lengthwise.gateway.telemetry.row import Again, Row

MOST_AGAIN = 64
"""So many later predictions of a request are kept: of longer ones every second, then every fourth..."""
FAILED_OVER = "failed_over"


class Trip:
    """A request that is in."""

    __slots__ = (
        "again", "dispatched_s", "failovers", "first", "first_token_s", "forecast", "gaps", "last_s", "request",
        "resumed", "sent_s", "served_s", "worker",
    )  # fmt: skip

    def __init__(self, request: Request, gaps: Histogram | None) -> None:
        self.request, self.gaps = request, gaps
        self.first = self.forecast = request.forecast
        self.again: list[Again] = []
        self.dispatched_s = self.first_token_s = self.last_s = self.sent_s = math.nan
        self.served_s, self.worker = 0.0, ""
        self.failovers = self.resumed = 0

    def believe(self, forecast: Forecast) -> None:
        """Another forecast than before."""
        self.forecast = forecast
        if forecast.at_tokens == 0:
            self.first = forecast
            return
        if len(self.again) >= MOST_AGAIN:
            del self.again[1::2]
        self.again.append((forecast.at_tokens, round(float(forecast.total_tokens), 1)))


class Trips(Listener):
    """All requests that are in, and a row for each that is over.

    Args:
        tenant: The name of a tenant's number.
        gaps: The histogram of times between tokens of a model; None counts none.
    """

    def __init__(
        self, tenant: Callable[[int], str] = str, gaps: Callable[[str], Histogram] | None = None
    ) -> None:
        self._tenant, self._gaps = tenant, gaps
        self._live: dict[int, Trip] = {}
        self._told: list[Callable[[Row], None]] = []

    def subscribe(self, told: Callable[[Row], None]) -> None:
        """Has it told every row from now on; it must be quick and never raise."""
        self._told.append(told)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Trip]:
        return iter(self._live.values())

    def get(self, request_id: int) -> Trip | None:
        """The trip of a request that is in."""
        return self._live.get(request_id)

    def arrived(self, request: Request) -> None:  # noqa: D102 - as Listener
        self._live[request.id] = Trip(request, self._gaps(request.model) if self._gaps else None)

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        trip = self._live.get(request.id)
        if trip is None:
            return
        if request.forecast is not trip.forecast:
            trip.believe(request.forecast)
        if trip.dispatched_s != trip.dispatched_s:
            trip.dispatched_s = now_s
        trip.sent_s, trip.worker = now_s, worker

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        trip = self._live.get(request.id)
        if trip is not None and math.isnan(trip.first_token_s):
            trip.first_token_s = trip.last_s = now_s

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:  # noqa: D102
        trip = self._live.get(request.id)
        if trip is None:
            return
        last_s = trip.last_s
        trip.last_s = now_s
        if last_s == last_s:  # noqa: PLR0124 - not NaN
            if trip.gaps is not None and now_s > last_s:
                trip.gaps.add((now_s - last_s) / new_tokens, new_tokens)
        elif not request.at_once:
            trip.first_token_s = now_s
        if request.forecast is not trip.forecast:
            trip.believe(request.forecast)

    def returned(self, request: Request, why: str, now_s: float) -> None:  # noqa: D102
        trip = self._live.get(request.id)
        if trip is None:
            return
        self._leave(trip, now_s)
        trip.resumed += request.generated_tokens
        trip.failovers += why == FAILED_OVER

    def ended(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        del detail
        trip = self._live.pop(request.id, None)
        if trip is None:
            return
        self._leave(trip, now_s)
        row = self._row(trip, outcome, now_s)
        for told in self._told:
            told(row)

    def _leave(self, trip: Trip, now_s: float) -> None:
        if not math.isnan(trip.sent_s):
            trip.served_s += now_s - trip.sent_s
            trip.sent_s = math.nan

    def _row(self, trip: Trip, outcome: Outcome, now_s: float) -> Row:
        q = trip.request
        waited_s = q.waited_s if trip.worker else now_s - q.arrival_s
        return Row(
            id=q.id,
            model=q.model,
            tenant=self._tenant(q.tenant),
            priority=q.priority,
            arrival_s=q.arrival_s,
            prompt_tokens=q.prompt_tokens,
            max_tokens=q.max_tokens,
            predicted_tokens=float(trip.first.total_tokens),
            source=trip.first.source,
            predicted_level=level_of(trip.first, q.generated_tokens),
            again=tuple(trip.again),
            output_tokens=q.generated_tokens,
            waited_s=waited_s,
            dispatched_s=trip.dispatched_s,
            first_token_s=trip.first_token_s,
            ended_s=now_s,
            served_s=trip.served_s,
            worker=trip.worker,
            preemptions=q.preemptions,
            resumed_tokens=trip.resumed,
            failovers=trip.failovers,
            outcome=outcome.value,
        )


def level_of(forecast: Forecast, output_tokens: int) -> float:
    """The share of the predicted distribution below a length; NaN where only a number was predicted."""
    if forecast.quantiles is None or output_tokens < 1:
        return math.nan
    from lengthwise.predict import LEVELS

    return float(np.interp(output_tokens, forecast.quantiles, LEVELS, left=0.0, right=1.0))


def named(tenants: Sequence[str]) -> Callable[[int], str]:
    """The name of a tenant's number; "?" for one that nobody knows."""
    return lambda number: tenants[number] if 0 <= number < len(tenants) else "?"
