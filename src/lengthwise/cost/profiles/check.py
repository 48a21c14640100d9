"""Compares a new profile with an old profile, operator by operator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.profile import COLUMNS, OPERATOR_PARTS, Profile

_SHAPE = (
    "tp", "dtype", "kv_dtype", "n", "k", "heads", "kv_heads", "head_dim", "window", "experts", "topk", "gpus",
)  # fmt: skip
_LINE = {"prefill": "context", "decode": "kv_tokens", "mixed": "kv_tokens", "comm": "bytes", "send": "bytes"}
"""By part: the axis along which its operators are interpolated; other operators are interpolated by tokens."""

_AXES = ("tokens", "seqs", "chunk", "context", "kv_tokens", "bytes", "skew")
_UNITS = {"decode": "KV tokens", "comm": "bytes", "send": "bytes", "head": "sequences", "host": "sequences"}
MAX_DISTANCE = 2.05  # points farther apart than this factor are not interpolated
DRAWS = 1000
LEVEL = 0.99  # of intervals: with dozens of operators and regions, several would be outside by chance at 95 %
MIN_COUNT = 3  # fewer points than this without known spreads prove no change
_MAX_SAMPLE = 400


@dataclass(frozen=True)
class TimeRatio:
    """The ratio of new to old times of one operator at one TP degree in one region of sizes."""

    operator: str
    tp: int  # 0: a model-independent kernel
    dtype: str
    region: str  # "small" or "large", split at the geometric middle of the sizes; "all" if there is one size
    sizes: tuple[int, int]  # smallest and largest, in ``unit``
    unit: str  # "tokens", "KV tokens", "sequences" or "bytes"
    points: int  # number of compared points
    ratio: float  # median of new over old
    low: float  # 99 % interval, by a bootstrap over points and their spreads
    high: float
    changed: bool  # the complete interval lies beyond the tolerance


@dataclass(frozen=True)
class ProfileCheck:
    """The result of comparing two profiles: the ratios of their times, and what only one of them has."""

    rows: tuple[TimeRatio, ...]
    tolerance: float
    unmatched: int
    only_new: tuple[str, ...]
    only_old: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def changed(self) -> tuple[TimeRatio, ...]:
        """Return the rows whose times changed significantly by more than the tolerance."""
        return tuple(row for row in self.rows if row.changed)


def check_profiles(new: Profile, old: Profile, *, tolerance: float = 0.05, seed: int = 0) -> ProfileCheck:
    """Find operators whose times changed by more than ``tolerance`` (a share), and more than the spreads explain.

    Points are matched by operator, TP degree, dtype and shape. A new point between two old points that are at most a
    factor of 2.05 apart is compared with their interpolation.

    Raises:
        InputError: The tolerance is not above 0.
        ProfileError: The profiles differ in model or kind, or share no dtype, TP degree, attention backend or point.
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise InputError(f"the tolerance must be above 0; it is {tolerance}")
    _require_same(new, old)
    rng, rows, unmatched = np.random.default_rng(seed), list[TimeRatio](), 0
    shared = [name for name in new.operators if name in old.operators]
    for operator in shared:
        groups, missing = _match(new, old, operator)
        unmatched += missing
        for (tp, dtype), pairs in sorted(groups.items()):
            rows += _compare_regions(operator, tp, dtype, pairs, tolerance, rng)
    if not rows:
        raise ProfileError(
            "the profiles must share points; they share none: no operator has equal or neighbouring sizes, TP and "
            f"dtype in both (operators in both: {', '.join(shared) or 'none'})"
        )
    names = {"GPU": (new.metadata.gpu, old.metadata.gpu), "engine": (new.metadata.engine, old.metadata.engine)}
    notes = [f"the {key} differs: {now} (new), {then} (old)" for key, (now, then) in names.items() if now != then]
    only_new, only_old = (tuple(name for name in one.operators if name not in shared) for one in (new, old))
    return ProfileCheck(tuple(rows), tolerance, unmatched, only_new, only_old, tuple(notes))


