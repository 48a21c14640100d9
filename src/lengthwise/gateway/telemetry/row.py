"""A request that is over, in one row: what the journal keeps, and what every look back is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

Again = tuple[int, float]
"""(tokens that had come, total predicted then)"""


MOST = 1 << 53
"""Beyond it no number of JSON is whole."""


@dataclass(frozen=True, slots=True)
class Row:
    """Times are of the gateway's clock; one that never came is NaN. No prompt, no key, no text.

    Attributes:
        id: In order of arrival.
        model: Asked for.
        tenant: Its name.
        priority: Class; smaller goes first.
        arrival_s: When its body had come.
        prompt_tokens: Counted or estimated.
        max_tokens: The longest output it asked for.
        predicted_tokens: Before its first token.
        source: Of that prediction.
        predicted_level: The share of the predicted distribution below the true length, 0 to 1: uniform where
            predictions are right.
        again: What was predicted later, as tokens came.
        output_tokens: That came.
        waited_s: In the gateway's queue in all.
        dispatched_s: First sent to an engine.
        first_token_s: Its first token came; NaN where the answer came whole.
        ended_s: Over.
        served_s: At engines in all.
        worker: The last.
        preemptions: How often it was cut.
        resumed_tokens: Tokens that it kept over cuts and fail-overs.
        failovers: How often an engine failed it.
        outcome: One of ``request.Outcome``.
    """

    id: int
    model: str
    tenant: str
    priority: int
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    predicted_tokens: float
    source: str
    predicted_level: float
    again: tuple[Again, ...]
    output_tokens: int
    waited_s: float
    dispatched_s: float
    first_token_s: float
    ended_s: float
    served_s: float
    worker: str
    preemptions: int
    resumed_tokens: int
    failovers: int
    outcome: str

    @property
    def jct_s(self) -> float:
        """Arrival to end."""
        return self.ended_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.arrival_s


def as_dict(row: Row) -> dict[str, Any]:
    """The row for JSON: what is not known is None, seconds to the microsecond."""
    return {name: _plain(value) for name, value in asdict(row).items()}


def from_dict(told: Mapping[str, Any]) -> Row:
    """The row that ``as_dict`` told; raises KeyError, TypeError or ValueError where it is none."""
    values = {name: told[name] for name in _NAMES}
    for name in _FLOATS:
        values[name] = math.nan if values[name] is None else float(values[name])
    for name in _WHOLE:
        if not abs(values[name]) <= MOST:
            raise ValueError(f"{name} must be a whole number; it is {values[name]!r}")
        values[name] = int(values[name])
    for name in _TEXTS:
        if not isinstance(values[name], str):
            raise TypeError(f"{name} must be a text; it is {values[name]!r}")
    values["again"] = tuple((int(at), float(total)) for at, total in values["again"] if abs(at) <= MOST)
    return Row(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


_NAMES = tuple(field.name for field in fields(Row))
_FLOATS = tuple(field.name for field in fields(Row) if field.type == "float")
_TEXTS = tuple(field.name for field in fields(Row) if field.type == "str")
_WHOLE = tuple(field.name for field in fields(Row) if field.type == "int")
