"""A schedule under a latency bound as sentences, and the table cells that terminal and page share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lengthwise.report.formatting import PLUS_MINUS, UNKNOWN, amount, counted, percent, seconds, span
from lengthwise.schema import schedule
from lengthwise.schema.schedule import (
    SYSTEM_NAMES,
    DriftRow,
    LatencyBound,
    OtherSystem,
    SchedulePlan,
    ScheduleRow,
    ScheduleSearch,
    Spread,
)

OTHER_HEADS = ("system", "best that meets the bound", "requests/s", "95 %", "latency", "worst case", "x chosen")
SPREAD_HEADS = ("if", "requests/s", "latency, s", "worst case, s", "within", "bound met in")
SIDE_HEADS = ("strategy", "TP", "best found", "requests/s", "latency", "worst case", "at most", "not chosen because")
DRIFT_HEADS = (
    "outputs", "mean", "sd", "requests/s", "latency", "bound", "re-planned", "requests/s then", "reload", "margin",
)  # fmt: skip
SPREAD_CAUSES = {
    "lengths": "the {requests:,} requests behind the lengths are sampled again",
    "costs": "costs have the estimated errors",
}
SURE_SHARE = 0.95  # if a smaller share of the draws meets the bound, the answer warns
SIMILAR_NEIGHBOURS = 0.15  # rank correlation of neighbours above which a watch may have more false alarms


def sentences(plan: SchedulePlan) -> list[str]:
    """Return sentences on the chosen schedule, the alternatives, the uncertainty, the search and drift."""
    chosen, static, bound = plan.chosen, plan.static.best, plan.bound
    condition, is_bounded = "Without a latency bound", math.isfinite(bound.limit_s)
    if is_bounded:
        case = "in the worst case" if bound.worst_case else "as expected"
        condition = f"Within {bound.limit_s:g} s for outputs of {counted(bound.tokens, 'token')} {case}"
    rate, latency, worst_case = yield_cells(chosen)
    choice = f"the best schedule by these cost tables is {chosen.words}"
    made = [f"{condition}, {choice}: {rate} requests/s, latency {latency}, {worst_case} in the worst case."]
    met_share = min((spread.met_share for spread in plan.uncertainty.spreads), default=1.0)
    if is_bounded and met_share < SURE_SHARE:
        made.append(f"These are point estimates: the bound is met in {percent(met_share)} of draws of their errors.")
    if plan.parts is not None:
        parts = plan.parts
        made.append(
            f"This schedule uses all GPUs as one pipeline. {parts.words}, with {parts.row.words}, reach "
            f"{parts.throughput_rps / chosen.throughput_rps:.2f} times its throughput: {amount(parts.throughput_rps)} "
            f"requests/s (--gpus {parts.gpus} plans one part)."
        )
    if static is None:
        made.append("Static batching: no batch meets the bound.")
    else:
        made.append(
            f"Static batching with batches of {static.prefill_batch} serves {amount(static.throughput_rps)} requests/s "
            f"at {seconds(static.latency_s)}; the chosen schedule reaches "
            f"{chosen.throughput_rps / static.throughput_rps:.2f} times this throughput."
        )
    made += _other_sentences(plan.others, chosen.throughput_rps)
    made += [_spread_sentence(spread, bound) for spread in plan.uncertainty.spreads]
    made += [*plan.uncertainty.notes, _search_sentence(plan.search)]
    return made + _drift_sentences(plan.drift, is_bounded=is_bounded)


def _other_sentences(others: Sequence[OtherSystem], own: float) -> list[str]:
    found = sorted(((other, other.best) for other in others if other.best), key=lambda one: -one[1].throughput_rps)

    def ratios(some: Sequence[tuple[OtherSystem, ScheduleRow]]) -> str:
        return ", ".join(f"{SYSTEM_NAMES[one.system]} {row.throughput_rps / own:.2f}" for one, row in some)

    faster = [(other, row) for other, row in found if other.low_rps > own]
    similar = [SYSTEM_NAMES[other.system] for other, _ in found if other.low_rps <= own <= other.high_rps]
    slower = [(other, row) for other, row in found if other.high_rps < own]
    infeasible = [SYSTEM_NAMES[other.system] for other in others if other.best is None]
    made = []
    if faster:
        best = faster[0][1]
        more = f" So do (times the chosen throughput): {ratios(faster[1:])}." if len(faster) > 1 else ""
        made.append(
            f"Another system does better with the same costs and memory: {best.words} serves "
            f"{best.throughput_rps:.3g} requests/s, {best.throughput_rps / own:.2f} times the chosen throughput.{more}"
        )
    if similar:
        made.append(f"No significant difference in throughput: {', '.join(similar)}.")
    if slower:
        made.append(
            "Slower in simulation on the same GPUs with the same costs (times the chosen throughput): "
            f"{ratios(slower)}."
        )
    if infeasible:
        made.append(f"No configuration meets the bound: {', '.join(infeasible)}.")
    return made


def _spread_sentence(spread: Spread, bound: LatencyBound) -> str:
    latency_s = spread.latency_high_s if bound.worst_case else spread.latency_s
    text = (
        f"If {SPREAD_CAUSES[spread.source].format(requests=spread.requests)}: {_interval(spread.throughput_rps)} "
        f"requests/s, latency {_interval(latency_s)} s{' in the worst case' if bound.worst_case else ''} "
        f"({percent(spread.level)} interval)"
    )
    share = percent(spread.met_share)
    if math.isfinite(bound.limit_s):
        return f"{text}; the bound is met in {share} of {spread.draws} draws."
    return f"{text}." if spread.met_share == 1 else f"{text}; the memory suffices in {share} of {spread.draws} draws."


def _interval(ends: tuple[float, float]) -> str:
    low, high = ends
    if not math.isfinite(low):
        return UNKNOWN
    return span(low, high) if math.isfinite(high) else f"from {span(low, low).split(UNKNOWN)[0]}"


def _search_sentence(search: ScheduleSearch) -> str:
    if search.evaluated >= search.points:
        return f"All {search.points:,} schedules were evaluated; none has a higher throughput."
    text = f"{search.evaluated:,} of {search.points:,} schedules were evaluated"
    if not math.isfinite(search.gap):
        return f"{text}; the bound is at the edge of what is feasible, so little is known about the others."
    more = "a higher throughput" if search.gap < 0.0005 else f"over {100 * search.gap:.1f} % more throughput"
    if all(side.at_most_proved for side in search.sides if side.evaluated):
        return f"{text}; as far as the estimates are monotone, none has {more}."
    hint = "This is not proved: RRA's estimates are not monotone for short phases, so these were evaluated as well."
    return f"{text}; by the bounds of the search none has {more}. {hint}"


def _drift_sentences(drift: Sequence[DriftRow], *, is_bounded: bool) -> list[str]:
    unfit = [row for row in drift if row.retained is None]
    broken = [row for row in drift if is_bounded and row.retained is not None and not row.is_satisfied]
    made = []
    if broken:
        made.append(f"The bound breaks if the output lengths change by: {_moves(broken)}.{_margin_sentence(broken)}")
    if unfit:
        margin = _margin_sentence(unfit) if is_bounded else ""
        made.append(f"The schedule exceeds the memory if the output lengths change by: {_moves(unfit)}.{margin}")
    if is_bounded and drift and not made:
        return ["The bound holds under every tried change of the output lengths."]
    return made


def _margin_sentence(rows: Sequence[DriftRow]) -> str:
    margins = [row.margin for row in rows if math.isfinite(row.margin)]
    beyond_help = [row for row in rows if not math.isfinite(row.margin)]
    if not margins:
        return " No tried tighter bound would have prevented it."
    exception = f", except for {_moves(beyond_help)}." if beyond_help else "."
    return f" Planning with a bound {percent(max(margins))} tighter would have prevented it{exception}"


def _moves(rows: Sequence[DriftRow]) -> str:
    return ", ".join(map(move_text, rows))


def move_text(row: DriftRow) -> str:
    """Return a change of lengths ("mean +15 %")."""
    if row.changed == "skewness":
        return f"skewness {row.change:+.1f}"
    return f"{row.changed} {100 * row.change:+.0f} %"


def yield_cells(row: ScheduleRow | None) -> list[str]:
    """Return a schedule's throughput, latency and worst-case latency as table cells, or dashes without a schedule."""
    if row is None:
        return [UNKNOWN] * 3
    return [amount(row.throughput_rps), seconds(row.latency_s), seconds(row.latency_high_s)]


