"""What the page's figures draw, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lengthwise.predict.evaluate import Evaluation, Window

BINS = (2, 4, 8)


def figures(found: Sequence[Evaluation]) -> dict[str, Any]:
    """Curves of each evaluation, and the predicted and true lengths of the first one's requests."""
    first = found[0].shown
    return {
        "names": [one.name for one in found],
        "calibration": [{"x": short(one.calibration[0]), "y": short(one.calibration[1])} for one in found],
        "mae": [_windows(one, lambda w: w.mae.value, lambda w: w.mae.half_width) for one in found],
        "r2": [_windows(one, lambda w: w.r2_all) for one in found],
        "tau": [_windows(one, lambda w: w.tau.value, lambda w: w.tau.half_width) for one in found],
        "bins": [
            {
                "right": short([one.scores[f"accuracy_{k}"].value for k in BINS]),
                "near": short([one.scores[f"within_one_{k}"].value for k in BINS]),
            }
            for one in found
        ],
        "pairs": {key: short(first[key]) for key in ("predicted", "low", "high", "actual")}
        | {"model": first["model"]},
    }


def _windows(
    one: Evaluation, value: Callable[[Window], float], half: Callable[[Window], float] | None = None
) -> dict[str, Any]:
    return {
        "x": [w.tokens for w in one.windows],
        "y": short([value(w) for w in one.windows]),
        "half": short([half(w) for w in one.windows]) if half else [],
    }


def short(values: Any) -> list[float | None]:
    """Numbers with five digits; what is not finite becomes null, a gap in the curve."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]
