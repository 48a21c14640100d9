"""At this load, is length-aware scheduling worth it? In words, and plainly where it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.lab import FCFS, NOT_COMPARED, ONE_SEED, ORACLE, Cell, LoadUnit, Verdict
from lengthwise.statistics import mean_estimate, t_half_width, t_quantile

Run = dict[str, float]
RATIOS = ("jct.mean", "jct.p50", "jct.p99")


def estimates(own: Sequence[Run], fcfs: Sequence[Run], oracle: Sequence[Run], level: float) -> dict[str, Estimate]:
    """A cell's values from one run a seed; those of all three stand in the order of the seeds."""
    values = {name: mean_estimate([run[name] for run in own], level) for name in own[0]}
    x, f, o = (_column(runs, "jct.mean") for runs in (own, fcfs, oracle))
    values["gap_closed"] = gap_closed(x, f, o, level)
    for end, runs in (("fcfs", fcfs), ("oracle", oracle)):
        for name in RATIOS:
            values[f"{name}/{end}"] = ratio(_column(own, name), _column(runs, name), level)
    return values


def gap_closed(own: npt.ArrayLike, fcfs: npt.ArrayLike, oracle: npt.ArrayLike, level: float) -> Estimate:
    """(FCFS - own) / (FCFS - oracle), a ratio of means over seeds; unknown where there is no gap.

    There is none where the interval of FCFS - oracle reaches 0 or its mean is below a millionth of FCFS'.
    """
    f, x, o = (np.asarray(v, float) for v in (fcfs, own, oracle))
    gap = mean_estimate(f - o, level)
    least = 1e-6 * float(f.mean())
    if not gap.value > least or (gap.has_interval and not gap.low > 0):
        return UNKNOWN
    return ratio(f - x, f - o, level)


def ratio(above: npt.ArrayLike, below: npt.ArrayLike, level: float) -> Estimate:
    """mean(above) / mean(below) over paired seeds, with its linearised t interval.

    The spread is that of above - ratio x below (Cochran, Sampling Techniques, 1977, 6.4): what both share
    falls out.
    """
    a, b = np.asarray(above, float), np.asarray(below, float)
    middle = float(b.mean())
    if middle == 0:
        return UNKNOWN
    value = float(a.mean()) / middle
    return Estimate(value, float(t_half_width(a - value * b, level)) / abs(middle))


def widened(half_width: float, seeds: int, level: float, num_candidates: int) -> float:
    """The half-width at which ``num_candidates`` intervals hold together (Bonferroni); NaN with a single seed."""
    if seeds < 2:
        return math.nan
    single, joint = (t_quantile(1 - (1 - level) / n, seeds - 1) for n in (1, num_candidates))
    return half_width * joint / single


def _column(runs: Sequence[Run], name: str) -> npt.NDArray[np.float64]:
    return np.array([run[name] for run in runs])


NO_QUEUE = 0.01
"""Where fewer requests find every seat taken, there is no queue for seats to speak of."""
NO_WAIT = 0.05
"""Nor is there one for memory where a smaller share of the JCT is spent in it."""
MIN_GAIN = 0.01
"""A smaller gain in mean JCT is not worth the trouble, however sure it is."""
SAME_SERVED = 0.01
"""Where served shares differ by more, the means are of different requests."""

IMPROVEMENT, IDLE, MATCHING, NONE, TAIL = "worth it", "no queue", "lengths alike", "no gain", "the tail pays"


def decision(cells: Sequence[Cell], *, seeds: int, level: float = 0.95) -> Verdict:
    """What the cells of one load and batch size say; FCFS and the oracle are the first two.

    It is worth it where some policy, with a predictor that one can have, is surely faster than FCFS in
    the mean, by at least 1 %, and costs the 99th percentile no more than it gains the mean. Sure is what
    holds for all candidates together (Bonferroni), since the best of them is picked.

    Args:
        cells: FCFS, the oracle, and who else was tried.
        seeds: Runs behind each cell; of a single one nothing is sure.
        level: Confidence level of the cells' intervals.
    """
    fcfs, oracle = cells[0], cells[1]
    candidates = [_among_all(cell, cells, seeds, level) for cell in _candidates(cells)]
    unlike = [cell for cell in (oracle, *candidates) if _served_apart(cell, fcfs) > SAME_SERVED]
    if unlike:
        worst = max(unlike, key=lambda cell: _served_apart(cell, fcfs))
        return Verdict(fcfs.batch, fcfs.load, False, NOT_COMPARED, "", _not_compared(fcfs, worst))
    reason, best, description = _evaluated(fcfs, oracle, candidates)
    return Verdict(fcfs.batch, fcfs.load, reason == IMPROVEMENT, reason, best, description + _served(fcfs))