def other_cells(other: OtherSystem, chosen: ScheduleRow) -> list[str]:
    """Return the table row of another system. The columns are ``OTHER_HEADS``."""
    name, row = SYSTEM_NAMES[other.system], other.best
    if row is None:
        return [name, f"none of {other.configurations:,} tried", *[UNKNOWN] * 5]
    return [
        name,
        row.words.removeprefix(f"{name}, "),
        f"{row.throughput_rps:.3g}",
        span(other.low_rps, other.high_rps),
        seconds(row.latency_s),
        seconds(row.latency_high_s),
        f"{row.throughput_rps / chosen.throughput_rps:.2f}",
    ]


def spread_cells(spread: Spread) -> list[str]:
    """Return the table row of a source of error. The columns are ``SPREAD_HEADS``."""
    return [
        SPREAD_CAUSES[spread.source].format(requests=spread.requests),
        *(_interval(ends) for ends in (spread.throughput_rps, spread.latency_s, spread.latency_high_s)),
        f"{percent(spread.level)} of {spread.draws}",
        percent(spread.met_share),
    ]


def side_cells(side: schedule.ScheduleSide) -> list[str]:
    """Return the table row of a strategy at a tensor-parallel degree. The columns are ``SIDE_HEADS``."""
    limit_rps = side.at_most_rps
    at_most = amount(limit_rps) if math.isfinite(limit_rps) and limit_rps > 0 else UNKNOWN
    if at_most != UNKNOWN and not side.at_most_proved:
        at_most = f"about {at_most}"
    words = side.best.words if side.best else UNKNOWN
    return [side.strategy.upper(), str(side.tp), words, *yield_cells(side.best), at_most, side.cause or "(chosen)"]


