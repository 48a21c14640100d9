"""Switch it on, or not: in words, and plainly where there is nothing to be had."""

from __future__ import annotations

import math
from dataclasses import replace

from lengthwise.gateway.observe import finding as words
from lengthwise.gateway.observe.finding import Change, Gain, OrderGain
from lengthwise.gateway.observe.replay import ISRTF, ORACLE, SRTF
from lengthwise.gateway.observe.service import NOBODY_WAITS

LEAST_GAIN = 0.01
"""A smaller gain in mean JCT is not worth the trouble, however sure it is."""
MOST_ERROR = 0.35
"""Beyond it the simulated FCFS is not what was seen, and says nothing."""


def judged(found: Gain) -> Gain:
    """The finding with its verdict and the sentence that gives the reason."""
    verdict, sentence = _judge(found)
    return replace(found, verdict=verdict, sentence=sentence)


def _judge(found: Gain) -> tuple[str, str]:
    oracle = found.order(ORACLE)
    if found.waited_share < NOBODY_WAITS and -oracle.mean.value < LEAST_GAIN:
        return words.NOBODY_WAITS, (
            f"Of all time from arrival to end {_percent(found.waited_share)} is waiting: every request finds a free "
            "seat, and no order shortens a queue that is not there."
        )
    if not found.in_order:
        return words.OUT_OF_ORDER, (
            "Simulated first come, first served cannot be held against what was seen, since others went first. Look "
            "back at traffic of mode observe or fcfs."
        )
    if not abs(found.model_error) <= MOST_ERROR:
        return words.UNLIKE, (
            f"Simulated first come, first served, the mean JCT is {found.fcfs_jct_s:.3g} s; seen were "
            f"{found.observed_jct_s:.3g} s. Something else than a full batch limits the engines, or they changed."
        )
    return _compared([found.order(SRTF), found.order(ISRTF)], oracle, found.cuts)


def _compared(candidates: list[OrderGain], oracle: OrderGain, cuts: Change) -> tuple[str, str]:
    sure = [one for one in candidates if one.mean.high < 0 and -one.mean.value >= LEAST_GAIN]
    bearable = [one for one in sure if not one.p99.value > -one.mean.value]
    if bearable:
        best = _named_one(bearable, cuts)
        over = _beats(cuts) if best.name == ISRTF and len(bearable) > 1 else ""
        return words.SWITCH_ON, f"{_named(best)} {_changes(best)}{over}{_kept(best, oracle)}."
    if sure:
        best = _named_one(sure, cuts)
        return (
            words.TAIL_PAYS,
            f"{_named(best)} {_changes(best)}; a lower max_wait_s trades the one for the other.",
        )
    best = min(candidates, key=lambda one: one.mean.value)
    if -oracle.mean.value < LEAST_GAIN:
        return words.ALIKE, f"Even with lengths known beforehand, shortest first {_changes(oracle)}."
    if best.mean.value <= -LEAST_GAIN and not best.mean.high < 0:
        return words.UNSURE, f"{_named(best)} {_changes(best)}: the interval holds 0. Observe longer."
    return words.NO_GAIN, (
        f"{_named(best)} {_changes(best)}; with lengths known beforehand shortest first {_changes(oracle)}."
    )


def _named_one(those: list[OrderGain], cuts: Change) -> OrderGain:
    """The last of them, isrtf, where it surely beats srtf or stands alone; else srtf, which cuts nobody."""
    return those[-1] if cuts.high < 0 and -cuts.value >= LEAST_GAIN else those[0]


def _beats(cuts: Change) -> str:
    return f", against mode = srtf mean JCT by {_signed(cuts.value)} ({_signed(cuts.low)} to {_signed(cuts.high)})"


def _named(one: OrderGain) -> str:
    return {SRTF: "mode = srtf", ISRTF: "mode = isrtf"}[one.name]


def _changes(one: OrderGain) -> str:
    mean = one.mean
    return (
        f"changes mean JCT by {_signed(mean.value)} ({_signed(mean.low)} to {_signed(mean.high)}) "
        f"and its 99th percentile by {_signed(one.p99.value)}"
    )


def _kept(best: OrderGain, oracle: OrderGain) -> str:
    if not oracle.mean.value < -LEAST_GAIN:
        return ""
    return f"; that is {_percent(best.mean.value / oracle.mean.value)} of what known lengths would bring"


def _signed(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{100 * share:+.1f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.1f} %"
