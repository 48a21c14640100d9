"""What a schedule that follows live lengths did, in sentences."""

from __future__ import annotations

import math

from lengthwise.report._numbers import percent, seconds
from lengthwise.report.schedule._words import amount
from lengthwise.schema.adaptation import Adaptation, Change, LengthFacts, Watched

ALIKE = 0.15
"""From here on neighbours are too alike for the promise of a watch."""


def watched_said(told: Watched) -> list[str]:
    """The answer: what was watched, whether lengths moved, and what leaving the schedule alone would have meant."""
    row = told.planned
    left = f" ({told.left_out:,} more did not end on their own)" if told.left_out else ""
    said = [
        f"Planned for {_lengths(told.planned_lengths)}: {row.words}, {amount(row.throughput_rps)} requests/s.",
        (
            f"Watched {told.requests:,} requests{left}; an alarm while lengths never change: at most "
            f"{_share(told.false_alarms)}."
        ),
    ]
    if told.alike > ALIKE:
        said.append(
            f"Neighbours are alike (rank correlation {told.alike:.2f} beyond that of requests far apart), so that "
            "alarms may be of that: test one request in several (--every 10)."
        )
    if not told.adaptations:
        return [
            *said,
            f"Lengths did not move as far as can be told; evidence {amount(told.evidence)} of {_alarm(told)}.",
        ]
    said += [sentence for one in told.adaptations for sentence in adapted_said(one)]
    said += _free(told)
    if math.isfinite(told.bound_s):
        said.append(
            f"Had the first schedule been left as it was, about {told.late:,.0f} requests would have taken longer than "
            f"{told.bound_s:g} s."
        )
    runs = "the first schedule" if told.deployed == told.planned else told.deployed.words
    return [
        *said,
        f"At the end {runs} runs; evidence for another move: {amount(told.evidence)} of {_alarm(told)}.",
    ]


def adapted_said(one: Adaptation) -> list[str]:
    """One alarm and what came of it."""
    change = one.change
    when = f"Request {one.request:,} ({seconds(one.at_s)}): " if one.at_s else f"Request {one.request:,}: "
    moved = (
        f"{when}{' and '.join(one.sides)} moved, about from request {one.began:,} on: {_lengths(change.after)}"
        if one.first
        else f"{when}planned once more, now that {one.requests:,} requests tell the lengths: {_lengths(change.after)}"
    )
    return [f"{moved}. {_kept(change)}", _done(change), *_beyond(change)]


def _free(told: Watched) -> list[str]:
    """That a margin leaves throughput unused, and what frees it."""
    last = told.adaptations[-1].change
    if not (last.made and last.margin and last.new) or last.free_rps <= last.new.throughput_rps:
        return []
    unused = percent(1 - last.new.throughput_rps / last.free_rps)
    left = (
        f"The margin of {percent(last.margin)} leaves {unused} of {amount(last.free_rps)} requests/s unused"
    )
    return [f"{left}, so that lengths may move on; --margin 0 frees it."]


def _kept(change: Change) -> str:
    if change.kept is None:
        short = "fit the memory" if math.isinf(change.kept_held_s) else "find seats"
        return f"What runs would not {short}."
    rate = f"{amount(change.kept.throughput_rps)} requests/s, latency {seconds(change.kept_held_s)}"
    if math.isinf(change.bound_s):
        return f"Left as it is: {rate}."
    over = change.kept_held_s / change.bound_s - 1
    holds = "which holds" if over <= 0 else f"{percent(over)} over"
    late = f"{_share(change.late_share)} of requests take longer"
    return f"Left as it is: {rate}, bound {change.bound_s:g} s, {holds}; {late}."


def _done(change: Change) -> str:
    if change.new is None:
        return f"Nothing is changed: {change.why}."
    margin = ""
    if change.margin:
        margin = f", bound {percent(change.margin)} tighter ({amount(change.free_rps)} requests/s without)"
    load = f"{seconds(change.load_s)} without service" if change.load_s else "no weights move"
    rate = f"{amount(change.new.throughput_rps)} requests/s, latency {seconds(change.new_held_s)}"
    best = f"{change.new.words}, {rate}{margin}, {load}"
    if not change.made:
        return f"Left: the best now is {best}; {change.why}."
    repaid = f", repaid after {seconds(change.repaid_s)}" if 0 < change.repaid_s < math.inf else ""
    return f"Changed to {best}{repaid}: {change.why}."


def _beyond(change: Change) -> list[str]:
    """What would be better, and is not done while requests are served."""
    other = change.elsewhere
    if other is None:
        return []
    place = "host memory" if other.storage == "dram" else "drives"
    repaid = f", repaid after {seconds(other.repaid_s)}" if 0 < other.repaid_s < math.inf else ""
    rate = (
        f"{other.row.words}, {amount(other.row.throughput_rps)} requests/s, latency {seconds(other.held_s)}"
    )
    load = f"{seconds(other.load_s)} without service, from {place}{repaid}"
    return [f"Better, but it has to be loaded: {rate}; {load}: {other.why}."]


def _lengths(facts: LengthFacts) -> str:
    return (
        f"prompts {facts.prompt_mean:.0f} \N{PLUS-MINUS SIGN} {facts.prompt_sd:.0f}, outputs {facts.output_mean:.0f} "
        f"\N{PLUS-MINUS SIGN} {facts.output_sd:.0f} tokens"
    )


def _share(share: float) -> str:
    return f"{100 * share:.2g} %"


def _alarm(told: Watched) -> str:
    return f"the {1 / told.false_alarms:,.0f} of an alarm"
