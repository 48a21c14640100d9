"""Points that two profiles share, or that one has between two of the other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.schema.cost_tables import Floats
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
        pl.col("at").is_not_null() & pl.col("at_above").is_not_null(),
        pl.col("at_above") <= NEAREST * pl.col("at"),
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