def _require_same(new: Profile, old: Profile) -> None:
    models = [one.metadata.model or "no model (kernels)" for one in (new, old)]
    if models[0] != models[1]:
        raise ProfileError(f"both profiles must be of one model; they are of {' and '.join(models)}")
    of_shards = ((one["tp"] > 0).any() for one in (new, old))
    kinds = ["operators of a model's shards" if has_tp else "model-independent kernels" for has_tp in of_shards]
    if kinds[0] != kinds[1]:
        raise ProfileError(f"both profiles must be of one kind; one holds {kinds[0]}, the other {kinds[1]}")
    dtypes = [sorted(set(one["dtype"].tolist()) - {""}) for one in (new, old)]
    if all(dtypes) and not set(dtypes[0]) & set(dtypes[1]):
        listed = " and ".join(", ".join(own) for own in dtypes)
        raise ProfileError(f"both profiles must be of one dtype; they are of {listed}")
    degrees = [one.tensor_parallel for one in (new, old)]
    if all(degrees) and not set(degrees[0]) & set(degrees[1]):
        first, second = (f"TP {', '.join(map(str, own))}" for own in degrees)
        raise ProfileError(f"both profiles must share a TP degree; one has {first}, the other {second}")
    for operator in new.operators:
        if OPERATOR_PARTS[operator] not in ("prefill", "decode"):
            continue
        now, before = (sorted(set(one.of(operator)["backend"].tolist()) - {""}) for one in (new, old))
        # A name within another, such as fa3 in a longer one, may be the same backend.
        if now and before and not any(a in b or b in a for a in now for b in before):
            raise ProfileError(
                f"both profiles must be of one attention backend; {operator} is of {', '.join(now)} in one, "
                f"of {', '.join(before)} in the other. Measure both with the same"
            )


@dataclass(frozen=True)
class _Pairs:
    """Points that both profiles have, as columns [n]. ``noise`` is the error of ``log_ratio``, or NaN if unknown."""

    log_ratio: Floats  # log of new over old seconds
    noise: Floats
    size: Floats  # of the step, in the unit of its part


def _match(new: Profile, old: Profile, operator: str) -> tuple[dict[tuple[int, str], _Pairs], int]:
    left, right = _timed_rows(new, operator), _timed_rows(old, operator)
    shape = [*_SHAPE, *(["backend"] if set(left["backend"]) & set(right["backend"]) else [])]
    place = [*shape, *_AXES]
    # Repeated measurements of a place count by their median.
    medians = pl.col("seconds").median(), (pl.col("noise").mean() / pl.len().sqrt()).alias("noise")
    left, right = (table.group_by(place, maintain_order=True).agg(*medians) for table in (left, right))
    both = left.join(right, on=place, suffix="_old", nulls_equal=True)
    rest = left.join(right, on=place, how="anti", nulls_equal=True)
    between = _interpolate(rest, right, shape, _LINE.get(OPERATOR_PARTS[operator], "tokens"))
    columns = ["tp", "dtype", *_AXES, "seconds", "noise", "seconds_old", "noise_old"]
    found = pl.concat([both.select(columns), between.select(columns)])
    by_shard = found.group_by("tp", "dtype", maintain_order=True)
    groups = {(int(tp), str(dtype)): _pairs(group, operator) for (tp, dtype), group in by_shard}
    return groups, len(left) - len(found)


def _timed_rows(profile: Profile, operator: str) -> pl.DataFrame:
    own = profile.of(operator)
    table = pl.DataFrame({n: own[n].tolist() if own[n].dtype.kind == "U" else own[n] for n in COLUMNS})
    table = table.with_columns(skew=pl.when(pl.col("skew") <= 1).then(1.0).otherwise(pl.col("skew").round(6)))
    # The error of a median of r repeats is 1.25 sd / sqrt(r); the quartiles of a normal are 1.349 sd apart.
    repeats = pl.max_horizontal("repeats", 1).sqrt()
    noise = pl.col("spread_s") / 1.349 * 1.25 / repeats / pl.col("seconds")
    return table.filter(pl.col("seconds") > 0).with_columns(noise=noise)


