"""Several seeds into one summary, and two variants into their difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lengthwise.metrics.summary import Slo, Summary
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.statistics import mean_estimate

Estimates = Callable[[list[Estimate]], Estimate]


def combine(summaries: Sequence[Summary]) -> Summary:
    """Means over independent seeds, with Student t intervals over the seeds.

    Counts are summed. A number that one seed cannot tell (NaN) is NaN. Ends of model intervals are
    means, too: the cost model is wrong in the same way at every seed. The only summary of a
    single seed comes back as it is, batch-means intervals and all.

    Raises:
        InputError: Nothing is given, a seed stands there twice, or SLOs or levels differ.
    """
    _check(summaries)
    if len(summaries) == 1:
        return summaries[0]
    level = summaries[0].level
    merged: Summary = _merge(summaries, lambda parts: _over_seeds(parts, level))
    seeds = tuple(s.seeds[0] for s in summaries)
    return dataclasses.replace(merged, seeds=seeds, intervals="seeds")


def difference(a: Sequence[Summary], b: Sequence[Summary], *, relative: bool = False) -> Summary:
    """What ``a`` has more than ``b``: paired t intervals of a - b over common seeds.

    With the same seeds (the same requests at the same times) most of the noise is common to
    both and falls out, so that two variants can be told apart even where their own intervals
    overlap. An interval without 0 in it is a difference. Counts are differences of sums.

    Args:
        a: One summary a seed.
        b: One summary a seed, of the same seeds in any order.
        relative: Differences as shares of b, (a - b) / b, seed by seed.

    Raises:
        InputError: The seeds of both are not the same, or a seed stands there twice.
    """
    _check(a)
    _check(b)
    by_seed = {s.seeds: s for s in b}
    if {s.seeds for s in a} != set(by_seed):
        raise InputError(
            f"a paired difference needs the same seeds on both sides; {sorted(s.seeds[0] for s in a)} "
            f"came with {sorted(s.seeds[0] for s in b)}"
        )
    level = a[0].level
    pairs = [_merge((x, by_seed[x.seeds]), lambda p: _minus(p[0], p[1], relative=relative), sign=-1) for x in a]
    merged: Summary = _merge(pairs, lambda parts: mean_estimate([p.value for p in parts], level))
    return dataclasses.replace(merged, seeds=tuple(s.seeds[0] for s in a), intervals="difference")


def _check(summaries: Sequence[Summary]) -> None:
    if not summaries:
        raise InputError("at least one summary is needed; the list is empty")
    seeds = [s.seeds for s in summaries]
    if any(len(s) != 1 for s in seeds):
        raise InputError("summaries of single seeds are needed; one of these combines several already")
    if len(set(seeds)) < len(seeds):
        twice = sorted({s[0] for s in seeds if seeds.count(s) > 1})
        raise InputError(f"every seed must stand there once, or intervals come out too narrow; twice: {twice}")


def _over_seeds(parts: list[Estimate], level: float) -> Estimate:
    mean = mean_estimate([p.value for p in parts], level)
    low, high = (float(np.mean([getattr(p, end) for p in parts])) for end in ("model_low", "model_high"))
    return mean if math.isnan(low) or math.isnan(high) else Estimate(mean.value, mean.half_width, low, high)


def _minus(a: Estimate, b: Estimate, *, relative: bool) -> Estimate:
    off = a.value - b.value
    if not relative:
        return Estimate(off)
    return Estimate(off / b.value if b.value else float("nan"))


def _merge(parts: Sequence[Any], estimates: Estimates, sign: int = 1) -> Any:
    """One tree out of trees of the same shape, leaf by leaf."""
    match parts[0]:
        case Estimate():
            merged: Any = estimates(list(parts))
        case dict() as first:
            merged = {key: _merge([p[key] for p in parts], estimates, sign) for key in first}
        case tuple():
            merged = _merge_tuple(parts, estimates, sign)
        case int() as first:
            merged = first + sign * sum(parts[1:])
        case float():
            merged = max(parts)
        case str() as first:
            merged = first
        case Slo() | None:
            merged = _same(parts)
        case first:
            merged = _record(parts, type(first), estimates, sign)
    return merged


def _record(parts: Sequence[Any], kind: Any, estimates: Estimates, sign: int) -> Any:
    if any(not isinstance(p, kind) for p in parts):
        return _same(parts)
    fields = [f.name for f in dataclasses.fields(kind)]
    return kind(**{f: _merge([getattr(p, f) for p in parts], estimates, sign) for f in fields})


def _merge_tuple(parts: Sequence[tuple[Any, ...]], estimates: Estimates, sign: int) -> tuple[Any, ...]:
    """Estimates by replica; variants with other numbers of replicas have none in common."""
    if all(isinstance(x, int) for x in parts[0]):
        return parts[0]
    if len({len(p) for p in parts}) > 1:
        return ()
    return tuple(_merge(column, estimates, sign) for column in zip(*parts, strict=True))


def _same(parts: Sequence[Any]) -> Any:
    if any(p != parts[0] for p in parts):
        raise InputError(
            f"summaries must agree on SLO and deployment given or not; they differ: {parts[0]}, {parts[1]}"
        )
    return parts[0]


SHARES = frozenset({"share", "met", "busy_share", "mfu", "mbu", "kv_utilization", "time_shares"})
"""Fields of a summary whose numbers cannot be above 1."""


def with_model_error(summary: Summary, run: Summary, perturbed: Sequence[Summary], level: float = 0.9) -> Summary:
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
    told: Summary = _report(summary, run, list(perturbed), level, "")
    return dataclasses.replace(told, model_level=level)


def _report(of: Any, run: Any, runs: list[Any], level: float, name: str) -> Any:
    """The tree with an interval on each leaf; what the runs do not all have stays as it is."""
    if any(type(one) is not type(of) for one in (run, *runs)):
        return of
    if isinstance(of, Estimate):
        return _interval(of, run.value, [one.value for one in runs], level, 1.0 if name in SHARES else math.inf)
    if isinstance(of, dict):
        return {key: _report(part, run[key], [one[key] for one in runs], level, name) for key, part in of.items()}
    if isinstance(of, tuple):
        return _tuple_with_error(of, run, runs, level, name)
    if dataclasses.is_dataclass(of) and not isinstance(of, type):
        fields = [field.name for field in dataclasses.fields(of)]
        parts = {
            f: _report(getattr(of, f), getattr(run, f), [getattr(one, f) for one in runs], level, f) for f in fields
        }
        return dataclasses.replace(of, **parts)
    return of


def _tuple_with_error(of: tuple[Any, ...], run: Any, runs: list[Any], level: float, name: str) -> tuple[Any, ...]:
    if len({len(of), len(run), *(len(one) for one in runs)}) > 1:
        return of
    return tuple(_report(part, run[i], [one[i] for one in runs], level, name) for i, part in enumerate(of))


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
