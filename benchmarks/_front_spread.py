"""How much later than said a request may come to an engine: fitted on one half of the measured deployments.

The halves share no pair of a model and a GPU: pairs by how many points they have, the most first, go to the half that
has fewer. A point's first token is told as ``simulate`` tells it, with the host of other models and GPUs; what is
fitted is the standard deviation of the front's delay on the slow side: that with which the share of points above their
intervals is nearest to one in twenty (``cost._roofline_errors.FRONT_SLOW_LOG_SD`` ships it).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from _silicon_loop import loop_of, means, workload
from _silicon_rows import Point
from _silicon_shipped import deployed

from lengthwise.cost import HostOverhead
from lengthwise.cost.model_error import LEVEL, perturbed
from lengthwise.engine import simulate
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.errors import InputError

GRID = tuple(round(0.1 * i, 1) for i in range(31))
TAIL = (1 - LEVEL) / 2


def fitted_pairs(points: Sequence[Point]) -> frozenset[tuple[str, str]]:
    """The pairs of the half on which the spread is fitted."""
    halves: tuple[Counter[tuple[str, str]], ...] = (Counter(), Counter())
    of_pair = Counter(point.pair for point in points)
    for pair in sorted(of_pair, key=lambda pair: (-of_pair[pair], pair)):
        min(halves, key=Counter.total)[pair] = of_pair[pair]
    return frozenset(halves[0])


def spread(points: Sequence[Point], host_of: Callable[[Point], HostOverhead]) -> float:
    """That of GRID with which the share of points above is nearest to one in twenty; the least of several."""
    needed = np.array([least(point, host_of(point)) for point in points])
    return min(GRID, key=lambda sd: abs(float(np.mean(needed > sd)) - TAIL))


def least(point: Point, host: HostOverhead) -> float:
    """The least of GRID with which the point does not lie above; infinite where none does it.

    Not a number for a point that does not fit its GPUs: it lies nowhere.
    """
    try:
        deployment = deployed(point, "roofline", host)
    except InputError:
        return math.nan
    requests = workload(loop_of(point))

    def first_s(cost: CostTables) -> float:
        return means(simulate(requests, replace(deployment, cost=cost), keep_steps=0))[0]

    def is_held(slow_log_sd: float) -> bool:
        off = perturbed(_leaning(deployment.cost, slow_log_sd))
        high_s = np.quantile([first_s(cost) for cost in off], 1 - TAIL, method="hazen")
        return point.ttft_s <= max(said_s, float(high_s))

    said_s = first_s(deployment.cost)
    at = 0 if is_held(GRID[0]) else bisect_left(GRID, True, lo=1, key=is_held)
    return GRID[at] if at < len(GRID) else math.inf


def _leaning(cost: CostTables, slow_log_sd: float) -> CostTables:
    """The tables with that spread of their front."""
    front = (replace(e, slow_log_sd=slow_log_sd) if e.part == "front" else e for e in cost.errors)
    return replace(cost, errors=tuple(front))
