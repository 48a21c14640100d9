"""What the gateway tells the engine of a request's length, as it travels in ``vllm_xargs``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

PREDICTED, CLASS, LATER = "lengthwise_predicted", "lengthwise_class", "lengthwise_later"
MOST_CLASS = 2047
_MOST_LATER = 64


@dataclass(frozen=True, slots=True)
class Hint:
    """Of one request.

    Attributes:
        total_tokens: Predicted length of this run's output.
        later: (generated tokens, length predicted once there are so many), increasing.
        priority: Class; smaller goes first.
        trouble: What was wrong with what was told; "" nothing. What is wrong counts as not told.
    """

    total_tokens: float
    later: tuple[tuple[float, float], ...] = ()
    priority: int = 0
    trouble: str = ""

    def predicted_tokens(self, generated_tokens: int) -> float:
        """The length predicted once there are so many tokens."""
        total = self.total_tokens
        for at, then in self.later:
            if at > generated_tokens:
                break
            total = then
        return total


def hint_of(told: Any, max_tokens: int, prior_tokens: float) -> Hint:
    """What is told of a request; the prior stands in for a length that is absent or cannot be used.

    Args:
        told: The request's ``extra_args``.
        max_tokens: The longest output asked for: no prediction is longer, so none does more harm than that.
        prior_tokens: Length of who is told nothing of.
    """
    told = told if isinstance(told, Mapping) else {}
    most = float(max(1, max_tokens))
    predicted = _length(told.get(PREDICTED))
    trouble = "" if predicted is not None else _trouble(told)
    priority = told.get(CLASS, 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        priority, trouble = 0, trouble or f"{CLASS} must be a whole number; it is {str(priority)[:40]!r}"
    total = prior_tokens if predicted is None else predicted
    later = _later(told.get(LATER), most) if predicted is not None else ()
    if later is None:
        later, trouble = (), trouble or f"{LATER} must be pairs of numbers, increasing"
    return Hint(min(total, most), later, max(-MOST_CLASS, min(MOST_CLASS, priority)), trouble)


def _trouble(told: Mapping[str, Any]) -> str:
    if PREDICTED not in told:
        return f"no {PREDICTED}"
    return f"{PREDICTED} must be a number from 0 on; it is {str(told[PREDICTED])[:40]!r}"


def _length(value: Any) -> float | None:
    """A length that can be used, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _later(value: Any, most: float) -> tuple[tuple[float, float], ...] | None:
    """Pairs; None: they cannot be used."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or len(value) % 2 or len(value) > 2 * _MOST_LATER:
        return None
    numbers = [number for number in map(_length, value) if number is not None]
    pairs = [(at, min(then, most)) for at, then in zip(numbers[::2], numbers[1::2], strict=False)]
    if len(numbers) != len(value) or any(a[0] >= b[0] for a, b in pairwise(pairs)):
        return None
    return tuple(pairs)
