"""Numbers as docs/gateway.md writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def number(of: float, unit: str = "") -> str:
    """Three digits, or whole from a thousand on, and the unit."""
    text = f"{of:,.0f}" if abs(of) >= 1000 else f"{of:.3g}"
    return f"{text} {unit}".strip()


def with_ends(value: float, ends: Sequence[float] | None) -> str:
    """A value with its interval in brackets, where it has one."""
    return number(value) + (f" [{number(ends[0])}, {number(ends[1])}]" if ends else "")


def percents(shares: Sequence[float]) -> str:
    """Shares as percents in a row of words: 15, 23 and 31 %."""
    texts = [f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2g}" for share in shares]
    return f"{entries(texts)} %"


def entries(words: Sequence[str]) -> str:
    """Words in a row: a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def when(row: Mapping[str, Any] | None) -> str:
    """When a row was measured; "" where it does not tell."""
    kept = (row or {}).get("retained") or ""
    return kept.replace("T", " ").removesuffix("+00:00") + " UTC" if kept else ""