def _evaluated(fcfs: Cell, oracle: Cell, candidates: list[Cell]) -> tuple[str, str, str]:
    """(reason, the cell that was judged, sentence) where all serve the same share."""
    if _idle(fcfs) and _gain(oracle) < MIN_GAIN:
        return IDLE, "", _no_queue(fcfs)
    faster = [cell for cell in candidates if _surely_faster(cell)]
    bearable = [cell for cell in faster if _tail(cell) <= _gain(cell)]
    if bearable:
        best = max(bearable, key=_gain)
        if best["jct.mean/fcfs"].has_interval:
            return IMPROVEMENT, best.name, _is_improvement(best, oracle, len(candidates))
        return ONE_SEED, best.name, _one_seed(best)
    if faster:
        best = max(faster, key=lambda cell: _gain(cell) - _tail(cell))
        return TAIL, best.name, _tail_pays(best)
    best = max(candidates, key=_gain, default=oracle)
    if _gain(oracle) < MIN_GAIN:
        return MATCHING, best.name, _matching(fcfs, oracle)
    return NONE, best.name, _no_gain(best, oracle)


def answer(decisions: Sequence[Verdict], unit: LoadUnit) -> tuple[str, ...]:
    """All verdicts in a few sentences: those that end alike together, one of them in full."""
    lines = []
    for reason in (IMPROVEMENT, ONE_SEED, TAIL, NONE, MATCHING, IDLE, NOT_COMPARED):
        alike = [v for v in decisions if v.reason == reason]
        if alike:
            head = alike[0].head
            where = "at every load and batch size" if len(alike) == len(decisions) else _places(alike, unit)
            shown = alike[-1] if reason == IMPROVEMENT else alike[0]
            of = f" For instance {_place(shown, unit)}:" if len(alike) > 1 else ""
            lines.append(f"{head} {where}.{of} {shown.description}")
    return tuple(lines)


def _candidates(cells: Sequence[Cell]) -> list[Cell]:
    """Who could be had: predictors that know the lengths only where nothing else was asked about."""
    own = [cell for cell in cells[2:] if cell.policy != FCFS]
    real = [cell for cell in own if cell.predictor != ORACLE]
    return real or own


def _among_all(cell: Cell, cells: Sequence[Cell], seeds: int, level: float) -> Cell:
    """The cell with the interval of its mean JCT widened for the choice among all candidates."""
    shorter = cell["jct.mean/fcfs"]
    half = widened(shorter.half_width, seeds, level, len(_candidates(cells)))
    return replace(cell, values={**cell.values, "jct.mean/fcfs": Estimate(shorter.value, half)})


def _served_apart(cell: Cell, fcfs: Cell) -> float:
    """By how much the shares of requests served differ."""
    return abs(cell["served"].value - fcfs["served"].value)


def _idle(fcfs: Cell) -> bool:
    return fcfs["found_full"].value < NO_QUEUE and fcfs["waiting_share"].value < NO_WAIT


def _gain(cell: Cell) -> float:
    return 1 - cell["jct.mean/fcfs"].value


def _tail(cell: Cell) -> float:
    return cell["jct.p99/fcfs"].value - 1


def _surely_faster(cell: Cell) -> bool:
    """With a single seed there is no interval: it only seems so."""
    shorter: Estimate = cell["jct.mean/fcfs"]
    sure = shorter.high < 1 if shorter.has_interval else shorter.value < 1
    return sure and _gain(cell) >= MIN_GAIN


def _no_queue(fcfs: Cell) -> str:
    share = fcfs["found_full"].value
    return (
        f"Everything fits the batch: {_percent(share)} of the requests find all seats taken, and no order "
        "shortens a queue that is not there."
    )


