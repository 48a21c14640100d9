"""What is worth choosing: nobody else is both cheaper and faster."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lengthwise.schema.plan import Choice, Limit, Point, Standing, Trade
from lengthwise.search.limits import LATENCIES

KEEPS_UP = 0.97
"""Of the offered rate: what serves less has a queue that grows, and latencies that depend on the run."""

USUAL = ("ttft.p90", "tbt.p99", "jct.p90")


def frontiers(choices: Sequence[Choice], limits: Sequence[Limit]) -> dict[str, tuple[Trade, ...]]:
    """By latency metric, the trades of cost against it, over all points that keep the other limits."""
    limited = [limit.metric for limit in limits if limit.metric.partition(".")[0] in LATENCIES]
    metrics = dict.fromkeys([*limited, *USUAL])
    return {metric: frontier(choices, metric, limits) for metric in metrics}


def frontier(choices: Sequence[Choice], metric: str, limits: Sequence[Limit]) -> tuple[Trade, ...]:
    """Trades from the cheapest to the fastest."""
    others = [limit for limit in limits if limit.metric != metric]
    trades = [
        Trade(c.name, p.rate_rps, usd_per_thousand(c, p.rate_rps), p.value(metric))
        for c in choices
        if c.standing in (Standing.RANKED, Standing.SCOUTED)
        for p in c.points
        if math.isfinite(p.value(metric))
        and _keeps_up(p)
        and all(limit.holds(p.value(limit.metric)) for limit in others)
    ]
    kept: list[Trade] = []
    for trade in sorted(trades, key=lambda t: (t.cost_usd, t.latency_s)):
        if not kept or trade.latency_s < kept[-1].latency_s:
            kept.append(trade)
    return tuple(kept)


def _keeps_up(point: Point) -> bool:
    """Whether as much is served as comes; NaN: all at once, where nothing has to keep up."""
    served = point.value("requests_per_s")
    return not served < KEEPS_UP * point.rate_rps


def usd_per_thousand(choice: Choice, rate_rps: float) -> float:
    """What a thousand requests cost at a rate."""
    return choice.price_per_hour_usd / 3600 / rate_rps * 1000
