"""Requests of a log that predictors learn from, as they were served: to simulate what they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.predict._rows import FAILED, Row
from lengthwise.predict.contract import Ints
from lengthwise.predict.distribution import Floats
from lengthwise.predict.read import _nothing, _raw_rows, _told
from lengthwise.predict.tokens import estimated_tokens
from lengthwise.schema.errors import InputError

_TIMES = {
    "arrival_s": 1.0, "arrived_at": 1.0, "arrival_time": 1.0, "arrival": 1.0, "timestamp": 1.0, "start_time": 1.0,
    "created": 1.0, "created_at": 1.0, "time": 1.0, "timestamp_ms": 1e-3, "arrival_time_ns": 1e-9,
}  # fmt: skip
"""Names of a column of arrivals, the first that is there counts, and seconds in its unit."""


@dataclass(frozen=True)
class Served:
    """Requests of a log, one a row; failed and empty ones are left out.

    Attributes:
        prompt_tokens: [n] counted, or estimated from the text; 1 where there is neither.
        output_tokens: [n] counted, or estimated. What was cut counts as long as it came.
        texts: Columns "prompt", "output" and "model" of [n] texts, those that any row has.
        arrival_s: [n] seconds on the log's clock; None where no row has any.
        estimated: How many requests had a length estimated.
        left_out: How many rows failed or put out nothing.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    texts: dict[str, Any]
    arrival_s: Floats | None
    estimated: int
    left_out: int


def served(file: Path | str) -> Served:
    """The requests of a file that ``read`` understands, in its order.

    Raises:
        InputError: The file is missing or damaged, a row has neither an output nor its length, some rows
            have a time and others none, or no request is left.
    """
    path = Path(file)
    rows, times, left_out = [], [], 0
    for number, raw in _raw_rows(path):
        row = _told(raw, path, number)
        if row.tokens is None and (row.finish or "") not in FAILED and not raw.get("error"):
            raise InputError(_nothing(path, number, raw))
        if not row.tokens or (row.finish or "") in FAILED:
            left_out += 1
            continue
        rows.append(row)
        times.append(_time(raw, path, number))
        if (times[-1] is None) != (times[0] is None):
            raise InputError(f"{path}: all rows must have a time of arrival, or none; row {number} differs")
    if not rows:
        raise InputError(f"{path} must hold a request with an output; there is none")
    return Served(
        np.array([max(1, _prompt_tokens(row)) for row in rows], np.int64),
        np.array([row.tokens for row in rows], np.int64),
        _texts(rows),
        None if times[0] is None else np.array(times, float),
        sum(r.output_tokens is None or r.prompt_tokens is None for r in rows),
        left_out,
    )


def _prompt_tokens(row: Row) -> int:
    if row.prompt_tokens is not None:
        return row.prompt_tokens
    return estimated_tokens(row.prompt) if row.prompt else 1


def _texts(rows: list[Row]) -> dict[str, Any]:
    columns = {name: [getattr(row, name) for row in rows] for name in ("prompt", "output", "model")}
    told = {name: column for name, column in columns.items() if any(v is not None for v in column)}
    return {name: np.array([v or "" for v in column], object) for name, column in told.items()}


def _time(raw: Mapping[str, Any], path: Path, number: int) -> float | None:
    found = {str(key).strip().lower(): value for key, value in raw.items()}
    name = next((name for name in _TIMES if found.get(name) not in (None, "")), None)
    if name is None:
        return None
    value = found[name]
    try:
        seconds = float(value) * _TIMES[name]
    except (TypeError, ValueError):
        seconds = _date(value)
    if not np.isfinite(seconds):
        raise InputError(f"{path}, row {number}: {name} must be seconds or a date; it is {value!r:.60}")
    return seconds


def _date(value: Any) -> float:
    try:
        date = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        return float("nan")
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
