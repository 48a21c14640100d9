"""What a look back found: nouns."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lengthwise.gateway.observe.service import Service

SWITCH_ON = "switch on"
NOBODY_WAITS = "no gain to be had: nobody waits"
ALIKE = "no gain to be had: lengths are alike"
NO_GAIN = "no gain to be had"
TAIL_PAYS = "the tail pays more than the mean gains"
UNSURE = "not sure yet"
UNLIKE = "not known: the engines do not behave as fitted"
OUT_OF_ORDER = "not known: requests did not go first come, first served"
CAME_WHOLE = "not known: answers come whole"
TOO_LITTLE = "not enough traffic"


@dataclass(frozen=True)
class Change:
    """A relative change against FCFS (-0.2: a fifth less), with its interval."""

    value: float
    low: float
    high: float


NO_CHANGE = Change(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class OrderGain:
    """What an order would have done on these requests.

    Attributes:
        name: "srtf" (order of those who wait), "isrtf" (and cuts), "oracle" (true lengths, no cuts).
        mean: Change of the mean JCT.
        p99: Change of the 99th percentile of JCT.
        mean_jct_s: Mean JCT.
        p99_jct_s: Its 99th percentile.
    """

    name: str
    mean: Change
    p99: Change
    mean_jct_s: float
    p99_jct_s: float


@dataclass(frozen=True)
class OrderTimes:
    """What an order would have given these requests: seconds as mean, median, 90 % and 99 %.

    Attributes:
        name: "fcfs", or an order's.
        jct_s: Arrival to end.
        queue_s: Waiting in all.
    """

    name: str
    jct_s: tuple[float, ...]
    queue_s: tuple[float, ...]


@dataclass(frozen=True)
class Gain:
    """What length-aware order would have gained.

    Attributes:
        verdict: One of this module's.
        sentence: Why.
        requests: That were looked at; those of engines that tell nothing are not among them.
        span_s: From the first arrival to the last.
        waited_share: Of all JCT, before a seat was free, as it was.
        observed_jct_s: Mean JCT as it was.
        fcfs_jct_s: Mean JCT of the simulated first come, first served.
        fcfs_p99_jct_s: Its 99th percentile.
        in_order: Whether requests really went first come, first served, so that the last three can be compared.
        orders: One each.
        cuts: Change of the mean JCT from srtf to isrtf, with its interval: what cuts add.
        times: One each, FCFS first.
        services: The engines as they were fitted, a pool each.
        level: Of the intervals: both orders' hold together with 95 %.
    """

    verdict: str
    sentence: str
    requests: int
    span_s: float
    waited_share: float = math.nan
    observed_jct_s: float = math.nan
    fcfs_jct_s: float = math.nan
    fcfs_p99_jct_s: float = math.nan
    in_order: bool = False
    orders: tuple[OrderGain, ...] = ()
    cuts: Change = NO_CHANGE
    times: tuple[OrderTimes, ...] = ()
    services: tuple[Service, ...] = field(default=())
    level: float = 0.975

    @property
    def model_error(self) -> float:
        """Simulated FCFS over what was seen, less 1; NaN where requests did not go in order, or took no time."""
        return (
            self.fcfs_jct_s / self.observed_jct_s - 1
            if self.in_order and self.observed_jct_s > 0
            else math.nan
        )

    def order(self, name: str) -> OrderGain:
        """The gain of an order by name."""
        return next(one for one in self.orders if one.name == name)


def as_json(gain: Gain) -> dict[str, Any]:
    """Plain values; what is not known is None."""
    told: dict[str, Any] = _plain(asdict(gain))
    return told | {"model_error": _plain(gain.model_error)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
