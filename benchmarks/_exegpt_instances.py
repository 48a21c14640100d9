"""The search for a schedule beside Bayesian search, and on thousands of random instances."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from _exegpt_scenarios import OPT, estimator, faster_transformer, planner
from _schedule_bayesian import bayesian

from lengthwise.schedule import Strategy, Tolerances, branch_and_bound, exhaustive

sys.path.append(str(Path(__file__).parents[1] / "tests" / "schedule"))

SEEDS = 4
INSTANCES = 8000


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """What Bayesian search misses, and the largest regret on random instances."""
    return {
        "exegpt.bayesian_regret": against_bayesian(2 if fast else SEEDS),
        "exegpt.random_regret_over_gap": random_instances(INSTANCES // 20 if fast else INSTANCES),
    }


def against_bayesian(seeds: int) -> dict[str, Any]:
    """Regret of as many points by Bayesian search as branch and bound took, and of twice as many."""
    of = estimator(OPT, "s")
    side = next(one for one in planner(of).sides if one.strategy is Strategy.RRA and one.tp == 4)
    bound_s = faster_transformer(of).bounds_s()[1]
    best = exhaustive(side.perf_anew, side.variables, bound_s).best.throughput_rps
    ours = branch_and_bound(side.perf_anew, side.variables, bound_s)
    lost = {
        times: [
            _lost(bayesian(side.perf_anew, side.variables, bound_s, times * ours.evaluated, seed), best)
            for seed in range(seeds)
        ]
        for times in (1, 2)
    }
    return {
        "value": fmean(lost[1]),
        "unit": "share",
        "better": "lower",
        "ci": (min(lost[1]), max(lost[1])),
        "twice_as_many": fmean(lost[2]),
        "evaluated": ours.evaluated,
        "points": side.size,
        "branch_and_bound": _lost(ours, best),
        "seeds": seeds,
        "of": "opt-13b-a40, s, RRA at TP 4, bound 30 %",
    }


def _lost(found, best: float) -> float:
    return max(1 - found.best.throughput_rps / best, 0.0) if found.best else 1.0


def random_instances(count: int) -> dict[str, Any]:
    """The largest regret of so many instances, as a share of the gap that is promised; 1: just kept."""
    worst, shares, exact = 0.0, [], 0
    for seed in range(count):
        grid, bound_s, tolerances = instance(seed)
        found = branch_and_bound(grid.perf, grid.variables, bound_s, tolerances)
        oracle = exhaustive(grid.perf, grid.variables, bound_s)
        assert (found.best is None) == (oracle.best is None)
        shares.append(found.share)
        if oracle.best is None:
            continue
        lost = oracle.best.throughput_rps / found.best.throughput_rps - 1
        assert lost <= tolerances.accepted + 1e-12
        exact += lost <= 1e-12
        worst = max(worst, lost / tolerances.accepted if tolerances.accepted else 0.0)
    return {
        "value": worst,
        "unit": "of the promised gap",
        "better": "lower",
        "target": 1.0,
        "instances": count,
        "exactly_the_best": exact,
        "mean_points_share": fmean(shares),
    }


def instance(seed: int):
    """Latency and throughput over a random grid, half of them exactly monotone, and a bound that some of it meets."""
    from schedule_grids import SHAPES, Grid, monotone, shaken

    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    kinds = rng.choice(["smooth", "steps", "flat"], 2, p=[0.5, 0.4, 0.1])
    shares = rng.uniform(0, 0.1, 2) * (seed % 2)
    latency_s, rps = (
        shaken(rng, monotone(rng, shape, str(kind)), share) for kind, share in zip(kinds, shares, strict=True)
    )
    bound_s = float(np.quantile(latency_s, rng.random()))
    return Grid(latency_s, rps), bound_s, Tolerances(float(shares[1]), float(shares[0]))
