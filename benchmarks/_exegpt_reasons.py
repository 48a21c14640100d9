"""Why gains differ from the paper's: bounds tighter than ours, and WAA read literally."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from _exegpt_figures import gains
from _exegpt_scenarios import (
    BOUNDS,
    LARGE,
    OPT,
    SMALL_MID,
    best_of_each,
    chosen,
    estimator,
    faster_transformer,
    planner,
)

from lengthwise.schedule import Assumptions

BATCHES = (4, 8, 16, 32)
WAA = ("waa-c", "waa-m")


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Gains of large models under the latency of FasterTransformer's small batches; who is ahead in lockstep."""
    large = LARGE[:1] if fast else LARGE
    rows = {f"exegpt.tight.batch_{batch}": tight(large, batch) for batch in BATCHES}
    some = [(OPT, "s")] if fast else list(dict.fromkeys((*SMALL_MID, *LARGE)))
    return rows | {"exegpt.lockstep.waa_ahead": lockstep(some)}


def tight(scenarios, batch: int) -> dict[str, Any]:
    """The mean gain where the bound is what a batch takes, and every gain."""
    found = {f"{served.name}, {task}": gain_at(served, task, batch) for served, task in scenarios}
    met = [gain for gain in found.values() if gain]
    return {
        "value": fmean(met) if met else math.nan,
        "unit": "times",
        "most": max(met, default=math.nan),
        "nothing_met": len(found) - len(met),
        "gains": found,
    }


def gain_at(served, task: str, batch: int) -> float:
    """The gain under the latency of a batch; 0 where nothing meets it."""
    of = estimator(served, task)
    ft = faster_transformer(of)
    at = int(np.flatnonzero(ft.static.batch == batch)[0])
    bound_s = float(ft.static.latency_s[at])
    choice, theirs = chosen(planner(of), bound_s), ft.best(bound_s)
    return choice.row.throughput_rps / theirs[0] if choice else 0.0


def lockstep(scenarios) -> dict[str, Any]:
    """The share of cells that WAA wins if decoding waits for every encoding, by task; and the gains then."""
    cells = [one for served, task in scenarios for one in of_cells(served, task)]
    won = [one for one in cells if one["waa_rps"] > one["rra_rps"]]
    tasks = dict.fromkeys(one["task"] for one in cells)
    by_task = {task: [one for one in cells if one["task"] == task] for task in tasks}
    return {
        "value": len(won) / len(cells),
        "unit": "share",
        "mean_gain": fmean(gains(cells)),
        "by_task": {
            task: {
                "cells": len(some),
                "waa_ahead": sum(one["waa_rps"] > one["rra_rps"] for one in some),
                "waa_meets": sum(one["waa_rps"] > 0 for one in some),
            }
            for task, some in by_task.items()
        },
    }


def of_cells(served, task: str) -> list[dict[str, Any]]:
    """RRA's and WAA's best under each bound, in lockstep."""
    of = estimator(served, task, assumptions=Assumptions(lockstep=True))
    ft, plan, cells = faster_transformer(of), planner(of), []
    for name, bound_s in zip(BOUNDS, ft.bounds_s(), strict=True):
        best = best_of_each(chosen(plan, bound_s, disaggregated=True))
        waa_rps = max((best[one].throughput_rps for one in WAA if best[one]), default=0.0)
        rra_rps = best["rra"].throughput_rps if best["rra"] else 0.0
        gain = max(waa_rps, rra_rps) / ft.best(bound_s)[0]
        cells.append({"task": task, "bound": name, "rra_rps": rra_rps, "waa_rps": waa_rps, "gain": gain})
    return cells