def drift_cells(row: DriftRow, bound_s: float) -> list[str]:
    """Return the table row of a change of lengths, with the columns ``DRIFT_HEADS``, and dashes without a bound."""
    bound = margin = UNKNOWN
    if math.isfinite(bound_s):
        bound = UNKNOWN if row.retained is None else "met" if row.is_satisfied else "broken"
        margin = percent(row.margin) if math.isfinite(row.margin) else "none is enough"
    return [
        move_text(row),
        f"{row.mean_tokens:.1f}",
        f"{row.sd_tokens:.1f}",
        amount(row.retained.throughput_rps) if row.retained else "does not fit",
        seconds(row.retained_latency_s),
        bound,
        row.replanned.words if row.replanned else "none meets it",
        amount(row.replanned.throughput_rps) if row.replanned else UNKNOWN,
        "yes" if row.reload else "no",
        margin,
    ]


def watch_sentences(report: schedule.Watched) -> list[str]:
    """Return sentences on a replay: the requests, the changes of lengths, and the late requests without adaptation."""
    planned = report.planned
    cut_off = f" ({report.left_out:,} more were cut off)" if report.left_out else ""
    threshold = f"the {1 / report.false_positive_rate:,.0f} that raise an alarm"
    false_alarms = f"probability of a false alarm: at most {100 * report.false_positive_rate:.2g} %"
    rate = f"{amount(planned.throughput_rps)} requests/s"
    made = [
        f"Planned for {_lengths(report.planned_lengths)}: {planned.words}, {rate}.",
        f"Watched {report.requests:,} requests{cut_off}; {false_alarms}.",
    ]
    if report.matching > SIMILAR_NEIGHBOURS:
        made.append(
            f"Consecutive requests have similar lengths (rank correlation {report.matching:.2f} above that of distant "
            "requests), which can cause false alarms: test only one request in several (--every 10)."
        )
    if not report.adaptations:
        return [*made, f"No significant change of lengths; evidence {amount(report.evidence)} of {threshold}."]
    made += [sentence for one in report.adaptations for sentence in adaptation_sentences(one)]
    last = report.adaptations[-1].change
    if last.made and last.margin and last.new and last.free_rps > last.new.throughput_rps:
        unused = percent(1 - last.new.throughput_rps / last.free_rps)
        made.append(
            f"The margin of {percent(last.margin)} leaves {unused} of {amount(last.free_rps)} requests/s unused, so "
            "that lengths may change further; --margin 0 uses them."
        )
    if math.isfinite(report.bound_s):
        detail = f"about {report.late:,.0f} requests would have taken longer than {report.bound_s:g} s."
        made.append(f"With the first schedule unchanged, {detail}")
    deployed = "the first schedule" if report.deployed == planned else report.deployed.words
    evidence = f"evidence for another change: {amount(report.evidence)} of {threshold}"
    return [*made, f"At the end, {deployed} runs; {evidence}."]


