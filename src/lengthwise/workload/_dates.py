"""Seconds from dates as traces write them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import polars as pl

_TICKS_PER_S = 1e7
_WRITTEN = "%Y-%m-%d %H:%M:%S%.f"


def is_date(text: str | None) -> bool:
    """Whether a single text is such a date; quick for one, where polars is quick for many."""
    try:
        return text is not None and (text.isdigit() or datetime.fromisoformat(text) is not None)
    except ValueError:
        return False


def parse_dates(series: pl.Series) -> npt.NDArray[np.float64] | None:
    """Seconds since the first of the dates, [n]; None where one is not a date.

    Dates look like 2023-11-16 18:15:46.6805900, with a T or a zone allowed, or are all whole numbers of
    100 ns (.NET ticks).
    """
    import polars as pl

    ticks = series.cast(pl.Int64, strict=False)
    per_s = _TICKS_PER_S
    if ticks.null_count():
        plain = series.str.replace("T", " ", literal=True)
        if len(plain) and (plain[0] or "")[19:].strip(".0123456789"):
            zoned = plain.str.replace("Z", "+00:00", literal=True)
            dates = zoned.str.to_datetime(f"{_WRITTEN}%#z", time_unit="ns", strict=False)
        else:
            dates = plain.str.to_datetime(_WRITTEN, time_unit="ns", strict=False)
        ticks, per_s = dates.to_physical(), 1e9
    if ticks.null_count():
        return None
    numbers = ticks.to_numpy()
    seconds: npt.NDArray[np.float64] = (numbers - numbers[:1]) / per_s
    return seconds
