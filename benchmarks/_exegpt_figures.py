"""Figures 6 and 8: every model and task under four bounds, RRA and WAA beside FasterTransformer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from _exegpt_scenarios import (
    BOUNDS,
    LARGE,
    OPT,
    SMALL_MID,
    best_of_each,
    chosen,
    estimator,
    everything,
    faster_transformer,
    planner,
    seen,
)

Cells = Sequence[Mapping[str, Any]]


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """A row a model and task, and the mean gains over the paper's sets of them."""
    wanted = [(OPT, "s"), (OPT, "t")] if fast else list(everything())
    found = {(served, task): scenario(served, task) for served, task in wanted}
    rows = {
        f"exegpt.figure.{served.name}.{task}": {
            "value": fmean(gains(cells)) if gains(cells) else math.nan,
            "unit": "times",
            "cells": cells,
        }
        for (served, task), cells in found.items()
    }
    if fast:
        return rows
    sets = {"small_mid": SMALL_MID, "large": LARGE, "all": tuple(dict.fromkeys((*SMALL_MID, *LARGE)))}
    return rows | {f"exegpt.gain_{name}": gain([found[one] for one in some]) for name, some in sets.items()}


def scenario(served, task: str) -> list[dict[str, Any]]:
    """What each system has to offer under each bound."""
    of = estimator(served, task)
    ft, plan = faster_transformer(of), planner(of)
    return [cell(name, bound_s, ft, plan) for name, bound_s in zip(BOUNDS, ft.bounds_s(), strict=False)]


def cell(name: str, bound_s: float, ft, plan) -> dict[str, Any]:
    """One bound: FasterTransformer's best, each strategy's best, and the gain of the best of them."""
    choice, theirs = chosen(plan, bound_s, disaggregated=True), ft.best(bound_s)
    assert theirs is not None  # bounds are quantiles of its latencies
    longest = ft.static.best(bound_s)
    best = choice.row.throughput_rps if choice else 0.0
    return {
        "bound": name,
        "bound_s": None if math.isinf(bound_s) else bound_s,
        "ft": {"rps": theirs[0], "batch": theirs[1].encode_batch, "constrained_latency_s": theirs[1].latency_s},
        "ft_task_longest_rps": longest.throughput_rps,
        "ft_padded_rps": ft.padded_rps(bound_s),
        "strategies": {name: seen(row) for name, row in best_of_each(choice).items()},
        "won": choice.row.strategy if choice else None,
        "gain": best / theirs[0],
        "why_not": sorted({f"{side.strategy}: {side.why_not}" for side in plan.sides if side.why_not}),
    }


def gains(cells: Cells) -> list[float]:
    """Of the cells in which something meets the bound, as the paper's figures have bars."""
    return [one["gain"] for one in cells if one["gain"] > 0]


def gain(scenarios: Sequence[Cells]) -> dict[str, Any]:
    """The mean gain with what stands behind it."""
    cells = [one for some in scenarios for one in some]
    all_gains, loose = gains(cells), gains([one for one in cells if one["bound_s"] is None])
    met = [one for one in cells if one["gain"]]
    to_longest, padded, rra = (fmean(found) for found in (
        [one["gain"] * one["ft"]["rps"] / one["ft_task_longest_rps"] for one in met],
        [one["gain"] * one["ft"]["rps"] / one["ft_padded_rps"] for one in met if one["ft_padded_rps"]],
        [one["strategies"]["rra"]["rps"] / one["ft"]["rps"] for one in met if one["strategies"]["rra"]],
    ))  # fmt: skip
    return {
        "value": fmean(all_gains),
        "geometric_mean": geometric_mean(all_gains),
        "least": min(all_gains),
        "most": max(all_gains),
        "without_bound": fmean(loose),
        "if_batches_ran_to_the_longest_output": to_longest,
        "if_prompts_were_padded": padded,
        "rra_alone": rra,
        "by_bound": {name: fmean(gains([one for one in cells if one["bound"] == name])) for name in BOUNDS},
        "cells": len(cells),
        "nothing_met": sum(one["gain"] == 0 for one in cells),
        "won_by": {name: sum(one["won"] == name for one in cells) for name in ("rra", "waa-c", "waa-m")},
    }
