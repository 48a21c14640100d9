"""How well a profile was fitted, in words."""

from __future__ import annotations

import statistics

from lengthwise.cli._show import two_digits
from lengthwise.schema.cost_tables import CostTables


def fit_note(cost: CostTables) -> str:
    """Cross-validated errors of a fitted profile in a few words."""
    typical = statistics.median(one.median for one in cost.fit)
    worst = max(cost.fit, key=lambda one: one.median)
    median, most, p95 = (two_digits(100 * share) for share in (typical, worst.median, worst.p95))
    return (
        f"cross-validated error {median} % (median operator), {most} % for the worst, {worst.operator} "
        f"(95 % of its rows within {p95} %)"
    )
