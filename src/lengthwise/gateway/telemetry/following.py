"""How a schedule follows lengths, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lengthwise.gateway.follow import Followed


def families(now: Followed) -> Iterator[Any]:
    """The drift statistic beside the threshold of an alarm, and what came of alarms."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, what, value in (
        ("lengths_watched", "1 while somebody watches whether lengths move", float(now.up)),
        ("lengths_evidence", "Evidence that lengths moved since the last alarm; 1: none", now.evidence),
        ("lengths_alarm", "Evidence from which on there is an alarm", 1 / now.false_alarms),
    ):
        yield GaugeMetricFamily(f"lengthwise_{name}", what, value=value)
    yield CounterMetricFamily(
        "lengthwise_lengths_observed", "Requests whose lengths were watched", value=float(now.observed)
    )
    plans = CounterMetricFamily(
        "lengthwise_plans",
        "Schedules planned anew after lengths moved, by what came of it",
        labels=("result",),
    )
    for result in ("changed", "left", "failed"):
        plans.add_metric((result,), float(getattr(now, result)))
    yield plans
