"""How sure the numbers of a schedule are, in sentences and cells."""

from __future__ import annotations

import math

from lengthwise.report._numbers import UNKNOWN, percent, span
from lengthwise.schema.schedule import SchedulePlan
from lengthwise.schema.schedule_spread import Spread

SURE_HEADS = ("if", "requests/s", "latency, s", "worst case, s", "within", "bound held in")

_IF = {
    "lengths": "the {requests:,} requests behind the lengths were others",
    "costs": "costs are off as far as they may be",
}


def sure_said(plan: SchedulePlan) -> list[str]:
    """How far off the chosen schedule may be, a sentence a source, and of which nothing is known."""
    return [*(_sentence(spread, plan) for spread in plan.spreads), *plan.spread_notes]


def sure_cells(spread: Spread) -> list[str]:
    """A source of error as cells under ``SURE_HEADS``."""
    return [
        _IF[spread.source].format(requests=spread.requests),
        _ends(spread.throughput_rps),
        _ends(spread.latency_s),
        _ends(spread.latency_high_s),
        f"{percent(spread.level)} of {spread.draws}",
        percent(spread.held_share),
    ]


def _sentence(spread: Spread, plan: SchedulePlan) -> str:
    held_s = spread.latency_high_s if plan.worst_case else spread.latency_s
    told = (
        f"If {_IF[spread.source].format(requests=spread.requests)}: {_ends(spread.throughput_rps)} requests/s, latency "
        f"{_ends(held_s)} s{' in the worst case' if plan.worst_case else ''} ({percent(spread.level)} interval)"
    )
    share = percent(spread.held_share)
    if math.isfinite(plan.bound_s):
        return f"{told}; the bound holds in {share} of {spread.draws} draws."
    return (
        f"{told}."
        if spread.held_share == 1
        else f"{told}; memory holds it in {share} of {spread.draws} draws."
    )


def _ends(ends: tuple[float, float]) -> str:
    low, high = ends
    if not math.isfinite(low):
        return UNKNOWN
    return span(low, high) if math.isfinite(high) else f"from {span(low, low).split(UNKNOWN)[0]}"
