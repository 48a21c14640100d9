"""Types of single values: durations and counts."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(us|ms|s|min|h)")


def seconds(value: Any) -> Any:
    """Seconds of "200ms", "2s", "1.5min" or "1h"; any other value comes back as it is.

    Raises:
        ValueError: A text that is no duration.
    """
    if not isinstance(value, str):
        return value
    found = _DURATION.fullmatch(value.strip().lower())
    try:
        if found:
            return float(found[1]) * _UNITS_S[found[2]]
    except ValueError:
        pass
    raise ValueError('must be seconds (2.5) or a text with a unit ("200ms", "2s", "5min", "1h")')


def _number(value: float) -> float:
    if math.isnan(value):
        raise ValueError("must be a number")
    return value


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
NotNan = Annotated[float, BeforeValidator(lambda v: _number(v) if isinstance(v, float) else v)]
Seconds = Annotated[NotNan, BeforeValidator(seconds), Field(gt=0)]
"""Above 0; inf is allowed and means no limit."""
Wait = Annotated[NotNan, BeforeValidator(seconds), Field(ge=0)]
"""Seconds from 0."""
Share = Annotated[NotNan, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A table of a scenario file: no key is ignored, no value is bent into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=True)
