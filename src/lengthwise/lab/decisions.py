"""Decides whether length-aware scheduling is worth it at a load, and states the reason in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.lab import FCFS, NOT_COMPARED, ONE_SEED, ORACLE, Cell, LoadUnit, Verdict
from lengthwise.statistics import joint_widening, mean_estimate, t_half_width

Run = dict[str, float]
RATIOS = ("jct.mean", "jct.p50", "jct.p99")

MIN_FULL_SHARE = 0.01  # if fewer requests find all slots in use, requests do not queue for slots
MIN_WAITING_SHARE = 0.05  # if requests wait for less of their JCT, they do not queue for memory either
MIN_GAIN = 0.01  # a smaller gain in mean JCT is not worth the effort, even if significant
MAX_SERVED_DIFFERENCE = 0.01  # if served shares differ by more, the means are of different requests
IMPROVEMENT, IDLE, MATCHING, NONE, TAIL = "worth it", "no queue", "lengths alike", "no gain", "the tail pays"


def estimates(own: Sequence[Run], fcfs: Sequence[Run], oracle: Sequence[Run], level: float) -> dict[str, Estimate]:
    """Return a cell's values from one run for each seed; all three have the same order of seeds."""

    def column(runs: Sequence[Run], name: str) -> npt.NDArray[np.float64]:
        return np.array([run[name] for run in runs])

    values = {name: mean_estimate(column(own, name), level) for name in own[0]}
    x, f, o = (column(runs, "jct.mean") for runs in (own, fcfs, oracle))
    values["gap_closed"] = gap_closed(x, f, o, level)
    for end, runs in (("fcfs", fcfs), ("oracle", oracle)):
        for name in RATIOS:
            values[f"{name}/{end}"] = ratio(column(own, name), column(runs, name), level)
    return values


def gap_closed(own: npt.ArrayLike, fcfs: npt.ArrayLike, oracle: npt.ArrayLike, level: float) -> Estimate:
    """Return (FCFS - own) / (FCFS - oracle), a ratio of means over seeds; unknown without a gap."""
    f, x, o = (np.asarray(v, float) for v in (fcfs, own, oracle))
    gap = mean_estimate(f - o, level)
    # A gap is significant, and at least a millionth of FCFS' mean.
    if not gap.value > 1e-6 * float(f.mean()) or (gap.has_interval and not gap.low > 0):
        return UNKNOWN
    return ratio(f - x, f - o, level)


def ratio(numerator: npt.ArrayLike, denominator: npt.ArrayLike, level: float) -> Estimate:
    """Return mean(numerator) / mean(denominator) over paired seeds, with its linearised t interval."""
    a, b = np.asarray(numerator, float), np.asarray(denominator, float)
    mean = float(b.mean())
    if mean == 0:
        return UNKNOWN
    # The spread of a - ratio x b, in which noise of both cancels (Cochran, Sampling Techniques, 1977, 6.4).
    value = float(a.mean()) / mean
    return Estimate(value, float(t_half_width(a - value * b, level)) / abs(mean))


def decision(cells: Sequence[Cell], *, seeds: int, level: float = 0.95) -> Verdict:
    """Return the verdict on the cells of one load and batch size; FCFS and the oracle are the first two.

    Length-aware scheduling is worth it if some policy, with a predictor that exists, is significantly faster than FCFS
    in the mean, by at least 1 %, and raises the 99th percentile by no more than it reduces the mean. Significance is
    that of all candidates together (Bonferroni), as the best of them is chosen; a single seed gives none.
    """
    fcfs, oracle = cells[0], cells[1]
    tried = [cell for cell in cells[2:] if cell.policy != FCFS]
    # Candidates that know the true lengths count only if nothing else was tried.
    candidates = [cell for cell in tried if cell.predictor != ORACLE] or tried
    widening = math.nan
    if seeds > 1 and candidates:
        widening = joint_widening(level, len(candidates), seeds - 1)
    key = "jct.mean/fcfs"
    widened = [Estimate(cell[key].value, cell[key].half_width * widening) for cell in candidates]
    each = zip(candidates, widened, strict=True)
    candidates = [replace(cell, values={**cell.values, key: mean}) for cell, mean in each]

    def served_difference(cell: Cell) -> float:
        return abs(cell["served"].value - fcfs["served"].value)

    different = max((oracle, *candidates), key=served_difference)
    served = fcfs["served"].value
    if served_difference(different) > MAX_SERVED_DIFFERENCE:
        description = (
            f"{_percent(served)} of the requests are served under FCFS and {_percent(different['served'].value)} under "
            f"{different.name}: the means are of different requests. Raise timeout_s, or lower the load."
        )
        return Verdict(fcfs.batch, fcfs.load, False, NOT_COMPARED, "", description)
    reason, best, description = _compare(fcfs, oracle, candidates)
    if served < 1:
        description += f" {_percent(served)} of all requests are served; the means leave out the others."
    return Verdict(fcfs.batch, fcfs.load, reason == IMPROVEMENT, reason, best, description)