def _not_compared(fcfs: Cell, other: Cell) -> str:
    return (
        f"{_percent(fcfs['served'].value)} of the requests are served under FCFS and "
        f"{_percent(other['served'].value)} under {other.name}: the means are of different requests. Raise "
        "timeout_s, or lower the load."
    )


def _served(fcfs: Cell) -> str:
    """A sentence on who was left out of all means; "" where nobody was."""
    share = fcfs["served"].value
    return f" Of all requests {_percent(share)} are served; the others count nowhere." if share < 1 else ""


def _one_seed(best: Cell) -> str:
    return (
        f"{best.name} cuts mean JCT by {_interval(best)} and the 99th percentile "
        f"{_change(best['jct.p99/fcfs'].value)}, but one seed has no interval: ask again with more seeds."
    )


def _matching(fcfs: Cell, oracle: Cell) -> str:
    return (
        f"Requests wait for {_percent(fcfs['waiting_share'].value)} of their JCT, but the shortest first with lengths "
        f"known changes mean JCT by {_interval(oracle, sign=True)}: lengths do not differ enough for an order "
        "to matter."
    )


def _is_improvement(best: Cell, oracle: Cell, num_candidates: int) -> str:
    closed = best["gap_closed"]
    share = f", {_percent(closed.value)} of what perfect lengths would bring" if closed.value == closed.value else ""
    chosen = f" (sure for the best of {num_candidates})" if num_candidates > 1 else ""
    return (
        f"{best.name} cuts mean JCT by {_interval(best)}{chosen}{share}; the 99th percentile "
        f"{_change(best['jct.p99/fcfs'].value)}, that of the oracle {_change(oracle['jct.p99/fcfs'].value)}."
    )


def _tail_pays(best: Cell) -> str:
    return (
        f"{best.name} cuts mean JCT by {_interval(best)}, but the 99th percentile "
        f"{_change(best['jct.p99/fcfs'].value)}: the tail pays more than the mean gains. A bound on waiting "
        "(max_wait_s) or ageing trades some of the one for the other."
    )


def _no_gain(best: Cell, oracle: Cell) -> str:
    perfect = 1 - oracle["jct.mean/fcfs"].value
    return (
        f"The best that was tried, {best.name}, changes mean JCT by {_interval(best, sign=True)}; "
        f"perfect lengths would cut it by {_percent(perfect)}."
    )


def _interval(cell: Cell, *, sign: bool = False) -> str:
    shorter = cell["jct.mean/fcfs"]
    value = 100 * (shorter.value - 1) * (1 if sign else -1)
    half = f" ± {100 * shorter.half_width:.1f}" if shorter.has_interval else ""
    return f"{value:+.1f}{half} %" if sign else f"{value:.1f}{half} %"


def _change(ratio: float) -> str:
    change = 100 * (ratio - 1)
    if abs(change) < 0.5:
        return "stays as it is"
    return f"{'grows' if change > 0 else 'falls'} by {abs(change):.0f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def _places(matching: Sequence[Verdict], unit: LoadUnit) -> str:
    """Loads by batch size, batch sizes with the same loads together."""
    loads: dict[int, list[float]] = {}
    for v in matching:
        loads.setdefault(v.batch, []).append(v.load)
    groups: dict[tuple[float, ...], list[int]] = {}
    for batch, of_batch in loads.items():
        groups.setdefault(tuple(of_batch), []).append(batch)
    parts = [f"at {_load_list(ls, unit)} (batch {', '.join(map(str, bs))})" for ls, bs in groups.items()]
    return " and ".join(parts)


def _load_list(loads: Sequence[float], unit: LoadUnit) -> str:
    texts = [unit.text(load) for load in loads]
    first, *rest = (text.partition(" ") for text in texts)
    if unit is not LoadUnit.CAPACITY:
        return f"{', '.join(text.partition(' ')[0] for text in texts)} {first[2]}"
    return f"{', '.join([first[0], *(r[0] for r in rest)])} {first[2]}"


def _place(v: Verdict, unit: LoadUnit) -> str:
    return f"at {unit.text(v.load)}, batch {v.batch}"
