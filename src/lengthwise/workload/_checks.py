"""Checks of arguments that several models share."""

from __future__ import annotations

from math import isfinite

from lengthwise.schema.errors import InputError


def require(good: bool, message: str) -> None:
    """InputError with this message, unless it is good."""
    if not good:
        raise InputError(message)


def require_positive(name: str, value: float) -> None:
    """InputError, unless the value is finite and above 0."""
    require(isfinite(value) and value > 0, f"{name} must be a finite number above 0; it is {value}")


def require_range(low: float, high: float) -> None:
    """InputError, unless lengths can lie from ``low`` to ``high``."""
    require(0 <= low <= high, f"lengths must lie in a range from 0 up; it is {low} to {high}")
