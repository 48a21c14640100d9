"""Other systems beside the choice, in sentences and as cells."""

from __future__ import annotations

from lengthwise.report._numbers import UNKNOWN, seconds, span
from lengthwise.schema.schedule import OtherSystem, SchedulePlan
from lengthwise.schema.schedule_row import SYSTEM_NAMES, ScheduleRow

OTHER_HEADS = (
    "system",
    "best that meets the bound",
    "requests/s",
    "95 %",
    "latency",
    "worst case",
    "of the choice",
)


def other_cells(other: OtherSystem, chosen: ScheduleRow) -> list[str]:
    """A system as cells under ``OTHER_HEADS``."""
    name, row = SYSTEM_NAMES[other.system], other.best
    if row is None:
        return [name, f"none of {other.configurations:,} tried", *[UNKNOWN] * 5]
    return [
        name,
        row.words.removeprefix(f"{name}, "),
        _amount(row.throughput_rps),
        span(other.low_rps, other.high_rps),
        seconds(row.latency_s),
        seconds(row.latency_high_s),
        f"{row.throughput_rps / chosen.throughput_rps:.2f}",
    ]


def others_said(plan: SchedulePlan) -> list[str]:
    """How the choice does beside other systems on the same GPUs: who has more, who as many, who fewer."""
    if not plan.others:
        return []
    ours = plan.chosen.throughput_rps
    some = [(other, other.best) for other in plan.others if other.best]
    some.sort(key=lambda one: -one[1].throughput_rps)
    above = [(other, row) for other, row in some if other.low_rps > ours]
    level = [other for other, _ in some if other.low_rps <= ours <= other.high_rps]
    below = [(other, row) for other, row in some if other.high_rps < ours]
    told = _above(above, ours) + _level(level)
    if below:
        fewer = ", ".join(f"{SYSTEM_NAMES[one.system]} {row.throughput_rps / ours:.2f}" for one, row in below)
        told.append(
            f"Played out on the same GPUs with the same costs, fewer come from (of the choice): {fewer}."
        )
    none = [SYSTEM_NAMES[other.system] for other in plan.others if other.best is None]
    return [*told, f"No configuration meets the bound of: {', '.join(none)}."] if none else told


def _above(found: list[tuple[OtherSystem, ScheduleRow]], ours: float) -> list[str]:
    if not found:
        return []
    (_, best), *rest = found
    more = ", ".join(f"{SYSTEM_NAMES[one.system]} {row.throughput_rps / ours:.2f}" for one, row in rest)
    told = (
        f"Another system does better here, with the same costs and memory: {best.words} serves "
        f"{_amount(best.throughput_rps)} requests/s, {best.throughput_rps / ours:.2f} times as many as the choice."
    )
    return [f"{told} So do (of the choice): {more}." if more else told]


def _level(found: list[OtherSystem]) -> list[str]:
    if not found:
        return []
    names = ", ".join(SYSTEM_NAMES[other.system] for other in found)
    return [f"As many, as far as can be told from what was played out: {names}."]


def _amount(value: float) -> str:
    return f"{value:.3g}"


__all__ = ["OTHER_HEADS", "other_cells", "others_said"]
