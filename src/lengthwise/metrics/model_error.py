"""From runs under cost tables that are a little off: how far the cost model moves each number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lengthwise.metrics.summary import Summary
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate

SHARES = frozenset({"share", "met", "busy_share", "mfu", "mbu", "kv_utilization", "time_shares"})
"""Fields of a summary whose numbers cannot be above 1."""


def with_model_error(
    summary: Summary, run: Summary, perturbed: Sequence[Summary], level: float = 0.9
) -> Summary:
    """The summary with a model interval on every number that all runs can tell.

    The interval runs between quantiles of the same number over the perturbed runs and holds the number
    itself. Where ``summary`` is over several seeds and ``run`` is one of them, the interval moves with it in
    proportion (for a number that is 0 in ``run``: by the difference).

    Args:
        summary: What is to be shown.
        run: One run of it, under the tables as they are.
        perturbed: The same requests, at the same seed, under tables that are a little off.
        level: Share of the perturbed runs that lie within.

    Raises:
        InputError: There is no perturbed run, or ``level`` is not between 0 and 1.
    """
    if not perturbed or not 0 < level < 1:
        raise InputError(
            f"a model interval needs runs and a level between 0 and 1; there are {len(perturbed)} at level {level}"
        )
    told: Summary = _told(summary, run, list(perturbed), level, "")
    return dataclasses.replace(told, model_level=level)


def _told(of: Any, run: Any, runs: list[Any], level: float, name: str) -> Any:
    """The tree with an interval on each leaf; what the runs do not all have stays as it is."""
    if any(type(one) is not type(of) for one in (run, *runs)):
        return of
    if isinstance(of, Estimate):
        return _interval(
            of, run.value, [one.value for one in runs], level, 1.0 if name in SHARES else math.inf
        )
    if isinstance(of, dict):
        return {
            key: _told(part, run[key], [one[key] for one in runs], level, name) for key, part in of.items()
        }
    if isinstance(of, tuple):
        return _tuple(of, run, runs, level, name)
    if dataclasses.is_dataclass(of) and not isinstance(of, type):
        fields = [field.name for field in dataclasses.fields(of)]
        parts = {
            f: _told(getattr(of, f), getattr(run, f), [getattr(one, f) for one in runs], level, f)
            for f in fields
        }
        return dataclasses.replace(of, **parts)
    return of


def _tuple(of: tuple[Any, ...], run: Any, runs: list[Any], level: float, name: str) -> tuple[Any, ...]:
    if len({len(of), len(run), *(len(one) for one in runs)}) > 1:
        return of
    return tuple(_told(part, run[i], [one[i] for one in runs], level, name) for i, part in enumerate(of))


def _interval(of: Estimate, base: float, values: list[float], level: float, top: float) -> Estimate:
    """With both ends; as it is where any run cannot tell the number."""
    if not all(map(math.isfinite, (of.value, base, *values))):
        return of
    tails = [0.5 - level / 2, 0.5 + level / 2]
    low, high = np.quantile(values, tails, method="hazen")
    low, high = min(float(low), base), max(float(high), base)
    if base > 0:
        low, high = of.value * (low / base), of.value * (high / base)
    else:
        low, high = of.value + low - base, of.value + high - base
    return dataclasses.replace(of, model_low=low, model_high=min(high, max(top, of.value)))
