"""A serial front before the engine that takes nearly all of its time, in words."""

from __future__ import annotations

from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.records import Records

BINDS = 0.7
"""From this share of a front's time on, what requests wait for each other there grows fast."""


def front_note(cost: CostTables, rate_rps: float) -> str:
    """That the front binds at so many requests a second; "" where it does not."""
    busy = rate_rps * cost.front.queue_s
    if not busy > BINDS:
        return ""
    has = "is busy" if busy <= 1 else "has work for"
    return (
        f"The front before the engine binds: it takes one request at a time, {1e3 * cost.front.queue_s:.3g} ms each, "
        f"and {has} {busy:.0%} of the time at {rate_rps:.3g} requests a second. More or faster GPUs do not help; "
        "give what your own front takes (deployment.host)."
    )


def sent_rps(records: Records) -> float:
    """Requests a second over the time in which clients sent them; over the whole run where they sent all at once."""
    arrival_s = records.requests.arrival_s
    span_s = float(arrival_s.max() - arrival_s.min()) or records.end_s - float(arrival_s.min())
    return len(arrival_s) / span_s if span_s > 0 else 0.0
