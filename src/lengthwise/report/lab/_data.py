"""What the page's script works on: a laboratory as short columns of numbers."""

from __future__ import annotations

import math
from typing import Any

from lengthwise.report.lab._words import METRICS, cell_of, side_names
from lengthwise.schema.lab import FCFS, ORACLE, LabTable

NAMES = {FCFS: "FCFS", ORACLE: "oracle (SJF, lengths known)"}


def lab_data(table: LabTable) -> dict[str, Any]:
    """Sides, loads, batches, and for every metric a number and half-width a side, batch and load."""
    sides = side_names(table)
    told = [m for m in METRICS if any(not math.isnan(cell[m.name].value) for cell in table.cells)]
    policies = list(dict.fromkeys(policy for policy, _ in sides))
    predictors = list(dict.fromkeys(predictor for _, predictor in sides))
    return {
        "unit": {"capacity": "share of capacity", "alone": "x the average rate", "rps": "requests/s"}[
            table.unit
        ],
        "loads": [float(load) for load in table.loads],
        "loadTexts": [table.unit.text(load) for load in table.loads],
        "batches": table.batches,
        "sides": [
            {
                "name": NAMES.get(policy, f"{policy} ({predictor})" if predictor else policy),
                "policy": policies.index(policy),
                "predictor": predictors.index(predictor),
                "end": policy in NAMES,
            }
            for policy, predictor in sides
        ],
        "policies": [NAMES.get(policy, policy) for policy in policies],
        "predictors": [predictor or "needs none" for predictor in predictors],
        "metrics": [
            {"name": m.name, "label": m.label, "unit": m.unit, "factor": m.factor, "better": m.better}
            for m in told
        ],
        "values": {m.name: [_of_side(table, side, m.name) for side in sides] for m in told},
    }


def _of_side(table: LabTable, side: tuple[str, str], metric: str) -> list[list[list[float | None]]]:
    """[batches][loads] of (value, half-width)."""
    return [
        [
            [_short(e.value), _short(e.half_width)]
            for load in table.loads
            for e in (cell_of(table, side, batch, load)[metric],)
        ]
        for batch in table.batches
    ]


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
