"""Combination of the summaries of several seeds, and differences between two variants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lengthwise.metrics.prefix_cache import PrefixCacheStatistics
from lengthwise.metrics.summary import Slo, Summary
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.statistics import drawn_estimate, mean_estimate, share_half_width

Estimates = Callable[[list[Estimate]], Estimate]

AT_MOST_ONE = frozenset(
    {"share", "met", "busy_share", "mfu", "mbu", "kv_utilization", "time_shares", "hit_rate", "saved_share"}
)


def combine(summaries: Sequence[Summary]) -> Summary:
    """Return the means of several summaries over their seeds, with Student t intervals over the seeds.

    Counts are summed. A value that is NaN for one seed is NaN. The ends of model intervals are averaged, because the
    cost model has the same error at every seed. If the share of requests within an SLO is equal at all seeds, it has
    the score interval of that share over the requests of all seeds. A single summary is returned as it is, with its
    batch-means intervals. All summaries must have the same confidence level, which is not checked. Raises InputError if
    there is no summary, one covers several seeds, a seed occurs twice, SLOs differ, or only some have a deployment.
    """
    _check_seeds(summaries)
    if len(summaries) == 1:
        return summaries[0]
    level = summaries[0].intervals.level

    def over_seeds(parts: list[Estimate]) -> Estimate:
        mean = mean_estimate([part.value for part in parts], level)
        low, high = (float(np.mean([getattr(part, end) for part in parts])) for end in ("model_low", "model_high"))
        if math.isnan(low) or math.isnan(high):
            return mean
        return dataclasses.replace(mean, model_low=low, model_high=high)

    def with_interval(share: Estimate) -> Estimate:
        of_all_requests = share_half_width(share.value, merged.counts.arrivals, level)
        return share if share.half_width > 1e-12 else dataclasses.replace(share, half_width=of_all_requests)

    seeds = tuple(s.seeds[0] for s in summaries)
    merged: Summary = _merge(summaries, over_seeds)
    goodput = merged.goodput
    if goodput is not None:
        met = {name: with_interval(share) for name, share in goodput.met.items()}
        goodput = dataclasses.replace(goodput, share=with_interval(goodput.share), met=met)
    intervals = dataclasses.replace(merged.intervals, source="seeds")
    return dataclasses.replace(merged, seeds=seeds, intervals=intervals, goodput=goodput)


def difference(a: Sequence[Summary], b: Sequence[Summary], *, relative: bool = False) -> Summary:
    """Return the means over seeds of the differences a - b, with paired t intervals. Both sides have the same seeds.

    Runs of the same seed and workload have the same requests at the same times, so that most of the noise cancels.
    Therefore differences can be significant even if the variants' own intervals overlap. Counts are differences of
    sums. With ``relative``, the differences are (a - b) / b. Raises InputError if the seeds of both sides differ, or a
    seed repeats.
    """
    _check_seeds(a)
    _check_seeds(b)
    by_seed = {s.seeds: s for s in b}
    if {s.seeds for s in a} != set(by_seed):
        raise InputError(
            f"a paired difference needs the same seeds on both sides; {sorted(s.seeds[0] for s in a)} "
            f"came with {sorted(s.seeds[0] for s in b)}"
        )

    def subtract(pair: list[Estimate]) -> Estimate:
        change, reference = pair[0].value - pair[1].value, pair[1].value
        if not relative:
            return Estimate(change)
        return Estimate(change / reference if reference else math.nan)

    level = a[0].intervals.level
    pairs = [_merge((x, by_seed[x.seeds]), subtract, sign=-1) for x in a]
    merged: Summary = _merge(pairs, lambda parts: mean_estimate([part.value for part in parts], level))
    intervals = dataclasses.replace(merged.intervals, source="difference")
    return dataclasses.replace(merged, seeds=tuple(s.seeds[0] for s in a), intervals=intervals)


def _check_seeds(summaries: Sequence[Summary]) -> None:
    if not summaries:
        raise InputError("at least one summary is needed; the list is empty")
    seeds = [s.seeds for s in summaries]
    if any(len(s) != 1 for s in seeds):
        raise InputError("summaries of single seeds are needed; one of these combines several already")
    if len(set(seeds)) < len(seeds):
        repeated = sorted({s[0] for s in seeds if seeds.count(s) > 1})
        raise InputError(f"every seed must occur once, or intervals would be too narrow; repeated: {repeated}")


def _merge(parts: Sequence[Any], estimates: Estimates, sign: int = 1) -> Any:  # noqa: C901, PLR0911 - one case for each kind of node
    match parts[0]:
        case Estimate():
            return estimates(list(parts))
        case dict() as first:
            return {key: _merge([p[key] for p in parts], estimates, sign) for key in first}
        case tuple() as first:
            if all(isinstance(x, int) for x in first):
                return first
            # Variants with different numbers of replicas have no estimates by replica in common.
            if len({len(p) for p in parts}) > 1:
                return ()
            return tuple(_merge(column, estimates, sign) for column in zip(*parts, strict=True))
        case int() as first:
            return first + sign * sum(parts[1:])
        case float():  # a level, which is equal, or a bound of an error
            return max(parts)
        case str() as first:
            return first
        case PrefixCacheStatistics() | None if {type(p) for p in parts} == {PrefixCacheStatistics, type(None)}:
            return None  # one variant's workload shares prefixes, the other's does not
        case first if not isinstance(first, Slo | None) and all(isinstance(p, type(first)) for p in parts):
            names = [f.name for f in dataclasses.fields(first)]
            return type(first)(**{name: _merge([getattr(p, name) for p in parts], estimates, sign) for name in names})
        case first:
            if any(p != first for p in parts):
                raise InputError(
                    f"summaries must have the same SLO, and all or none a deployment; they differ: {first}, {parts[1]}"
                )
            return first


def with_model_error(summary: Summary, run: Summary, perturbed: Sequence[Summary], level: float = 0.9) -> Summary:
    """Return the summary with a model interval on every number that all runs have.

    The interval spans quantiles of the number over the perturbed runs, and includes the number itself. If ``summary``
    covers several seeds and ``run`` is one of them, each perturbed number is first multiplied by the ratio of
    ``summary``'s number to ``run``'s. If ``run``'s number is 0, ``summary``'s number is added instead.

    ``run`` has the unchanged cost tables. ``perturbed`` has at least one run of the same requests at the same seed with
    perturbed tables. ``level``, between 0 and 1, is the share of the perturbed runs inside the interval.
    """
    if not perturbed or not 0 < level < 1:
        raise InputError(
            f"a model interval needs runs and a level between 0 and 1; there are {len(perturbed)} at level {level}"
        )
    extended: Summary = _with_intervals((summary, run, *perturbed), level, "")
    return dataclasses.replace(extended, intervals=dataclasses.replace(extended.intervals, model_level=level))


def _with_intervals(parts: Sequence[Any], level: float, name: str) -> Any:
    node = parts[0]
    if any(type(one) is not type(node) for one in parts):
        return node
    match node:
        case Estimate():
            return _model_interval(parts, level, 1.0 if name in AT_MOST_ONE else math.inf)
        case dict():
            return {key: _with_intervals([one[key] for one in parts], level, name) for key in node}
        case tuple() if len({len(one) for one in parts}) == 1:
            return tuple(_with_intervals(column, level, name) for column in zip(*parts, strict=True))
        case _ if dataclasses.is_dataclass(node) and not isinstance(node, type):
            names = [field.name for field in dataclasses.fields(node)]
            columns = {name: [getattr(one, name) for one in parts] for name in names}
            return dataclasses.replace(node, **{name: _with_intervals(columns[name], level, name) for name in names})
    return node


def _model_interval(parts: Sequence[Estimate], level: float, upper_limit: float) -> Estimate:
    estimate, (value, base, *values) = parts[0], [part.value for part in parts]
    if not all(map(math.isfinite, (value, base, *values))):
        return estimate
    drawn = drawn_estimate(estimate, (base, *values), level)
    return dataclasses.replace(
        estimate, model_low=drawn.model_low, model_high=min(drawn.model_high, max(upper_limit, value))
    )
