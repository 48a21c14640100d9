"""The search for a schedule: time, regret, random and Bayesian comparisons, and monotonicity (Table 5)."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import _exegpt_scenarios as ex
import numpy as np
from _harness import machine

from lengthwise import schedule
from lengthwise.schedule import Perf, Strategy, Variable, branch_and_bound, exhaustive
from lengthwise.schedule.controls import CODES
from lengthwise.schedule.optimizer import evaluate_grid

ALL = tuple(Strategy)


def search(_: Path, quick: bool) -> dict[str, Any]:
    """Return the slowest search and the largest share of schedules estimated; every bound has a new planner."""
    first = ex.estimator(ex.OPT, "s")
    ex.chosen(ex.planner(first), ex.faster_transformer(first).bounds_s()[0])  # loads the compiled code
    choices = []
    for served, task in [(ex.OPT, "s"), (ex.OPT, "t")] if quick else ex.EVERYTHING:
        bounds_s = ex.faster_transformer(ex.estimator(served, task)).bounds_s()
        for bound, bound_s in zip(ex.BOUNDS, bounds_s, strict=False):
            start = time.process_time()
            plan = ex.planner(ex.estimator(served, task))
            choice = ex.chosen(plan, bound_s)
            duration_s = time.process_time() - start
            assert choice is None or choice.evaluated <= choice.points
            points, evaluated = (sum(getattr(one, key) for one in plan.spaces) for key in ("size", "evaluated"))
            choices.append({
                "model": served.name,
                "task": task,
                "bound": bound,
                "search_s": duration_s,
                "points": points,
                "points_share": evaluated / points,
                "estimated_of_waa": sum(one.evaluated for one in plan.spaces if one.strategy in ex.WAA),
            })  # fmt: skip
    slowest, largest = (max(choice[name] for choice in choices) for name in ("search_s", "points_share"))
    return {
        "exegpt.search_s_max": {"value": slowest, "choices": choices, "machine": machine()},
        "exegpt.points_share_max": largest,
    }


# Regret: choices against every schedule there is, at many bounds
QUESTIONS = (
    *((ex.OPT, task, ALL) for task in ("s", "t", "g", "c1")),
    (ex.T5, "s", ALL),
    *((ex.GPT39, "t", ex.WAA), (ex.GPT101, "t", ex.WAA), (ex.GPT101, "c1", ex.WAA)),
)
SIXTEEN_GPUS = (ex.GPT39, "s", ALL)  # all strategies and degrees, which takes minutes: a row of its own
BETWEEN = 12
"""Bounds from the least latency to that of the highest throughput, in addition to FasterTransformer's and none."""


def regret(_: Path, quick: bool) -> dict[str, Any]:
    """Return the largest regret over questions and bounds, and that of a large question."""
    rows = {"exegpt.regret_max": _regret_row(QUESTIONS[:1] if quick else QUESTIONS)}
    return rows if quick else rows | {"exegpt.regret_16_gpus": _regret_row([SIXTEEN_GPUS])}


def _regret_row(questions) -> dict[str, Any]:
    found = {f"{served.name}, {task}": _regrets(served, task, some) for served, task, some in questions}
    value = max(question["regret_max"] for question in found.values())
    return {"value": value, "unit": "share", "better": "lower", "questions": found}


def _regrets(served, task: str, strategies: tuple[Strategy, ...]) -> dict[str, Any]:
    """Return the largest share of the best throughput that choices fall short of, over all bounds."""
    of, start = ex.estimator(served, task), time.process_time()
    spaces = [space for space in ex.planner(of, strategies).spaces if space.size]
    grids = [evaluate_grid(space.perf_uncached, space.variables) for space in spaces]
    latency_s = np.concatenate([grid.latency_s.ravel() for grid in grids])
    rps = np.concatenate([grid.throughput_rps.ravel() for grid in grids])
    minutes = (time.process_time() - start) / 60
    latency_s, rps = latency_s[np.isfinite(latency_s)], rps[np.isfinite(latency_s)]
    between = np.geomspace(1.001 * latency_s.min(), latency_s[np.argmax(rps)], BETWEEN)
    regrets, won = [], []
    for bound_s in (*between, *ex.faster_transformer(of).bounds_s()):
        best_rps = float(rps[latency_s <= bound_s].max(initial=0.0))
        if not best_rps:
            continue
        choice = ex.chosen(ex.planner(of, strategies), bound_s)
        own_rps = choice.row.throughput_rps if choice else 0.0
        assert own_rps <= best_rps * (1 + 1e-9), "no schedule is better than the best of all"
        regrets.append(max(1 - own_rps / best_rps, 0.0))
        won.append(choice and choice.row.strategy)
    return {
        "strategies": [strategy.value for strategy in strategies],
        "points": sum(space.size for space in spaces),
        "exhaustive_minutes": minutes,
        "bounds": len(regrets),
        "regret_max": max(regrets),
        "chosen": {strategy.value: won.count(strategy.value) for strategy in strategies},
    }


