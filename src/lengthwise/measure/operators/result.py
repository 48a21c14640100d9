"""Outcomes as a profile, and a profile as a table of what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.measure.operators.adaptive import Known, shares
from lengthwise.measure.operators.crossfit import leave_one_out
from lengthwise.measure.operators.points import DECODE, MESSAGE, PREFILL, Operator
from lengthwise.measure.operators.timing import Outcome
from lengthwise.schema.profile import Profile, ProfileFacts

_NOISY = 0.10


@dataclass(frozen=True)
class OperatorLine:
    """What was measured of one operator.

    Attributes:
        operator: Its name.
        tp: The TP degree, 0 of no model.
        points: How many were measured.
        spread: Median distance between the quartiles of the repeats, relative.
        error: Median relative error of points that are told by the others (NaN: too few).
        share: Of a typical decode or prefill step, the larger (NaN for a kernel of no model).
    """

    operator: str
    tp: int
    points: int
    spread: float
    error: float
    share: float


def as_profile(outcomes: Sequence[Outcome], facts: ProfileFacts, dtype: str) -> Profile:
    """A row an outcome and TP degree; what was skipped is told in the notes."""
    done = [(o, tp) for o in outcomes if not o.skipped for tp in o.point.operator.tps]
    rows = [_row(outcome, tp) for outcome, tp in done]
    names = sorted({name for row in rows for name in row})
    columns = {name: np.array([row.get(name, 0) for row in rows]) for name in names if name != "operator"}
    n = len(rows)
    texts = {"dtype": np.full(n, dtype), "kv_dtype": np.full(n, dtype)}
    texts["operator"] = np.array([o.point.operator.name for o, _ in done], dtype=np.str_)
    texts["backend"] = np.array([o.backend for o, _ in done], dtype=np.str_)
    columns |= {"seconds": np.array([o.seconds for o, _ in done])}
    columns |= {"spread_s": np.array([o.spread_s for o, _ in done])}
    return Profile(facts, {**columns, **texts})


def notes(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """What a reader must know of these outcomes: points without memory, seconds of the processor, noise."""
    told = []
    for key in sorted({o.point.operator.key for o in outcomes if o.skipped}):
        skipped = [o for o in outcomes if o.skipped and o.point.operator.key == key]
        places = ", ".join(str(o.point.at if len(o.point.at) > 1 else o.point.at[0]) for o in skipped[:4])
        more = f" and {len(skipped) - 4} more" if len(skipped) > 4 else ""
        told.append(f"{key}: skipped from {places}{more} on: {skipped[0].skipped}")
    by_processor = sum(o.by_processor for o in outcomes if not o.skipped)
    if by_processor:
        told.append(
            f"{by_processor} points tell seconds of the processor: by the clock they took over 5 % more, since "
            "others used the cores"
        )
    relative = [o.spread_s / o.seconds for o in outcomes if not o.skipped and o.seconds > 0]
    if relative and (spread := float(np.nanmedian(relative))) > _NOISY:
        told.append(f"the device was not quiet: repeats lay {spread:.0%} apart in the median")
    return tuple(told)


def known_of(outcomes: Sequence[Outcome]) -> dict[str, Known]:
    """What is known of each operator, by its key."""
    by_key: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if not outcome.skipped and outcome.point.skew == 1:
            by_key.setdefault(outcome.point.operator.key, []).append(outcome)
    return {key: _known(group) for key, group in by_key.items()}


def table(outcomes: Sequence[Outcome]) -> tuple[OperatorLine, ...]:
    """A line an operator, the largest shares first; kernels of no model last."""
    known = known_of(outcomes)
    share: dict[str, float] = {}
    for tp in {one.operator.tps[0] for one in known.values()}:
        share |= shares({key: one for key, one in known.items() if one.operator.tps[0] == tp})
    lines = [_line(one, share[key]) for key, one in known.items()]
    return tuple(sorted(lines, key=lambda line: (line.tp == 0, line.tp, -np.nan_to_num(line.share))))


def _line(one: Known, share: float) -> OperatorLine:
    errors = leave_one_out(one.operator, list(one.places), one.seconds)
    error = float(np.nanmedian(errors)) if np.isfinite(errors).any() else float("nan")
    spread = float(np.median(one.spread))
    tp = one.operator.tps[0]
    return OperatorLine(one.operator.name, tp, len(one.places), spread, error, share if tp else float("nan"))


def _known(outcomes: list[Outcome]) -> Known:
    seconds = np.array([o.seconds for o in outcomes])
    spread = np.nan_to_num(np.array([o.spread_s for o in outcomes])) / np.maximum(seconds, 1e-12)
    return Known(outcomes[0].point.operator, tuple(o.point.at for o in outcomes), seconds, spread)


def _row(outcome: Outcome, tp: int) -> dict[str, float]:
    point = outcome.point
    row: dict[str, float] = {"tp": tp, "repeats": len(outcome.wall_s), **point.operator.shape}
    return row | _place(point.operator, point.at, point.skew)


def _place(operator: Operator, at: tuple[int, ...], skew: int) -> dict[str, float]:
    if operator.kind == PREFILL:
        return {"seqs": 1, "chunk": at[0], "context": at[1], "tokens": at[0]}
    if operator.kind == DECODE:
        return {"seqs": at[0], "kv_tokens": at[1], "skew": skew, "tokens": at[0]}
    return {"bytes" if operator.kind == MESSAGE else "tokens": at[0]}
