"""Who knows lengths: the yardstick of benchmarks and tests, out of reach of any configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lengthwise.gateway.clock import Clock, monotonic
from lengthwise.gateway.config import Forecasting
from lengthwise.gateway.forecast.forecaster import Forecaster, Late
from lengthwise.gateway.request import Forecast, Request


class Oracle(Forecaster):
    """Says of each request the length that it will have.

    Args:
        config: Its statistic does not matter.
        clock: The gateway's.
        late: Told of an answer that came after its deadline.
        length: Of a request and its prompt; None where it is not known (what stands in is then said).
    """

    def __init__(
        self,
        config: Forecasting,
        clock: Clock = monotonic,
        late: Late | None = None,
        *,
        length: Callable[[Request, str | None], float | None],
        **rest: Any,
    ) -> None:
        super().__init__(config, clock, late, **rest)
        self._length = length

    async def first(self, request: Request, text: str | None) -> Forecast:
        """The truth."""
        tokens = self._length(request, text)
        if tokens is None:
            return await super().first(request, text)
        return self._counted(self._fixed(request, float(tokens), "oracle"))

    async def again(self, request: Request, text: str | None, generated_text: str | None) -> Forecast:
        """Still the truth."""
        if request.forecast.source == "oracle":
            return request.forecast
        return await super().again(request, text, generated_text)