def adaptation_sentences(one: schedule.Adaptation) -> list[str]:
    """Return sentences on one detected change: the new lengths, the unchanged schedule under them, and the new one."""
    change, elsewhere = one.change, one.change.elsewhere
    when = f"Request {one.request:,} ({seconds(one.at_s)})" if one.at_s else f"Request {one.request:,}"
    event = f"planned again, with {one.requests:,} requests to estimate the lengths from"
    if one.first:
        event = f"{' and '.join(one.sides)} changed, from about request {one.started:,} on"
    made = [f"{when}: {event}: {_lengths(change.after)}. {_unchanged(change)}", _done(change)]
    if elsewhere is not None:
        place = "host memory" if elsewhere.storage == "dram" else "drives"
        made.append(
            f"A better schedule needs other weights in memory: {elsewhere.row.words}, "
            f"{amount(elsewhere.row.throughput_rps)} requests/s, latency {seconds(elsewhere.constrained_latency_s)}; "
            f"{seconds(elsewhere.load_s)} without service to load from {place}{_repaid(elsewhere.repaid_s)}: "
            f"{elsewhere.cause}."
        )
    return made


def _unchanged(change: schedule.Change) -> str:
    if change.retained is None:
        limit = "the memory" if math.isinf(change.retained_latency_s) else "the concurrency limit"
        return f"The running schedule would exceed {limit}."
    rate = f"{amount(change.retained.throughput_rps)} requests/s, latency {seconds(change.retained_latency_s)}"
    if math.isinf(change.bound_s):
        return f"Unchanged: {rate}."
    over = change.retained_latency_s / change.bound_s - 1
    state = "met" if over <= 0 else f"exceeded by {percent(over)}"
    late = f"{100 * change.late_share:.2g} % of requests take longer"
    return f"Unchanged: {rate}, bound {change.bound_s:g} s {state}; {late}."


def _done(change: schedule.Change) -> str:
    if change.new is None:
        return f"Not changed: {change.cause}."
    margin = ""
    if change.margin:
        margin = f", bound {percent(change.margin)} tighter ({amount(change.free_rps)} requests/s without)"
    load = f"{seconds(change.load_s)} without service" if change.load_s else "no weights move"
    rate = f"{amount(change.new.throughput_rps)} requests/s, latency {seconds(change.new_latency_s)}"
    best = f"{change.new.words}, {rate}{margin}, {load}"
    if not change.made:
        return f"Not changed: the best schedule now is {best}; {change.cause}."
    return f"Changed to {best}{_repaid(change.repaid_s)}: {change.cause}."


def _repaid(repaid_s: float) -> str:
    return f", repaid after {seconds(repaid_s)}" if 0 < repaid_s < math.inf else ""


def _lengths(lengths: schedule.LengthFacts) -> str:
    detail = f"outputs {lengths.output_mean:.0f} {PLUS_MINUS} {lengths.output_sd:.0f} tokens"
    return f"prompts {lengths.prompt_mean:.0f} {PLUS_MINUS} {lengths.prompt_sd:.0f}, {detail}"
