"""What scores are called, and how they read."""

from __future__ import annotations

import math

from lengthwise.report._numbers import UNKNOWN, rounded

WORDS: dict[str, str] = {
    "mae": "mean absolute error, tokens",
    "rmse": "root mean square error, tokens",
    "bias": "bias, tokens",
    "r2": "R2",
    "log_r2": "R2 of log tokens",
    "tau": "Kendall's tau",
    "tau_within": "Kendall's tau within a model",
    "accuracy_2": "right of 2 bins",
    "accuracy_4": "right of 4 bins",
    "accuracy_8": "right of 8 bins",
    "within_one_2": "within one of 2 bins",
    "within_one_4": "within one of 4 bins",
    "within_one_8": "within one of 8 bins",
    "coverage90": "inside the 90 % interval",
    "width90": "width of the 90 % interval, tokens",
    "pinball": "pinball loss, tokens",
}
_SHARES = ("accuracy", "within", "coverage")


def score_text(name: str, value: float, half_width: float = math.nan) -> str:
    """A score with its interval ("84.2 ± 1.1 %")."""
    if not math.isfinite(value):
        return UNKNOWN
    if name.startswith(_SHARES):
        middle, half = rounded(100 * value, 100 * half_width)
        return f"{middle} ± {half} %" if half else f"{middle} %"
    middle, half = rounded(value, half_width)
    return f"{middle} ± {half}" if half else middle