# Bayesian search, and random instances
SEEDS, INSTANCES = 4, 8000


def instances(_: Path, quick: bool) -> dict[str, Any]:
    """Return the regret of Bayesian search, and the largest regret on random instances over the promised gap."""
    return {
        "exegpt.bayesian_regret": _bayesian_regret(2 if quick else SEEDS),
        "exegpt.random_regret_over_gap": _random_instances(INSTANCES // 20 if quick else INSTANCES),
    }


def _bayesian_regret(seeds: int) -> dict[str, Any]:
    """Compare with as many estimates as branch and bound used, and with twice as many."""
    from lengthwise.search import Bayesian

    of = ex.estimator(ex.OPT, "s")
    space = next(one for one in ex.planner(of).spaces if one.strategy is Strategy.RRA and one.tp == 4)
    bound_s = ex.faster_transformer(of).bounds_s()[1]
    best_rps = exhaustive(space.perf_uncached, space.variables, bound_s).best.throughput_rps
    own = branch_and_bound(space.perf_uncached, space.variables, bound_s)

    def regret(evaluations: int, seed: int) -> float:
        proposals = Bayesian([{v.name: v.values for v in space.variables}], evaluations, seed, 8)
        found_rps = 0.0
        while settings := proposals.suggest():
            points = np.array([[one[v.name] for v in space.variables] for one in settings], np.int64)
            got = space.perf_uncached(points)
            good = (got.latency_s <= bound_s) & np.isfinite(got.latency_s)
            scores = [float(rps) if ok else None for rps, ok in zip(got.throughput_rps, good.tolist(), strict=True)]
            found_rps = max(found_rps, *(score or 0.0 for score in scores))
            proposals.report(list(zip(settings, scores, strict=True)))
        return max(1 - found_rps / best_rps, 0.0)

    equal, double = ([regret(times * own.evaluated, seed) for seed in range(seeds)] for times in (1, 2))
    value = {"value": fmean(equal), "unit": "share", "better": "lower", "ci": (min(equal), max(equal))}
    own_regret = max(1 - own.best.throughput_rps / best_rps, 0.0)
    details = {"twice_as_many": fmean(double), "evaluated": own.evaluated, "branch_and_bound": own_regret}
    return value | details | {"points": space.size, "of": "opt-13b-a40, s, RRA at TP 4, bound 30 %"}


def _random_instances(count: int) -> dict[str, Any]:
    """Return the largest regret of random grids, half of them exactly monotone, over the gap that is promised."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "schedule"))
    from schedule_grids import SHAPES, Grid, monotone, shaken

    worst, exact = 0.0, 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        shape = SHAPES[seed % len(SHAPES)]
        kinds = rng.choice(["smooth", "steps", "flat"], 2, p=[0.5, 0.4, 0.1])
        shares = rng.uniform(0, 0.1, 2) * (seed % 2)
        grid = Grid(*(shaken(rng, monotone(rng, shape, str(kind)), by) for kind, by in zip(kinds, shares, strict=True)))
        bound_s = float(np.quantile(grid.latency_s, rng.random()))
        tolerances = schedule.Tolerances(float(shares[1]), float(shares[0]))
        found = branch_and_bound(grid.perf, grid.variables, bound_s, tolerances)
        oracle = exhaustive(grid.perf, grid.variables, bound_s)
        assert (found.best is None) == (oracle.best is None)
        if oracle.best is None:
            continue
        lost = oracle.best.throughput_rps / found.best.throughput_rps - 1
        assert lost <= tolerances.accepted + 1e-12
        exact += lost <= 1e-12
        worst = max(worst, lost / tolerances.accepted if tolerances.accepted else 0.0)
    value = {"value": worst, "unit": "of the promised gap", "better": "lower", "target": 1.0}
    return value | {"instances": count, "exactly_the_best": exact}


# Table 5: the share of points that break monotonicity, one control variable at a time
TOLERANCES, HEADLINE = (0.02, 0.05, 0.10), 0.05
MAX_VALUES = 40
ONE_SPLIT = "B_E, one split"
ASSUMED = ("rra B_E", "rra N_D", f"waa {ONE_SPLIT}")  # variables that the search assumes to be monotone
PAPER_COLUMNS = ("rra B_E", "rra N_D", "waa B_E", "waa TP", "waa B_m")
PAPER = {  # (task, tolerance): by strategy and variable, percent by latency and by throughput
    ("s", 0.02): ((0.6, 2.3), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.8, 0.0)),
    ("s", 0.05): ((0.6, 0.3), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.5, 0.0)),
    ("s", 0.10): ((0.3, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.4, 0.0)),
    ("t", 0.02): ((0.2, 0.1), (0.0, 0.0), (0.1, 0.0), (1.2, 0.0), (10.9, 0.0)),
    ("t", 0.05): ((0.2, 0.0), (0.0, 0.0), (0.0, 0.0), (0.8, 0.0), (10.6, 0.0)),
    ("t", 0.10): ((0.2, 0.0), (0.0, 0.0), (0.0, 0.0), (0.4, 0.0), (10.4, 0.0)),
}


def monotonicity(_: Path, quick: bool) -> dict[str, Any]:
    """Return the share at 5 % over Table 5's variables, the larger of latency's and throughput's, and the table."""
    rows = [row for task in ("s", "t") for row in _monotonicity_of(ex.OPT if quick else ex.GPT39, task)]

    def shares(columns: tuple[str, ...]) -> dict[str, float]:
        some = [
            row
            for row in rows
            if row["tolerance"] == HEADLINE and f"{row['strategy'][:3]} {row['variable']}" in columns
        ]
        points = sum(row["points"] for row in some)
        return {kind: sum(row[kind] * row["points"] for row in some) / points for kind in ("latency", "throughput")}

    paper = [
        {"task": task, "tolerance": tolerance} | dict(zip(PAPER_COLUMNS, cells, strict=True))
        for (task, tolerance), cells in PAPER.items()
    ]
    in_paper = shares(PAPER_COLUMNS)
    details = {"assumed_by_the_search": shares(ASSUMED), "rows": rows, "paper": paper}
    value = {"value": max(in_paper.values()), "unit": "share", "better": "lower"}
    return {"exegpt.nonmonotone_share": value | in_paper | details}


def _monotonicity_of(served, task: str) -> list[dict[str, Any]]:
    """Return a row per strategy, degree, variable and tolerance; latency is the worst case, which the search limits."""
    of = ex.estimator(served, task)
    bound_s, plan = ex.faster_transformer(of).bounds_s()[2], ex.planner(of)
    scale_rps = ex.chosen(plan, bound_s).row.throughput_rps
    rows = []
    for space in (space for space in plan.spaces if space.size):
        boxes = [_box(of, space)]
        if space.strategy is not Strategy.RRA:  # as the search has it: batches of one split, one run after another
            batches = Variable(ONE_SPLIT, _thinned(space.variables[0].values))
            boxes.append(((batches, space.variables[1]), space.perf_uncached))
        for variables, perf in boxes:
            found = schedule.non_monotone(
                perf, variables, TOLERANCES, latency_scale_s=bound_s, throughput_scale_rps=scale_rps
            )
            rows += [{"task": task, "strategy": space.strategy.value, "tp": space.tp} | vars(one) for one in found]
    return rows


def _box(of, space):
    """Return the control variables as the paper sweeps them, and their performance; WAA's are not divided into runs."""
    rra = space.strategy is Strategy.RRA
    largest = [one.values[-1] for one in space.variables[:-1]]
    ends = space.columns(np.array([(*largest, other) for other in space.variables[-1].values]))
    max_batch = space.variables[0].values[-1] if rra else int(ends.prefill_batch.max())
    second = space.variables[1].values if rra else tuple(np.unique(ends.micro_batches).tolist())
    variables = (
        Variable("B_E", _thinned(tuple(range(1, max_batch + 1)))),
        Variable("N_D" if rra else "B_m", _thinned(second), rising=False),
        Variable("TP", tuple(np.unique(ends.tp_groups).tolist()), rising=False),
    )

    def perf(points: np.ndarray) -> Perf:
        ones = np.ones(len(points), dtype=np.int64)
        batch, other, groups = points.T
        steps, micro_batches = (other, 0 * ones) if rra else (ones, other)
        code = CODES.index(space.strategy) * ones
        got = of.estimate(schedule.ControlColumns(code, batch, steps, micro_batches, space.tp * ones, groups))
        return Perf(got.constrained_latency_s(worst_case=True), got.throughput_rps)

    return variables, perf


def _thinned(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return all values, or MAX_VALUES of them at most, close together where they are small."""
    if len(values) <= MAX_VALUES:
        return values
    places = np.unique(np.rint(np.geomspace(1, len(values), MAX_VALUES)).astype(int) - 1)
    return tuple(values[place] for place in places)
