"""Whether a new measurement says something else than an old profile, operator by operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.profile import COLUMNS, OPERATOR_PARTS, Profile

if TYPE_CHECKING:
    import polars as pl

_SHAPE = (
    "tp", "dtype", "kv_dtype", "n", "k", "heads", "kv_heads", "head_dim", "window", "experts", "topk", "gpus",
)  # fmt: skip
_LINE = {"prefill": "context", "decode": "kv_tokens", "mixed": "kv_tokens", "comm": "bytes", "send": "bytes"}
"""The axis along which an operator is interpolated; the others by tokens."""

_AXES = ("tokens", "seqs", "chunk", "context", "kv_tokens", "bytes", "skew")
NEAREST = 2.05
"""No interpolation between points farther apart than this factor."""


@dataclass(frozen=True)
class Pairs:
    """One operator in both: logarithm of new over old, its noise, and the size of the step, [n] each.

    ``noise`` is NaN where neither tells its spread.
    """

    log_ratio: Floats
    noise: Floats
    size: Floats


def matched(new: Profile, old: Profile, operator: str) -> tuple[dict[tuple[int, str], Pairs], int]:
    """Pairs by TP degree and dtype, and how many of the new points have no counterpart."""
    import polars as pl

    left, right = _places(new, operator), _places(old, operator)
    shape = [*_SHAPE, *(["backend"] if set(left["backend"]) & set(right["backend"]) else [])]
    left, right = _once(left, [*shape, *_AXES]), _once(right, [*shape, *_AXES])
    both = left.join(right, on=[*shape, *_AXES], suffix="_old", nulls_equal=True)
    rest = left.join(right, on=[*shape, *_AXES], how="anti", nulls_equal=True)
    between = _between(rest, right, shape, _LINE.get(OPERATOR_PARTS[operator], "tokens"))
    found = pl.concat([both.select(_OUT), between.select(_OUT)])
    groups = {
        (int(tp), str(dtype)): _pairs(one, operator)
        for (tp, dtype), one in found.group_by("tp", "dtype", maintain_order=True)
    }
    return groups, len(left) - len(found)


_OUT = ["tp", "dtype", *_AXES, "seconds", "noise", "seconds_old", "noise_old"]


def _places(profile: Profile, operator: str) -> pl.DataFrame:
    import polars as pl

    own = profile.of(operator)
    table = pl.DataFrame({n: own[n].tolist() if own[n].dtype.kind == "U" else own[n] for n in COLUMNS})
    table = table.with_columns(skew=pl.when(pl.col("skew") <= 1).then(1.0).otherwise(pl.col("skew").round(6)))
    # a median of r repeats is 1.25 / sqrt(r) of their standard deviation off, quartiles are 1.349 of it apart
    repeats = pl.max_horizontal("repeats", 1).sqrt()
    noise = pl.col("spread_s") / 1.349 * 1.25 / repeats / pl.col("seconds")
    return table.filter(pl.col("seconds") > 0).with_columns(noise=noise)


def _once(table: pl.DataFrame, place: list[str]) -> pl.DataFrame:
    """One row a place: the median of what was measured there again."""
    import polars as pl

    return table.group_by(place, maintain_order=True).agg(
        pl.col("seconds").median(), (pl.col("noise").mean() / pl.len().sqrt()).alias("noise")
    )


def _between(rest: pl.DataFrame, old: pl.DataFrame, shape: list[str], axis: str) -> pl.DataFrame:
    """New points between two old ones of the same line, whose time is read off between them (log by log)."""
    import polars as pl

    line = [*shape, *(name for name in _AXES if name != axis)]
    knots = old.filter(pl.col(axis) > 0).sort(axis)
    here = rest.filter(pl.col(axis) > 0).with_row_index("row").sort(axis)
    points = knots.select(*line, pl.col(axis).cast(pl.Int64), at=axis, s="seconds", e="noise")
    both = {"on": axis, "by": line, "check_sortedness": False}
    below = here.join_asof(points, strategy="backward", **both)  # type: ignore[arg-type]
    above = here.join_asof(points, strategy="forward", **both).select(  # type: ignore[arg-type]
        "row", at_above="at", s_above="s", e_above="e"
    )
    joined = below.join(above, on="row").filter(
        pl.col("at").is_not_null() & pl.col("at_above").is_not_null(), pl.col("at_above") <= NEAREST * pl.col("at")
    )
    part = ((pl.col(axis) / pl.col("at")).log() / (pl.col("at_above") / pl.col("at")).log()).fill_nan(0.0)
    return joined.with_columns(
        seconds_old=(pl.col("s").log() * (1 - part) + pl.col("s_above").log() * part).exp(),
        noise_old=pl.max_horizontal("e", "e_above"),
    )


def _pairs(found: pl.DataFrame, operator: str) -> Pairs:
    columns = {name: found[name].to_numpy().astype(np.float64) for name in found.columns if name != "dtype"}
    new, old = columns["noise"], columns["noise_old"]
    known = np.isfinite(new) | np.isfinite(old)
    noise = np.where(known, np.hypot(np.nan_to_num(new), np.nan_to_num(old)), np.nan)
    part = OPERATOR_PARTS[operator]
    size = {
        "prefill": columns["chunk"] + columns["context"],
        "decode": columns["kv_tokens"],
        "mixed": columns["chunk"] + columns["context"] + columns["kv_tokens"],
        "comm": columns["bytes"],
        "send": columns["bytes"],
    }.get(part, columns["tokens"])
    return Pairs(np.log(columns["seconds"] / columns["seconds_old"]), noise, size)


DRAWS = 1000
LEVEL = 0.99
"""Of an interval: some dozens of operators and regions are looked at, and one in twenty would often be wrong."""

MIN_COUNT = 3
"""So few points whose spread nobody tells say nothing."""

_UNITS = {"prefill": "tokens", "decode": "KV tokens", "mixed": "tokens", "comm": "bytes", "send": "bytes"}


@dataclass(frozen=True)
class Moved:
    """New over old of one operator, shard and region.

    Attributes:
        operator: Its name.
        tp: The shard (0: a kernel of no model).
        dtype: Of its weights or activations.
        region: "small" or "large", cut at the geometric middle of the sizes; "all" where there is one size.
        sizes: The smallest and the largest size that was compared, in ``unit``.
        unit: "tokens", "KV tokens", "sequences" or "bytes".
        points: How many were compared.
        ratio: The median of new over old.
        low: The lower end of its interval (99 %, a bootstrap over points and their spreads).
        high: The upper end.
        changed: Whether the whole interval lies beyond the tolerance.
    """

    operator: str
    tp: int
    dtype: str
    region: str
    sizes: tuple[int, int]
    unit: str
    points: int
    ratio: float
    low: float
    high: float
    changed: bool


@dataclass(frozen=True)
class ProfileCheck:
    """All that was compared, and what could not be."""

    rows: tuple[Moved, ...]
    tolerance: float
    unmatched: int
    only_new: tuple[str, ...]
    only_old: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def changed(self) -> tuple[Moved, ...]:
        """What moved by more than the tolerance, and surely."""
        return tuple(row for row in self.rows if row.changed)


def check_profiles(new: Profile, old: Profile, *, tolerance: float = 0.05, seed: int = 0) -> ProfileCheck:
    """Which operators moved by more than a tolerance, beyond what the spreads explain.

    Points are matched by operator, shard, dtype and shape; a new point between two old ones that are at most a
    factor of two apart is compared with what lies between them.

    Args:
        new: What was measured now.
        old: What it should agree with.
        tolerance: A share: 0.05 lets a time be 5 % longer, or as many times shorter.
        seed: Of the intervals.

    Raises:
        InputError: The tolerance is not positive.
        ProfileError: The profiles are of different models, kinds, dtypes, TP degrees or attention backends, or share
            no point.
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise InputError(f"the tolerance must be above 0; it is {tolerance}")
    _require_same(new, old)
    rng = np.random.default_rng(seed)
    rows: list[Moved] = []
    unmatched = 0
    shared = [name for name in new.operators if name in old.operators]
    for operator in shared:
        groups, alone = matched(new, old, operator)
        unmatched += alone
        for (tp, dtype), pairs in sorted(groups.items()):
            rows += _regions(operator, tp, dtype, pairs, tolerance, rng)
    if not rows:
        raise ProfileError(
            "the profiles must share points; they share none: no operator has equal or neighbouring sizes, TP and "
            f"dtype in both (operators in both: {', '.join(shared) or 'none'})"
        )
    return ProfileCheck(
        tuple(rows),
        tolerance,
        unmatched,
        tuple(name for name in new.operators if name not in shared),
        tuple(name for name in old.operators if name not in shared),
        _notes(new, old),
    )


