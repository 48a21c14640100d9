"""Numbers of the last minutes for people: times by group, and how good predictions were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lengthwise.gateway.request import Outcome
from lengthwise.gateway.telemetry import Row

QUANTILES = (0.5, 0.9, 0.99)
POINTS = 400
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LEAST = 8
"""Fewer values have no quartiles worth telling."""


def times(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """JCT, time to first token and wait of finished requests: all, by class, by quartile of predicted length."""
    done = [row for row in rows if row.outcome == Outcome.FINISHED]
    groups: list[tuple[str, list[Row]]] = [("all", done)]
    classes = sorted({row.priority for row in done})
    if len(classes) > 1:
        groups += [(f"class {one}", [row for row in done if row.priority == one]) for one in classes]
    return [_group(name, some) for name, some in groups + _quartiles(done) if some]


def lengths(rows: Sequence[Row]) -> dict[str, Any]:
    """Predicted against actual output lengths: points, and how far the predictions can be believed."""
    done = [row for row in rows if row.outcome == Outcome.FINISHED and row.output_tokens >= 1]
    told: dict[str, Any] = {"count": len(done), "points": [], "calibration": []}
    if not done:
        return told
    predicted = np.array([max(row.predicted_tokens, 1.0) for row in done])
    actual = np.array([row.output_tokens for row in done], float)
    told["points"] = [[round(row.predicted_tokens, 1), row.output_tokens] for row in done[-POINTS:]]
    told["bias"] = float(np.median(predicted / actual))
    told["within_2x"] = float(np.mean(np.abs(np.log2(predicted / actual)) <= 1))
    told["concordance"] = _concordance(predicted[-POINTS:], actual[-POINTS:])
    levels = np.array([row.predicted_level for row in done])
    levels = levels[np.isfinite(levels)]
    if len(levels) >= LEAST:
        told["calibration"] = [[level, round(float(np.mean(levels <= level)), 4)] for level in LEVELS]
    return told


def _quartiles(done: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Groups of like predicted length, where lengths differ."""
    predicted = np.array([row.predicted_tokens for row in done])
    if len(predicted) < LEAST or np.ptp(predicted) == 0:
        return []
    cuts = np.unique(np.quantile(predicted, (0.25, 0.5, 0.75)))
    number = np.searchsorted(cuts, predicted, side="left")
    groups = []
    for one in range(len(cuts) + 1):
        some = [row for row, of in zip(done, number.tolist(), strict=True) if of == one]
        if some:
            low, high = (round(pick(row.predicted_tokens for row in some)) for pick in (min, max))
            groups.append((f"predicted {low if low == high else f'{low} to {high}'} tokens", some))
    return groups


def _group(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    columns = {
        "jct": [row.jct_s for row in rows],
        "ttft": [row.ttft_s for row in rows if row.ttft_s == row.ttft_s],
        "queue": [row.waited_s for row in rows],
    }
    told = {column: _numbers(values) for column, values in columns.items()}
    return {"name": name, "count": len(rows), **told}


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Mean, then QUANTILES."""
    if not values:
        return [None] * (1 + len(QUANTILES))
    told = [float(np.mean(values)), *np.quantile(values, QUANTILES).tolist()]
    return [round(value, 4) for value in told]


def _concordance(predicted: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float | None:
    """Of all pairs of different lengths, the share that predictions put in the right order (a tie is half)."""
    above = np.sign(predicted[:, None] - predicted[None, :]) * np.sign(actual[:, None] - actual[None, :])
    differ = actual[:, None] != actual[None, :]
    if not differ.any():
        return None
    return float((above[differ] + 1).mean() / 2)
