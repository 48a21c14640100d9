"""Coverage of the 90 % intervals of ``simulate``: 16 draws of the cost model's own errors, 5th to 95th percentile.

Points without P/D, of recorded clients, are predicted by ``deploy`` and ``simulate`` with the host, and the spread of
the front on the slow side (``cost.roofline_tables.FRONT_SLOW_S`` ships the one fitted to all), of other families of
models. Points of a pair of model and GPU are sweeps: intervals of a coverage draw complete pairs.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _harness import grouped
from _intervals import MIN_GROUPS, Interval, share_interval, sides
from _silicon import NOTHING, Point, Thetas, deployed, fits_without, host_of, loop_of, means, read

from lengthwise import Deployment, InputError, simulate
from lengthwise.cost import HostOverhead
from lengthwise.cost.model_error import LEVEL, perturbed
from lengthwise.cost.roofline_tables import FRONT_SLOW_S, slow_front_log_sd
from lengthwise.schema.cost_tables import CostTables

SEED, EVERY = 5, 40
GRID = (0.0, *(round(0.02 * 1.2**i, 3) for i in range(28)))
_Z90 = 1.645
_TAIL = (1 - LEVEL) / 2


class Bracket(NamedTuple):
    """One measured number with its interval; ``of`` has further words by which it is counted."""

    metric: str
    of: dict[str, str]
    ends: Interval


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    points = read(shared)[0]
    thetas = families_without(points, quick=quick)
    able = [point for point in points if point.inferencemax and not (point.prefill or point.drafts)]
    some = able[:: EVERY if quick else 1]
    needed = np.array([least(point, host_of(thetas[point.family], point)) for point in some])
    families = np.array([point.family for point in some])
    slow_s = {out: spread(needed[families != out]) for out in (*sorted(set(families)), NOTHING)}
    rest_s = slow_s[NOTHING]
    found = [b for p in some for b in of_point(p, host_of(thetas[p.family], p), slow_s.get(p.family, rest_s))]
    about = {"front_slow_s": {"shipped": FRONT_SLOW_S, "fit_without": slow_s, "points": len(some)}}
    details = {"ttft": about, "tpot": {}}
    rows = {f"fidelity.brackets.{name}_coverage": _row(found, name, of) for name, of in details.items()}
    headline = {key: rows["fidelity.brackets.ttft_coverage"][key] for key in ("value", "ci", "unit")}
    return rows | {"deploy.ttft_bracket_coverage": headline}


def families_without(points: Sequence[Point], *, quick: bool) -> Thetas:
    """Return the factors fitted to all other families, by family; quick: to a tenth of the points."""
    (thetas,) = fits_without(points[:: 10 if quick else 1], "family")
    return dict.fromkeys({point.family for point in points}, thetas[NOTHING]) | thetas


def mtp(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the coverage from the low end of ``simulate``'s interval with speculation to the high end without."""
    points = read(shared)[0]
    thetas, slow_s, found, left = families_without(points, quick=quick), FRONT_SLOW_S, [], Counter[str]()
    for point in [point for point in points if point.drafts][:: EVERY if quick else 1]:
        host = host_of(thetas[point.family], point)
        alone, both = of_point(replace(point, drafts=0), host, slow_s), of_point(point, host, slow_s)
        left["does not fit"] += not (alone and both)
        for without, drafts in zip(alone, both, strict=False):
            low_s, high_s = min(drafts.ends.low_s, without.ends.low_s), max(drafts.ends.high_s, without.ends.high_s)
            found.append(without._replace(ends=without.ends._replace(low_s=low_s, high_s=high_s)))
    return {f"fidelity.mtp.{name}_coverage": _row(found, name, {"left_out": dict(left)}) for name in ("ttft", "tpot")}


def of_point(point: Point, host: HostOverhead, slow_s: float) -> list[Bracket]:
    """Return the brackets of a point's TTFT and TPOT; [] where it does not fit."""
    try:
        deployment = deployed(point, "roofline", host)
    except InputError:
        return []
    loop, deployment = loop_of(point), replace(deployment, cost=skewed(deployment.cost, slow_s))
    requests = loop.workload()
    ends = interval(lambda one: list(means(simulate(requests, one, max_log_steps=0), loop)), deployment)
    of = {"model": point.model, "gpu": point.gpu}
    measured = (point.ttft_s, point.tpot_s)
    return [Bracket(name, of, Interval(*s)) for name, *s in zip(("ttft", "tpot"), measured, *ends, strict=True)]