def _require_same(new: Profile, old: Profile) -> None:
    if new.metadata.model != old.metadata.model:
        raise ProfileError(
            f"both profiles must be of one model; they are of {new.metadata.model or 'no model (kernels)'} and "
            f"{old.metadata.model or 'no model (kernels)'}"
        )
    kinds = [bool((one["tp"] > 0).any()) for one in (new, old)]
    if kinds[0] != kinds[1]:
        words = ["operators of a model's shards" if shard else "kernels of no model" for shard in kinds]
        raise ProfileError(f"both profiles must be of one kind; one holds {words[0]}, the other {words[1]}")
    dtypes = [sorted(set(one["dtype"].tolist()) - {""}) for one in (new, old)]
    if all(dtypes) and not set(dtypes[0]) & set(dtypes[1]):
        raise ProfileError(
            f"both profiles must be of one dtype; they are of {', '.join(dtypes[0])} and {', '.join(dtypes[1])}"
        )
    degrees = [one.tensor_parallel for one in (new, old)]
    if all(degrees) and not set(degrees[0]) & set(degrees[1]):
        words = [f"TP {', '.join(map(str, own))}" for own in degrees]
        raise ProfileError(f"both profiles must share a TP degree; one has {words[0]}, the other {words[1]}")
    _require_same_attention(new, old)