def _compare(fcfs: Cell, oracle: Cell, candidates: list[Cell]) -> tuple[str, str, str]:
    """Return the reason, the name of the best cell, and a sentence, where all cells serve the same share."""
    full, waiting = fcfs["found_full"].value, fcfs["waiting_share"].value
    if full < MIN_FULL_SHARE and waiting < MIN_WAITING_SHARE and _gain(oracle) < MIN_GAIN:
        found_full = f"{_percent(full)} of the requests find it full"
        return IDLE, "", f"Everything fits the batch: {found_full}, so that the order does not matter."
    # Significantly faster than FCFS; with a single seed, by the mean.
    means = [(cell, cell["jct.mean/fcfs"]) for cell in candidates if _gain(cell) >= MIN_GAIN]
    faster = [cell for cell, mean in means if (mean.high if mean.has_interval else mean.value) < 1]
    acceptable = [cell for cell in faster if _tail(cell) <= _gain(cell)]
    if acceptable:
        best = max(acceptable, key=_gain)
        cuts = f"{best.name} cuts mean JCT by {_interval(best)}"
        tail = _change(best["jct.p99/fcfs"].value)
        if not best["jct.mean/fcfs"].has_interval:
            description = f"{cuts} and the 99th percentile {tail}, but one seed has no interval: run more seeds."
            return ONE_SEED, best.name, description
        significance = f" (significant among {len(candidates)} candidates)" if len(candidates) > 1 else ""
        closed = best["gap_closed"].value
        share = "" if math.isnan(closed) else f", {_percent(closed)} of the gain with known lengths"
        oracle_tail = _change(oracle["jct.p99/fcfs"].value)
        description = f"{cuts}{significance}{share}; the 99th percentile {tail}, under the oracle it {oracle_tail}."
        return IMPROVEMENT, best.name, description
    if faster:
        best = max(faster, key=lambda cell: _gain(cell) - _tail(cell))
        description = (
            f"{best.name} cuts mean JCT by {_interval(best)}, but the 99th percentile "
            f"{_change(best['jct.p99/fcfs'].value)}: the tail loses more than the mean gains. A bound on waiting "
            "(max_wait_s) or ageing trades some of the one for the other."
        )
        return TAIL, best.name, description
    best = max(candidates, key=_gain, default=oracle)
    if _gain(oracle) < MIN_GAIN:
        description = (
            f"Requests wait for {_percent(waiting)} of their JCT, but shortest job first with known lengths changes "
            f"mean JCT by {_interval(oracle, sign=True)}: lengths do not differ enough for the order to matter."
        )
        return MATCHING, best.name, description
    change, possible = _interval(best, sign=True), _percent(_gain(oracle))
    description = (
        f"The best candidate, {best.name}, changes mean JCT by {change}; known lengths would cut it by {possible}."
    )
    return NONE, best.name, description


def answer(decisions: Sequence[Verdict], unit: LoadUnit) -> tuple[str, ...]:
    """Return a sentence for each reason of the verdicts, with one of these verdicts in full."""
    lines = []
    for reason in (IMPROVEMENT, ONE_SEED, TAIL, NONE, MATCHING, IDLE, NOT_COMPARED):
        if matching := [v for v in decisions if v.reason == reason]:
            is_all = len(matching) == len(decisions)
            where = "at every load and batch size" if is_all else _places(matching, unit)
            shown = matching[-1] if reason == IMPROVEMENT else matching[0]
            example = f" For instance at {unit.text(shown.load)}, batch {shown.batch}:" if len(matching) > 1 else ""
            lines.append(f"{shown.head} {where}.{example} {shown.description}")
    return tuple(lines)


def _gain(cell: Cell) -> float:
    return 1 - cell["jct.mean/fcfs"].value


def _tail(cell: Cell) -> float:
    return cell["jct.p99/fcfs"].value - 1


def _interval(cell: Cell, *, sign: bool = False) -> str:
    mean = cell["jct.mean/fcfs"]
    value = 100 * (mean.value - 1) * (1 if sign else -1)
    half = f" ± {100 * mean.half_width:.1f}" if mean.has_interval else ""
    return f"{value:+.1f}{half} %" if sign else f"{value:.1f}{half} %"


def _change(ratio: float) -> str:
    change = 100 * (ratio - 1)
    text = f"{'grows' if change > 0 else 'falls'} by {abs(change):.0f} %"
    return text if abs(change) >= 0.5 else "stays as it is"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def _places(verdicts: Sequence[Verdict], unit: LoadUnit) -> str:
    """Return the loads by batch size, batch sizes with the same loads together."""
    loads: dict[int, list[float]] = {}
    for v in verdicts:
        loads.setdefault(v.batch, []).append(v.load)
    batches: dict[tuple[float, ...], list[int]] = {}
    for batch, of_batch in loads.items():
        batches.setdefault(tuple(of_batch), []).append(batch)
    parts = []
    for same_loads, same_batches in batches.items():
        numbers, _, (*_, unit_text) = zip(*(unit.text(load).partition(" ") for load in same_loads), strict=True)
        parts.append(f"at {', '.join(numbers)} {unit_text} (batch {', '.join(map(str, same_batches))})")
    return " and ".join(parts)
