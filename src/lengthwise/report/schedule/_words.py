"""The answer in sentences, and cells of the tables that the terminal and the page share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lengthwise.report._numbers import UNKNOWN, percent, rounded, seconds
from lengthwise.report.schedule._others import others_said
from lengthwise.report.schedule._sure import sure_said
from lengthwise.schema.schedule import DriftRow, SchedulePlan, ScheduleSide
from lengthwise.schema.schedule_row import ScheduleRow

SIDE_HEADS = ("strategy", "TP", "best seen", "requests/s", "latency", "worst case", "at most", "why not")
DRIFT_HEADS = (
    "outputs", "mean", "sd", "requests/s", "latency held", "bound", "re-planned", "requests/s then", "reload", "margin",
)  # fmt: skip


def sentences(plan: SchedulePlan) -> list[str]:
    """What the plan says, a sentence each."""
    row = plan.chosen
    bound = "With no latency bound"
    if math.isfinite(plan.bound_s):
        held = "even in the worst case" if plan.worst_case else "as expected"
        bound = f"Within {plan.bound_s:g} s for outputs of {tokens_said(plan.quantile_tokens)} {held}"
    told = [
        (
            f"{bound}, by these cost tables, {row.words} is best: {amount(row.throughput_rps)} requests/s, latency "
            f"{seconds(row.latency_s)}, {seconds(row.latency_high_s)} in the worst case."
        ),
        *_parts(plan),
        _static(plan),
        *others_said(plan),
        *sure_said(plan),
        f"{_looked_at(plan)}; {_certainty(plan)}.",
    ]
    return told + _of_drift(plan)


def side_cells(side: ScheduleSide) -> list[str]:
    """A runner-up as cells under ``SIDE_HEADS``."""
    best = side.best
    return [
        side.strategy.upper(),
        str(side.tp),
        best.words if best else UNKNOWN,
        *yield_cells(best),
        _at_most(side),
        side.why or "chosen",
    ]


def _at_most(side: ScheduleSide) -> str:
    """The most that a side has; "about" where the search proves nothing (RRA)."""
    most = side.at_most_rps
    if not (math.isfinite(most) and most > 0):
        return UNKNOWN
    return amount(most) if side.at_most_proved else f"about {amount(most)}"


def drift_cells(row: DriftRow, bound_s: float) -> list[str]:
    """A move of the lengths as cells under ``DRIFT_HEADS``; without a bound there is none to hold or to tighten."""
    bounded = math.isfinite(bound_s)
    kept, then = row.kept, row.replanned
    return [
        move_text(row),
        f"{row.mean_tokens:.1f}",
        f"{row.sd_tokens:.1f}",
        amount(kept.throughput_rps) if kept else "does not fit",
        seconds(row.kept_held_s),
        ("holds" if row.holds else "broken") if bounded and row.kept else UNKNOWN,
        then.words if then else "none meets it",
        amount(then.throughput_rps) if then else UNKNOWN,
        "yes" if row.reload else "no",
        (percent(row.margin) if math.isfinite(row.margin) else "none is enough") if bounded else UNKNOWN,
    ]


def yield_cells(row: ScheduleRow | None) -> list[str]:
    """Throughput, latency and worst case."""
    if row is None:
        return [UNKNOWN] * 3
    return [amount(row.throughput_rps), seconds(row.latency_s), seconds(row.latency_high_s)]


def amount(value: float) -> str:
    """A number with three digits."""
    return rounded(value, math.nan)[0]


def tokens_said(tokens: int) -> str:
    """A number of tokens: "1 token", "1,024 tokens"."""
    return f"{tokens:,} {'token' if tokens == 1 else 'tokens'}"


def move_text(row: DriftRow) -> str:
    """A move in words: "mean +15 %"."""
    moved = f"{row.change:+.0%}" if row.moved != "skewness" else f"{row.change:+.1f}"
    return f"{row.moved} {moved}".replace("%", " %")


def _parts(plan: SchedulePlan) -> list[str]:
    """That parts of the GPUs by themselves serve more, where they do."""
    cut = plan.parts
    if cut is None:
        return []
    gain = cut.throughput_rps / plan.chosen.throughput_rps
    told = (
        f"That is all GPUs as one pipeline. {cut.words}, with {cut.row.words}, have {gain:.2f} times as much: "
        f"{amount(cut.throughput_rps)} requests/s (--gpus {cut.gpus} plans a part)."
    )
    return [told]


def _static(plan: SchedulePlan) -> str:
    row = plan.static
    if row is None:
        return "Doing nothing: no static batch meets the bound."
    gain = plan.chosen.throughput_rps / row.throughput_rps
    return (
        f"Doing nothing: static batches of {row.encode_batch} serve {amount(row.throughput_rps)} requests/s at "
        f"{seconds(row.latency_s)}; the choice has {gain:.2f} times as much."
    )


def _looked_at(plan: SchedulePlan) -> str:
    if plan.evaluated >= plan.points:
        return f"All {plan.points:,} schedules were estimated"
    return f"{plan.evaluated:,} of {plan.points:,} schedules were estimated"


def _certainty(plan: SchedulePlan) -> str:
    if plan.evaluated >= plan.points:
        return "none of them has more throughput"
    if not math.isfinite(plan.gap):
        return "the bound is at the edge of what can be met, so that little is known of the others"
    most = "more throughput" if plan.gap < 0.0005 else f"over {100 * plan.gap:.1f} % more throughput"
    if all(side.at_most_proved for side in plan.sides if side.evaluated):
        return f"as far as estimates are monotone, none has {most}"
    return (
        f"by the bounds of the search none has {most}, which is not proved: RRA's estimates are not monotone where "
        "phases are short, so that these were tried as well"
    )


def _of_drift(plan: SchedulePlan) -> list[str]:
    """Under which drifts the bound breaks, under which memory holds the schedule no longer, and what would help."""
    bounded = math.isfinite(plan.bound_s)
    unfit = [row for row in plan.drift if row.kept is None]
    broken = [row for row in plan.drift if bounded and row.kept is not None and not row.holds]
    told = []
    if broken:
        told.append(f"The bound breaks when outputs move so: {_moves(broken)}.{_margin(broken)}")
    if unfit:
        margin = _margin(unfit) if bounded else ""
        told.append(f"It does not fit the memory when outputs move so: {_moves(unfit)}.{margin}")
    if bounded and plan.drift and not told:
        return ["The bound holds under every drift of the outputs that was tried."]
    return told


def _margin(rows: Sequence[DriftRow]) -> str:
    """What tighter bound would have kept a bound or fit the memory."""
    kept = [row.margin for row in rows if math.isfinite(row.margin)]
    lost = [row for row in rows if not math.isfinite(row.margin)]
    if not kept:
        return " No tighter bound that was tried would have kept it."
    but = f", but for {_moves(lost)}." if lost else "."
    return f" Choosing under a bound {percent(max(kept))} tighter would have kept it{but}"


def _moves(rows: Sequence[DriftRow]) -> str:
    return ", ".join(map(move_text, rows))