def interval(run: Callable[[Deployment], list[float]], deployment: Deployment) -> tuple[list[float], ...]:
    """Return (predicted, low, high) of each number, as ``metrics.with_model_error`` computes them."""
    predicted = np.array(run(deployment))
    runs = np.array([run(replace(deployment, cost=cost)) for cost in perturbed(deployment.cost)])
    low, high = np.quantile(runs, [_TAIL, 1 - _TAIL], axis=0, method="hazen")
    return predicted.tolist(), np.minimum(low, predicted).tolist(), np.maximum(high, predicted).tolist()


def coverage(found: Sequence[Bracket]) -> dict[str, Any]:
    """Return coverage with its interval over pairs, the misses by side, the bias, and stated and observed log_sd."""
    pairs = {
        pair: [b.ends.low_s <= b.ends.measured_s <= b.ends.high_s for b in some]
        for pair, some in grouped(found, lambda b: (b.of["model"], b.of["gpu"])).items()
    }
    ci = share_interval(pairs, SEED) if len(pairs) >= MIN_GROUPS else None
    counts = sides([b.ends for b in found])
    misses = np.array([math.log(b.ends.measured_s / b.ends.said_s) for b in found])
    own = [math.log(b.ends.high_s / b.ends.low_s) / (2 * _Z90) for b in found]
    numbers = {"coverage": counts["satisfied"] / len(found), "bias": np.median(misses)}
    numbers |= {"log_sd_seen": np.quantile(np.abs(misses), LEVEL) / _Z90, "log_sd_told": np.median(own)}
    rounded = {name: round(float(number), 3) for name, number in numbers.items()}
    return counts | {"pairs": len(pairs), "ci": ci and [round(x, 3) for x in ci]} | rounded


def _row(found: Sequence[Bracket], metric: str, more: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a metric: the coverage, and coverage by what brackets are of."""
    head = [b for b in found if b.metric == metric]
    report, some = coverage(head), grouped(head, lambda b: f"{b.of['model']} on {b.of['gpu']}")
    details = {"expected": LEVEL, "report": report, "by_pair": {pair: coverage(some[pair]) for pair in sorted(some)}}
    about = {"unit": "share", "target": LEVEL, "better": "higher", "ci": report["ci"]}
    return about | {"value": report["coverage"], "details": details | more}


def spread(needed: np.ndarray) -> float:
    """Return the least value of GRID with which the share of points above is closest to one in twenty."""
    return min(GRID, key=lambda sd: abs(float(np.mean(needed > sd)) - _TAIL))


def least(point: Point, host: HostOverhead) -> float:
    """Return the least of GRID with which the point is not above; infinity without one, NaN if it does not fit."""
    try:
        deployment = deployed(point, "roofline", host)
    except InputError:
        return math.nan
    loop = loop_of(point)
    requests = loop.workload()

    def first_s(cost: CostTables) -> float:
        return means(simulate(requests, replace(deployment, cost=cost), max_log_steps=0), loop)[0]

    def holds(slow_s: float) -> bool:
        drawn_s = list(map(first_s, perturbed(skewed(deployment.cost, slow_s))))
        return point.ttft_s <= max(said_s, float(np.quantile(drawn_s, 1 - _TAIL, method="hazen")))

    said_s = first_s(deployment.cost)
    at = 0 if holds(GRID[0]) else bisect_left(GRID, True, lo=1, key=holds)
    return GRID[at] if at < len(GRID) else math.inf


def skewed(cost: CostTables, slow_s: float) -> CostTables:
    """Return the tables with that spread of their front on the slow side."""
    slow_log_sd = slow_front_log_sd(cost.front, slow_s)
    front = (replace(e, slow_log_sd=slow_log_sd) if e.part == "front" else e for e in cost.evidence.errors)
    return replace(cost, evidence=replace(cost.evidence, errors=tuple(front)))