def _interpolate(rest: pl.DataFrame, old: pl.DataFrame, shape: list[str], axis: str) -> pl.DataFrame:
    """Return the rows of ``rest`` that lie between two old points which differ only in ``axis``, with the old time.

    ``rest`` are points of the new profile that the old one lacks. The old time is interpolated between the two points,
    linearly in the logarithms.
    """
    line = [*shape, *(name for name in _AXES if name != axis)]
    points = old.filter(pl.col(axis) > 0).sort(axis)
    points = points.select(*line, pl.col(axis).cast(pl.Int64), at=axis, s="seconds", e="noise")
    rest = rest.filter(pl.col(axis) > 0).with_row_index("row").sort(axis)
    options = {"on": axis, "by": line, "check_sortedness": False}
    below = rest.join_asof(points, strategy="backward", **options)  # type: ignore[arg-type]
    above = rest.join_asof(points, strategy="forward", **options).select(  # type: ignore[arg-type]
        "row", at_above="at", s_above="s", e_above="e"
    )
    joined = below.join(above, on="row").filter(
        pl.col("at").is_not_null() & pl.col("at_above").is_not_null(), pl.col("at_above") <= MAX_DISTANCE * pl.col("at")
    )
    share = ((pl.col(axis) / pl.col("at")).log() / (pl.col("at_above") / pl.col("at")).log()).fill_nan(0.0)
    return joined.with_columns(
        seconds_old=(pl.col("s").log() * (1 - share) + pl.col("s_above").log() * share).exp(),
        noise_old=pl.max_horizontal("e", "e_above"),
    )


def _pairs(found: pl.DataFrame, operator: str) -> _Pairs:
    columns = {name: found[name].to_numpy().astype(np.float64) for name in found.columns if name != "dtype"}
    new, old = columns["noise"], columns["noise_old"]
    known = np.isfinite(new) | np.isfinite(old)
    noise = np.where(known, np.hypot(np.nan_to_num(new), np.nan_to_num(old)), np.nan)
    size = {
        "prefill": columns["chunk"] + columns["context"],
        "decode": columns["kv_tokens"],
        "mixed": columns["chunk"] + columns["context"] + columns["kv_tokens"],
        "comm": columns["bytes"],
        "send": columns["bytes"],
    }.get(OPERATOR_PARTS[operator], columns["tokens"])
    return _Pairs(np.log(columns["seconds"] / columns["seconds_old"]), noise, size)


def _compare_regions(
    operator: str, tp: int, dtype: str, pairs: _Pairs, tolerance: float, rng: np.random.Generator
) -> list[TimeRatio]:
    sizes = np.maximum(pairs.size, 1)
    middle = math.sqrt(float(sizes.min()) * float(sizes.max()))
    regions = {"small": sizes <= middle, "large": sizes > middle}
    if not regions["large"].any():
        regions = {"all": regions["small"]}
    unit, limit = _UNITS.get(OPERATOR_PARTS[operator], "tokens"), math.log1p(tolerance)
    found = []
    for region, mask in regions.items():
        ratio, noise, size = pairs.log_ratio[mask], pairs.noise[mask], pairs.size[mask]
        sample = np.arange(len(ratio))
        if len(ratio) > _MAX_SAMPLE:
            sample = rng.choice(len(ratio), _MAX_SAMPLE, replace=False)
        drawn = rng.choice(sample, (DRAWS, len(sample)))
        errors = np.nan_to_num(noise)[drawn] * rng.standard_normal(drawn.shape)
        medians = np.median(ratio[drawn] + errors, axis=1)
        low, high = (float(end) for end in np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        is_sufficient = len(ratio) >= MIN_COUNT or bool(np.isfinite(noise).all())
        found.append(
            TimeRatio(
                operator, tp, dtype, region, (int(size.min()), int(size.max())), unit, len(ratio),
                math.exp(float(np.median(ratio))), math.exp(low), math.exp(high),
                is_sufficient and (low > limit or high < -limit),
            )
        )  # fmt: skip
    return found
