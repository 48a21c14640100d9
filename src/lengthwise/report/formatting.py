"""Numbers as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lengthwise.schema.estimate import Estimate

if TYPE_CHECKING:
    from lengthwise.metrics import Counts

UNKNOWN = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"


def rounded(value: float, half_width: float) -> tuple[str, str]:
    """Return a value and its half-width as text, with equally many decimals.

    The half-width has two significant digits, or one where the value would otherwise have more than four. It is "" if
    it is unknown, and "0" if it is zero.
    """
    if not math.isfinite(value):
        return UNKNOWN, ""
    is_zero = half_width <= 1e-12 * abs(value)  # the rounding error of a mean of equal values
    if is_zero or not math.isfinite(half_width):
        return amount(value), "0" if is_zero else ""
    decimals = max(_decimals(half_width, 1), min(_decimals(half_width, 2), _decimals(value, 4)))
    return f"{value:,.{decimals}f}", f"{half_width:,.{decimals}f}"


def amount(value: float) -> str:
    """Return a number with three significant digits, or with all digits before the decimal point if they are more."""
    return f"{value:,.{_decimals(value, 3)}f}" if math.isfinite(value) else UNKNOWN


def two_digits(value: float) -> str:
    """Return a number with two significant digits, or with all digits before the decimal point if they are more."""
    return f"{value:,.{_decimals(float(f'{value:.1e}'), 2)}f}"


def span(low: float, high: float) -> str:
    """Return the ends of an interval ("1.1-1.5") with two digits each, or up to four if the interval is narrow."""
    if low.is_integer() and high.is_integer():
        return f"{low:,.0f}\N{EN DASH}{high:,.0f}"
    fine = _decimals((high - low) / 2, 1)
    decimals = (max(_decimals(end, 2), min(fine, _decimals(end, 4))) for end in (low, high))
    return "\N{EN DASH}".join(f"{end:,.{d}f}" for end, d in zip((low, high), decimals, strict=True))


def model_text(estimate: Estimate, scale: float = 1.0) -> str:
    """Return the interval of the cost model's error ("(1.1-1.5)"), or "" if it is unknown."""
    if not estimate.has_model_interval:
        return ""
    return f"({span(estimate.model_low * scale, estimate.model_high * scale)})".replace("inf", "\N{INFINITY}")


def signed(value: float, decimals: int = 1) -> str:
    """Return a number with its sign, which is a true minus below 0 ("+1.2")."""
    return f"{value:+z,.{decimals}f}".replace("-", MINUS)


def percent(share: float) -> str:
    """Return a share as a percentage without decimals ("37 %"), or with one decimal if it is below 1 %."""
    if not math.isfinite(share):
        return UNKNOWN
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def seconds(value: float) -> str:
    """Return a time in milliseconds or seconds ("12.3 ms", "4.56 s")."""
    if not math.isfinite(value):
        return UNKNOWN
    return f"{amount(value * 1e3)} ms" if abs(value) < 1 else f"{amount(value)} s"


def capitalized(text: str) -> str:
    """Return the text with the first letter in upper case. Other letters do not change, unlike ``str.capitalize``."""
    return text[:1].upper() + text[1:]


def counted(count: int, noun: str) -> str:
    """Return a count with its noun ("1 GPU", "1,024 tokens")."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def buckets(counts: Counts, noun: str = "") -> list[str]:
    """Return the number of finished requests, and then the number for every other outcome that occurred, as text."""
    others = {"rejected": counts.rejected, "timed out": counts.timed_out, "unfinished": counts.unfinished}
    parts = [f"{counts.finished:,} of {counts.arrivals:,} {noun}".rstrip() + " finished"]
    return parts + [f"{count:,} {name}" for name, count in others.items() if count]


def _decimals(value: float, digits: int) -> int:
    if value == 0 or not math.isfinite(value):
        return 0
    return min(9, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
