"""Numbers as people read them."""

from __future__ import annotations

import math

from lengthwise.metrics import Counts

UNKNOWN = "\N{EN DASH}"


def rounded(value: float, half_width: float) -> tuple[str, str]:
    """A value and its half-width as text: two digits of the latter, at most four of the former.

    A half-width always shows a digit other than 0. Without one the value has three digits and
    the second text is empty.
    """
    if not math.isfinite(value):
        return UNKNOWN, ""
    if not (math.isfinite(half_width) and half_width > 0):
        return _fixed(value, _decimals(value, 3)), "0" if half_width == 0 else ""
    decimals = max(_decimals(half_width, 1), min(_decimals(half_width, 2), _decimals(value, 4)))
    return _fixed(value, decimals), _fixed(half_width, decimals)


def span(low: float, high: float) -> str:
    """An interval's ends as text, "1.1 to 1.5" with a dash: two digits of each, up to four where it is narrow."""
    fine = _decimals((high - low) / 2, 1)
    ends = (_fixed(end, max(_decimals(end, 2), min(fine, _decimals(end, 4)))) for end in (low, high))
    return "\N{EN DASH}".join(ends)


def percent(share: float) -> str:
    """A share as a whole percentage ("37 %"), with a decimal below 1 %."""
    if not math.isfinite(share):
        return UNKNOWN
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def seconds(value: float) -> str:
    """A time with the unit that suits it ("12.3 ms", "4.56 s")."""
    if not math.isfinite(value):
        return UNKNOWN
    scale, unit = (1e3, "ms") if abs(value) < 1 else (1.0, "s")
    return f"{rounded(value * scale, math.nan)[0]} {unit}"


def _decimals(value: float, digits: int) -> int:
    """Decimals that show so many digits of a value; never below 0."""
    if value == 0 or not math.isfinite(value):
        return 0
    return min(9, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def _fixed(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}"


def buckets(counts: Counts, noun: str = "") -> list[str]:
    """How many finished of how many, then the other buckets; those that are empty go without saying."""
    others = {"rejected": counts.rejected, "timed out": counts.timed_out, "unfinished": counts.unfinished}
    parts = [f"{counts.finished:,} of {counts.arrivals:,} {noun}".rstrip() + " finished"]
    return parts + [f"{count:,} {name}" for name, count in others.items() if count]
