"""Parses the latency limits and regression bounds on the command line of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.config.search_space import unit_notes
from lengthwise.metrics import Slo
from lengthwise.schema import metric_names
from lengthwise.schema.errors import InputError

_UNITS_S = {"ms": 1e-3, "us": 1e-6, "min": 60.0, "s": 1.0, "h": 3600.0, "": 1.0}  # "s" after the units that end in s
_LIMITED = {"ttft": "ttft_s", "tpot": "tpot_s", "jct": "jct_s"}


def slo_of(texts: Sequence[str]) -> tuple[Slo | None, list[str]]:
    """Parse latency limits such as "ttft=2s"; None without limits. Also return notes on numbers without unit."""
    limits: dict[str, float] = {}
    notes: list[str] = []
    for text in texts:
        name, _, limit = (part.strip() for part in text.partition("="))
        unit = next(unit for unit in _UNITS_S if limit.endswith(unit))
        try:
            key = metric_names.split(name)[0]
            limits[_LIMITED[key]] = float(limit.removesuffix(unit)) * _UNITS_S[unit]
            if not limits[_LIMITED[key]] > 0:
                raise InputError(f"--slo must have a time above 0; it is {text!r}")
            notes += [] if unit else unit_notes({key: limits[_LIMITED[key]]}, "--slo ")
        except (KeyError, ValueError):
            raise InputError(f"--slo must be like ttft=2s, tpot=100ms or jct=1min; it is {text!r}") from None
    return Slo(**limits) if limits else None, notes


def bounds_of(texts: Sequence[str]) -> dict[str, float]:
    """Parse bounds such as "ttft.p95=10%" into shares by metric and statistic: {"ttft.p95": 0.1}."""
    bounds: dict[str, float] = {}
    for text in texts:
        name, _, share = (part.strip() for part in text.partition("="))
        key = ".".join(filter(None, metric_names.split(name)))
        try:
            bounds[key] = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        except ValueError:
            raise InputError(f"--fail-above must be like ttft.p95=0.10; it is {text!r}") from None
        if not bounds[key] >= 0:
            raise InputError(f"--fail-above must have a share of at least 0; it is {text!r}")
    return bounds
