"""How well a profile was fitted, in words."""

from __future__ import annotations

import statistics

from lengthwise.schema.cost_tables import CostTables


def fit_note(cost: CostTables) -> str:
    """Cross-validated errors of a fitted profile in a few words."""
    typical = statistics.median(one.median for one in cost.fit)
    worst = max(cost.fit, key=lambda one: one.median)
    return (
        f"cross-validated error {100 * typical:.2g} % (median operator), {100 * worst.median:.2g} % for the worst, "
        f"{worst.operator} (95 % of its rows within {100 * worst.p95:.2g} %)"
    )