def _require_same_attention(new: Profile, old: Profile) -> None:
    """Where both name whose kernels; one name within another, such as fa3 beside none, may be the same."""
    for operator in new.operators:
        if OPERATOR_PARTS[operator] not in ("prefill", "decode"):
            continue
        now, then = (sorted(set(one.of(operator)["backend"].tolist()) - {""}) for one in (new, old))
        if now and then and not any(a in b or b in a for a in now for b in then):
            raise ProfileError(
                f"both profiles must be of one attention backend; {operator} is of {', '.join(now)} in one, of "
                f"{', '.join(then)} in the other. Measure both with the same"
            )


def _notes(new: Profile, old: Profile) -> tuple[str, ...]:
    pairs = {"GPU": (new.metadata.gpu, old.metadata.gpu), "engine": (new.metadata.engine, old.metadata.engine)}
    return tuple(f"the {what} is another: {a} now, {b} then" for what, (a, b) in pairs.items() if a != b)


def _regions(
    operator: str, tp: int, dtype: str, pairs: Pairs, tolerance: float, rng: np.random.Generator
) -> list[Moved]:
    sizes = np.maximum(pairs.size, 1)
    middle = math.sqrt(float(sizes.min()) * float(sizes.max()))
    cuts = {"small": sizes <= middle, "large": sizes > middle}
    if not cuts["large"].any():
        cuts = {"all": cuts["small"]}
    part = OPERATOR_PARTS[operator]
    unit = "sequences" if part in ("head", "host") else _UNITS.get(part, "tokens")
    found = []
    for region, mask in cuts.items():
        ratio, noise = pairs.log_ratio[mask], pairs.noise[mask]
        low, high = _interval(ratio, noise, rng)
        limit = math.log1p(tolerance)
        enough = len(ratio) >= MIN_COUNT or bool(np.isfinite(noise).all())
        span = (int(pairs.size[mask].min()), int(pairs.size[mask].max()))
        found.append(
            Moved(
                operator, tp, dtype, region, span, unit, len(ratio), math.exp(float(np.median(ratio))),
                math.exp(low), math.exp(high), enough and (low > limit or high < -limit),
            )
        )  # fmt: skip
    return found


def _interval(ratio: np.ndarray, noise: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """Of the median: points drawn again, each off by its noise."""
    most = 400  # of many points, a sample says the same
    kept = rng.choice(len(ratio), most, replace=False) if len(ratio) > most else np.arange(len(ratio))
    drawn = rng.choice(kept, (DRAWS, len(kept)))
    off = np.nan_to_num(noise)[drawn] * rng.standard_normal(drawn.shape)
    medians = np.median(ratio[drawn] + off, axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
