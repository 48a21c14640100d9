"""Numbers as docs/gateway.md writes them."""

from __future__ import annotations

from collections.abc import Sequence


def number(of: float, unit: str = "") -> str:
    """Three digits, or whole from a thousand on, and the unit."""
    text = f"{of:,.0f}" if abs(of) >= 1000 else f"{of:.3g}"
    return f"{text} {unit}".strip()


def with_ends(value: float, ends: Sequence[float] | None) -> str:
    """A value with its interval in brackets, where it has one."""
    return number(value) + (f" [{number(ends[0])}, {number(ends[1])}]" if ends else "")
