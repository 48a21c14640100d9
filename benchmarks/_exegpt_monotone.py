"""Table 5: the share of points that break monotony, one control variable at a time, GPT-3 39B on 16 A40s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from _exegpt_scenarios import GPT39, OPT, chosen, estimator, faster_transformer, planner

from lengthwise.schedule import ControlColumns, Perf, Strategy, Variable, non_monotone
from lengthwise.schedule.controls import CODES

TOLERANCES = (0.02, 0.05, 0.10)
HEADLINE = 0.05
VALUES = 40
"""Values of a variable that are tried: all, or so many from its first to its last."""
IN_RUN = "B_E, one split"
ASSUMED = ("rra B_E", "rra N_D", f"waa {IN_RUN}")
"""What the search takes for monotone; of groups and micro-batches it assumes nothing."""
PAPER_COLUMNS = ("rra B_E", "rra N_D", "waa B_E", "waa TP", "waa B_m")
PAPER = {  # (task, tolerance): by strategy and variable, percent by latency and by throughput
    ("s", 0.02): ((0.6, 2.3), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.8, 0.0)),
    ("s", 0.05): ((0.6, 0.3), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.5, 0.0)),
    ("s", 0.10): ((0.3, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.4, 0.0)),
    ("t", 0.02): ((0.2, 0.1), (0.0, 0.0), (0.1, 0.0), (1.2, 0.0), (10.9, 0.0)),
    ("t", 0.05): ((0.2, 0.0), (0.0, 0.0), (0.0, 0.0), (0.8, 0.0), (10.6, 0.0)),
    ("t", 0.10): ((0.2, 0.0), (0.0, 0.0), (0.0, 0.0), (0.4, 0.0), (10.4, 0.0)),
}


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """The share over Table 5's variables and tasks at 5 %, the larger of latency's and throughput's, and the table."""
    served = OPT if fast else GPT39
    rows = [one for task in ("s", "t") for one in of_task(served, task)]
    headline = [one for one in rows if one["tolerance"] == HEADLINE]
    in_paper = shares([one for one in headline if column(one) in PAPER_COLUMNS])
    paper = [
        {"task": task, "tolerance": tolerance} | dict(zip(PAPER_COLUMNS, cells, strict=True))
        for (task, tolerance), cells in PAPER.items()
    ]
    told = {"value": max(in_paper.values()), "unit": "share", "better": "lower"} | in_paper
    told["assumed_by_the_search"] = shares([one for one in headline if column(one) in ASSUMED])
    return {"exegpt.nonmonotone_share": told | {"rows": rows, "paper": paper}}


def column(row: dict[str, Any]) -> str:
    """Under which of Table 5's headings a row belongs."""
    return f"{row['strategy'][:3]} {row['variable']}"


def shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of all points of some rows, which break monotony."""
    points = sum(one["points"] for one in rows)
    return {kind: sum(one[kind] * one["points"] for one in rows) / points for kind in ("latency", "throughput")}


def of_task(served, task: str) -> list[dict[str, Any]]:
    """A row a strategy, degree, variable and tolerance."""
    of = estimator(served, task)
    bound_s = faster_transformer(of).bounds_s()[2]
    plan = planner(of)
    scale_rps = chosen(plan, bound_s).row.throughput_rps
    rows = []
    for side in (side for side in plan.sides if side.size):
        for variables, perf in (box(of, side), *within_runs(side)):
            found = non_monotone(perf, variables, TOLERANCES, latency_scale_s=bound_s, throughput_scale_rps=scale_rps)
            name = {"task": task, "strategy": side.strategy.value, "tp": side.tp}
            rows.extend(name | vars(one) for one in found)
    return rows


def within_runs(side):
    """WAA's batches as the search has them: those that are split alike, one run after another."""
    if side.strategy is Strategy.RRA:
        return
    batches = Variable(IN_RUN, thinned(side.variables[0].values))
    yield (batches, side.variables[1]), side.perf_anew


def box(of, side):
    """The control variables as the paper sweeps them, and what they yield: WAA's without runs.

    The latency is the one that the search holds, that of the worst case.
    """
    rra = side.strategy is Strategy.RRA
    ends = last_of_runs(side)
    batches = side.variables[0].values[-1] if rra else int(ends.encode_batch.max())
    groups = tuple(np.unique(ends.tp_groups).tolist())
    second = side.variables[1].values if rra else tuple(np.unique(ends.micro_batches).tolist())
    variables = (
        Variable("B_E", thinned(range(1, batches + 1))),
        Variable("N_D" if rra else "B_m", thinned(second), rising=False),
        Variable("TP", groups, rising=False),
    )

    def perf(points: np.ndarray) -> Perf:
        ones = np.ones(len(points), dtype=np.int64)
        batch, other, group = points.T
        got = of.estimate(
            ControlColumns(
                CODES.index(side.strategy) * ones,
                batch,
                other if rra else ones,
                0 * ones if rra else other,
                side.tp * ones,
                group,
            )
        )
        return Perf(side.constrained_latency_s(got), got.throughput_rps)

    return variables, perf


def last_of_runs(side) -> ControlColumns:
    """The schedules at the ends of a side: of RRA for every number of groups, of WAA for every run."""
    last = [one.values[-1:] for one in side.variables[:-1]]
    ends = [(*(one[0] for one in last), other) for other in side.variables[-1].values]
    return side.columns(np.array(ends))


def thinned(values) -> tuple[int, ...]:
    """All values, or so many of them, close together where they are small."""
    known = tuple(values)
    if len(known) <= VALUES:
        return known
    places = np.unique(np.rint(np.geomspace(1, len(known), VALUES)).astype(int) - 1)
    return tuple(known[place] for place in places)
