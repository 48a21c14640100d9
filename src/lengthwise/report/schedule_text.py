"""The answer in sentences, and cells of the tables that the terminal and the page share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lengthwise.report.formatting import UNKNOWN, percent, rounded, seconds, span
from lengthwise.schema.schedule import (
    SYSTEM_NAMES,
    Adaptation,
    Change,
    DriftRow,
    LengthFacts,
    OtherSystem,
    SchedulePlan,
    ScheduleRow,
    ScheduleSide,
    Spread,
    Watched,
)

OTHER_HEADS = ("system", "best that meets the bound", "requests/s", "95 %", "latency", "worst case", "of the choice")


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
        told.append(f"Played out on the same GPUs with the same costs, fewer come from (of the choice): {fewer}.")
    none = [SYSTEM_NAMES[other.system] for other in plan.others if other.best is None]
    return [*told, f"No configuration meets the bound of: {', '.join(none)}."] if none else told


def _above(found: list[tuple[OtherSystem, ScheduleRow]], own: float) -> list[str]:
    if not found:
        return []
    (_, best), *rest = found
    more = ", ".join(f"{SYSTEM_NAMES[one.system]} {row.throughput_rps / own:.2f}" for one, row in rest)
    told = (
        f"Another system does better here, with the same costs and memory: {best.words} serves "
        f"{_amount(best.throughput_rps)} requests/s, {best.throughput_rps / own:.2f} times as many as the choice."
    )
    return [f"{told} So do (of the choice): {more}." if more else told]


def _level(found: list[OtherSystem]) -> list[str]:
    if not found:
        return []
    names = ", ".join(SYSTEM_NAMES[other.system] for other in found)
    return [f"As many, as far as can be told from what was played out: {names}."]


def _amount(value: float) -> str:
    return f"{value:.3g}"


SURE_HEADS = ("if", "requests/s", "latency, s", "worst case, s", "within", "bound held in")

_IF = {
    "lengths": "the {requests:,} requests behind the lengths were others",
    "costs": "costs are off as far as they may be",
}


def sure_said(plan: SchedulePlan) -> list[str]:
    """How far off the chosen schedule may be, a sentence a source, and of which nothing is known."""
    return [*(_description(spread, plan) for spread in plan.spreads), *plan.spread_notes]


def sure_cells(spread: Spread) -> list[str]:
    """A source of error as cells under ``SURE_HEADS``."""
    return [
        _IF[spread.source].format(requests=spread.requests),
        _ends(spread.throughput_rps),
        _ends(spread.latency_s),
        _ends(spread.latency_high_s),
        f"{percent(spread.level)} of {spread.draws}",
        percent(spread.held_share),
    ]


def _description(spread: Spread, plan: SchedulePlan) -> str:
    held_s = spread.latency_high_s if plan.worst_case else spread.latency_s
    told = (
        f"If {_IF[spread.source].format(requests=spread.requests)}: {_ends(spread.throughput_rps)} requests/s, latency "
        f"{_ends(held_s)} s{' in the worst case' if plan.worst_case else ''} ({percent(spread.level)} interval)"
    )
    share = percent(spread.held_share)
    if math.isfinite(plan.bound_s):
        return f"{told}; the bound holds in {share} of {spread.draws} draws."
    return f"{told}." if spread.held_share == 1 else f"{told}; memory holds it in {share} of {spread.draws} draws."


def _ends(ends: tuple[float, float]) -> str:
    low, high = ends
    if not math.isfinite(low):
        return UNKNOWN
    return span(low, high) if math.isfinite(high) else f"from {span(low, low).split(UNKNOWN)[0]}"


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
        side.cause or "chosen",
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
    kept, then = row.retained, row.replanned
    return [
        move_text(row),
        f"{row.mean_tokens:.1f}",
        f"{row.sd_tokens:.1f}",
        amount(kept.throughput_rps) if kept else "does not fit",
        seconds(row.kept_held_s),
        ("is_satisfied" if row.is_satisfied else "broken") if bounded and row.retained else UNKNOWN,
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
    moved = f"{row.change:+.0%}" if row.changed != "skewness" else f"{row.change:+.1f}"
    return f"{row.changed} {moved}".replace("%", " %")


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
    unfit = [row for row in plan.drift if row.retained is None]
    broken = [row for row in plan.drift if bounded and row.retained is not None and not row.is_satisfied]
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


MATCHING = 0.15
"""From here on neighbours are too alike for the promise of a watch."""


def watched_said(report: Watched) -> list[str]:
    """The answer: what was watched, whether lengths moved, and what leaving the schedule alone would have meant."""
    row = report.planned
    left = f" ({report.left_out:,} more did not end on their own)" if report.left_out else ""
    said = [
        f"Planned for {_lengths(report.planned_lengths)}: {row.words}, {amount(row.throughput_rps)} requests/s.",
        (
            f"Watched {report.requests:,} requests{left}; an alarm while lengths never change: at most "
            f"{_share(report.false_positive_rate)}."
        ),
    ]
    if report.matching > MATCHING:
        said.append(
            f"Neighbours are alike (rank correlation {report.matching:.2f} beyond that of requests far apart), so that "
            "alarms may be of that: test one request in several (--every 10)."
        )
    if not report.adaptations:
        return [
            *said,
            f"Lengths did not move as far as can be told; evidence {amount(report.evidence)} of {_alarm(report)}.",
        ]
    said += [description for one in report.adaptations for description in adapted_said(one)]
    said += _free(report)
    if math.isfinite(report.bound_s):
        said.append(
            f"Had the first schedule been left as it was, about {report.late:,.0f} requests would have taken longer than "
            f"{report.bound_s:g} s."
        )
    runs = "the first schedule" if report.deployed == report.planned else report.deployed.words
    return [*said, f"At the end {runs} runs; evidence for another move: {amount(report.evidence)} of {_alarm(report)}."]


def adapted_said(one: Adaptation) -> list[str]:
    """One alarm and what came of it."""
    change = one.change
    when = f"Request {one.request:,} ({seconds(one.at_s)}): " if one.at_s else f"Request {one.request:,}: "
    moved = (
        f"{when}{' and '.join(one.sides)} moved, about from request {one.started:,} on: {_lengths(change.after)}"
        if one.first
        else f"{when}planned once more, now that {one.requests:,} requests tell the lengths: {_lengths(change.after)}"
    )
    return [f"{moved}. {_retained(change)}", _done(change), *_out_of_range(change)]


def _free(report: Watched) -> list[str]:
    """That a margin leaves throughput unused, and what frees it."""
    last = report.adaptations[-1].change
    if not (last.made and last.margin and last.new) or last.free_rps <= last.new.throughput_rps:
        return []
    unused = percent(1 - last.new.throughput_rps / last.free_rps)
    left = f"The margin of {percent(last.margin)} leaves {unused} of {amount(last.free_rps)} requests/s unused"
    return [f"{left}, so that lengths may move on; --margin 0 frees it."]


def _retained(change: Change) -> str:
    if change.retained is None:
        short = "fit the memory" if math.isinf(change.kept_held_s) else "find seats"
        return f"What runs would not {short}."
    rate = f"{amount(change.retained.throughput_rps)} requests/s, latency {seconds(change.kept_held_s)}"
    if math.isinf(change.bound_s):
        return f"Left as it is: {rate}."
    over = change.kept_held_s / change.bound_s - 1
    holds = "which holds" if over <= 0 else f"{percent(over)} over"
    late = f"{_share(change.late_share)} of requests take longer"
    return f"Left as it is: {rate}, bound {change.bound_s:g} s, {holds}; {late}."


def _done(change: Change) -> str:
    if change.new is None:
        return f"Nothing is changed: {change.cause}."
    margin = ""
    if change.margin:
        margin = f", bound {percent(change.margin)} tighter ({amount(change.free_rps)} requests/s without)"
    load = f"{seconds(change.load_s)} without service" if change.load_s else "no weights move"
    rate = f"{amount(change.new.throughput_rps)} requests/s, latency {seconds(change.new_held_s)}"
    best = f"{change.new.words}, {rate}{margin}, {load}"
    if not change.made:
        return f"Left: the best now is {best}; {change.cause}."
    repaid = f", repaid after {seconds(change.repaid_s)}" if 0 < change.repaid_s < math.inf else ""
    return f"Changed to {best}{repaid}: {change.cause}."


def _out_of_range(change: Change) -> list[str]:
    """What would be better, and is not done while requests are served."""
    other = change.elsewhere
    if other is None:
        return []
    place = "host memory" if other.storage == "dram" else "drives"
    repaid = f", repaid after {seconds(other.repaid_s)}" if 0 < other.repaid_s < math.inf else ""
    rate = f"{other.row.words}, {amount(other.row.throughput_rps)} requests/s, latency {seconds(other.constrained_latency_s)}"
    load = f"{seconds(other.load_s)} without service, from {place}{repaid}"
    return [f"Better, but it has to be loaded: {rate}; {load}: {other.cause}."]


def _lengths(metadata: LengthFacts) -> str:
    return (
        f"prompts {metadata.prompt_mean:.0f} \N{PLUS-MINUS SIGN} {metadata.prompt_sd:.0f}, outputs {metadata.output_mean:.0f} "
        f"\N{PLUS-MINUS SIGN} {metadata.output_sd:.0f} tokens"
    )


def _share(share: float) -> str:
    return f"{100 * share:.2g} %"


def _alarm(report: Watched) -> str:
    return f"the {1 / report.false_positive_rate:,.0f} of an alarm"
