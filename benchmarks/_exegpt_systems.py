"""Figure 7 and today's engines: every other system in its best configuration under the same bounds.

A section per model, since each takes minutes; ``gain_over`` combines what was saved of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from _exegpt_scenarios import (
    BOUNDS,
    GPT39,
    GPT101,
    GPT175_A100,
    OPT,
    T5,
    chosen,
    estimator,
    faster_transformer,
    finite,
    planner,
    summary_of,
)

from lengthwise.catalog import weight_bytes
from lengthwise.schedule import Estimator
from lengthwise.schedule.baselines import SYSTEMS, curve

RESULTS = Path(__file__).parent / "results" / "exegpt.json"
SCENARIOS = {
    OPT: ("s", "t", "g", "c1", "c2"),
    T5: ("s", "t", "c1"),
    GPT39: ("s", "t", "c1"),
    GPT101: ("s", "t", "c1"),
    GPT175_A100: ("g", "c1", "c2"),
}
MEASURED: dict[str, list[dict[str, Any]]] = {}
"""Cells of this run, for ``gain_over``."""
Cell = Mapping[str, Any]


def sections(quick: bool) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """Return a section per model, and one of the gains over each system."""

    def model(served) -> dict[str, Any]:
        rows = {f"exegpt.systems.{served.name}.{task}": _scenario(served, task, quick) for task in some[served]}
        MEASURED.update((name, row["cells"]) for name, row in rows.items())
        return rows

    some = {OPT: ("s",)} if quick else SCENARIOS
    by_model = {f"systems.{served.name}": (lambda served=served: model(served)) for served in some}
    return by_model | {"gain_over": lambda: _gains_over(quick)}


def _scenario(served, task: str, quick: bool) -> dict[str, Any]:
    """Return each system's best under each bound; the value is the mean gain over vLLM v1."""
    of = estimator(served, task)
    setting, bounds_s, ft = of.setting, faster_transformer(of).bounds_s(), faster_transformer(of).static
    plans = {1: planner(of)}
    for replicas in range(2, setting.cluster.gpus + 1):
        cluster = replace(setting.cluster, gpus=setting.cluster.gpus // replicas)
        fits = weight_bytes(setting.model) <= cluster.gpus * setting.available_bytes
        if not setting.cluster.gpus % replicas and fits:
            tables = {tp: one for tp, one in setting.tables.items() if tp <= cluster.gpus}
            plans[replicas] = planner(Estimator(setting.task, cluster, setting.model, tables, setting.assumptions))
    curves = {name: curve(of, name, requests=150 if quick else 800, seed=11) for name in SYSTEMS}
    cells = []
    for bound, bound_s in zip(BOUNDS, bounds_s, strict=True):
        choices = {replicas: choice for replicas, plan in plans.items() if (choice := chosen(plan, bound_s))}
        replicas = max(choices, key=lambda n: n * choices[n].row.throughput_rps, default=None)
        best = replicas and summary_of(choices[replicas].row)
        cells.append({
            "bound": bound,
            "bound_s": finite(bound_s),
            "exegpt": summary_of(choices[1].row) if 1 in choices else None,
            "exegpt_in_replicas": best and best | {"rps": replicas * best["rps"], "replicas": replicas},
            "systems": {name: _best_of(found, bound_s) for name, found in curves.items()},
            "as_cut_for_ft": {
                name: _best_of(found, bound_s, cut=(ft.tp, ft.gpus // ft.tp)) for name, found in curves.items()
            },
        })  # fmt: skip
    over_v1 = _ratios(cells, "vllm-v1")
    return {
        "value": fmean(over_v1) if over_v1 else math.nan,
        "unit": "times",
        "cells": cells,
        "configurations": {name: found.configurations for name, found in curves.items()},
    }


def _best_of(found, bound_s: float, cut: tuple[int, int] | None = None) -> dict[str, Any] | None:
    """Return a system's best under a bound, of one division (TP, stages) of the cluster or of all."""
    good = found.fits & (found.latency_high_s <= bound_s)
    if cut:
        good &= (found.tp == cut[0]) & (found.pp == cut[1]) & (found.replicas == 1)
    if not good.any():
        return None
    index = int(np.argmax(np.where(good, found.throughput_rps, -1.0)))
    ends = [float(found.throughput_low_rps[index]), float(found.throughput_high_rps[index])]
    return summary_of(found.row(index)) | {"rps_ci": ends}


def _gains_over(quick: bool) -> dict[str, Any]:
    """Return the mean gain over each system, of all cells of this run and of saved ones of other models."""
    saved = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() and not quick else []
    rows = [row for row in map(json.loads, saved) if row["name"].startswith("exegpt.systems.")]
    every = {row["name"]: row["details"]["cells"] for row in rows} | MEASURED
    gains = {}
    for system in SYSTEMS:
        found = {name: cells for name, cells in every.items() if all(system in cell["systems"] for cell in cells)}
        scenarios = {name: some for name, cells in found.items() if (some := _ratios(cells, system))}
        if not scenarios:
            continue
        cells, ratios = list(chain(*found.values())), list(chain(*scenarios.values()))
        by_bound = {bound: _ratios((cell for cell in cells if cell["bound"] == bound), system) for bound in BOUNDS}
        gains[f"exegpt.gain_over_{system.replace('-', '_')}"] = {
            "value": fmean(ratios),
            "unit": "times",
            "ci": _interval(list(scenarios.values())),
            "scenarios": len(scenarios),
            "models": len({name.rpartition(".")[0] for name in scenarios}),
            "ahead": sum(ratio > 1 for ratio in ratios),
            "both_meet": len(ratios),
            "by_bound": {bound: _mean(some) for bound, some in by_bound.items()},
            "in_replicas": _mean(_ratios(cells, system, own="exegpt_in_replicas")),
            "as_cut_for_ft": _mean(_ratios(cells, system, other="as_cut_for_ft")),
        }
    return gains


def _interval(scenarios: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean over all ratios, by Student's t over scenarios; None of fewer than two.

    Ratios of a scenario depend on each other, so each scenario counts as one draw: its sum of deviations.
    """
    from scipy.stats import t

    n, every = len(scenarios), list(chain(*scenarios))
    if n < 2:
        return None
    mean = fmean(every)
    deviations = [sum(some) - mean * len(some) for some in scenarios]
    half = float(t.ppf(0.975, n - 1)) * math.sqrt(n / (n - 1) * sum(one**2 for one in deviations)) / len(every)
    return mean - half, mean + half


def _ratios(cells: Iterable[Cell], system: str, own: str = "exegpt", other: str = "systems") -> list[float]:
    """Return the best schedule's throughput over a system's, where both meet the bound."""
    return [cell[own]["rps"] / rival["rps"] for cell in cells if (rival := cell[other].get(system)) and cell[own]]


def _mean(some: list[float]) -> float | None:
    return fmean(some) if some else None
