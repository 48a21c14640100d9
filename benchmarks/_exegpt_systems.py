"""Figure 7 and today's engines: every other system in its best configuration under the same bounds.

A section a model, since each takes minutes; ``gain_over`` puts together what was saved of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    planner,
    seen,
)
from scipy.stats import t

from lengthwise.catalog import weight_bytes
from lengthwise.schedule import Estimator
from lengthwise.schedule.baselines import SYSTEMS, curve

RESULTS = Path(__file__).parent / "results" / "exegpt.json"
ASKED = {  # model to its tasks
    OPT: ("s", "t", "g", "c1", "c2"),
    T5: ("s", "t", "c1"),
    GPT39: ("s", "t", "c1"),
    GPT101: ("s", "t", "c1"),
    GPT175_A100: ("g", "c1", "c2"),
}
REQUESTS, QUICK = 800, 150
SEED = 11
MEASURED: dict[str, list[dict[str, Any]]] = {}
"""Cells of this run."""


def sections(fast: bool) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """By model its rows, and the gains over each system."""
    some = {OPT: ("s",)} if fast else ASKED
    by_model = {f"systems.{one.name}": (lambda one=one: of_model(one, some[one], fast)) for one in some}
    return by_model | {"gain_over": lambda: gains_over(fast)}


def of_model(served, tasks: tuple[str, ...], fast: bool) -> dict[str, Any]:
    """A row a task."""
    rows = {f"exegpt.systems.{served.name}.{task}": of_task(served, task, fast) for task in tasks}
    MEASURED.update((name, row["cells"]) for name, row in rows.items())
    return rows


def of_task(served, task: str, fast: bool) -> dict[str, Any]:
    """Each system's best under each bound, and how many times vLLM v1's the best schedule has."""
    of = estimator(served, task)
    bounds_s, ft = faster_transformer(of).bounds_s(), faster_transformer(of).static
    cut = ft.tp, ft.gpus // ft.tp
    plans = {1: planner(of)} | {many: planner(part) for many, part in parts_of(of)}
    curves = {one: curve(of, one, requests=QUICK if fast else REQUESTS, seed=SEED) for one in SYSTEMS}
    cells = []
    for name, bound_s in zip(BOUNDS, bounds_s, strict=True):
        choice = chosen(plans[1], bound_s)
        cells.append({
            "bound": name,
            "bound_s": bound_s if math.isfinite(bound_s) else None,
            "exegpt": seen(choice.row) if choice else None,
            "exegpt_in_replicas": in_replicas(plans, bound_s),
            "systems": {one: best_of(found, bound_s) for one, found in curves.items()},
            "as_cut_for_ft": {one: best_of(found, bound_s, cut=cut) for one, found in curves.items()},
        })  # fmt: skip
    over_v1 = ratios(cells, "vllm-v1")
    return {
        "value": fmean(over_v1) if over_v1 else math.nan,
        "unit": "times",
        "cells": cells,
        "configurations": {one: found.configurations for one, found in curves.items()},
    }


def parts_of(of) -> Iterator[tuple[int, Any]]:
    """(how many, an estimator of one) of the equal parts that a cluster can be cut into and the model still fits."""
    setting = of.setting
    for many in range(2, setting.cluster.gpus + 1):
        cluster = replace(setting.cluster, gpus=setting.cluster.gpus // many)
        if setting.cluster.gpus % many or weight_bytes(setting.model) > cluster.gpus * setting.available_bytes:
            continue
        tables = {tp: one for tp, one in setting.tables.items() if tp <= cluster.gpus}
        yield many, Estimator(setting.task, cluster, setting.model, tables, setting.assumptions)


def in_replicas(plans: Mapping[int, Any], bound_s: float) -> dict[str, Any] | None:
    """The best of schedules that are deployed so many times over, each on its part of the GPUs."""
    found = [(many, choice) for many, plan in plans.items() if (choice := chosen(plan, bound_s))]
    if not found:
        return None
    many, choice = max(found, key=lambda one: one[0] * one[1].row.throughput_rps)
    told = seen(choice.row)
    return told | {"rps": many * told["rps"], "replicas": many}


def best_of(found, bound_s: float, cut: tuple[int, int] | None = None) -> dict[str, Any] | None:
    """A system's best under a bound, of one cut of the cluster or of all, with the interval of its throughput."""
    good = found.fits & (found.latency_high_s <= bound_s)
    if cut:
        good &= (found.tp == cut[0]) & (found.pp == cut[1]) & (found.replicas == 1)
    if not good.any():
        return None
    at = int(np.argmax(np.where(good, found.throughput_rps, -1.0)))
    ends = [float(found.throughput_low_rps[at]), float(found.throughput_high_rps[at])]
    return seen(found.row(at)) | {"rps_ci": ends}


def over(cell: Mapping[str, Any], system: str, own: str = "exegpt", other: str = "systems") -> float | None:
    """How many times a system's throughput the best schedule has; None where either meets no bound."""
    mine, other = cell[own], cell[other].get(system)
    return mine["rps"] / other["rps"] if mine and other else None


def gains_over(fast: bool) -> dict[str, Any]:
    """The mean over all cells of this run and, of models left out of it, of saved ones; interval over scenarios."""
    saved = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() and not fast else []
    rows = [row for row in map(json.loads, saved) if row["name"].startswith("exegpt.systems.")]
    found = {row["name"]: row["details"]["cells"] for row in rows} | MEASURED
    played = [name for name in SYSTEMS if any(name in cell["systems"] for cell in chain(*found.values()))]
    return {f"exegpt.gain_over_{name.replace('-', '_')}": mean_over(found, name) for name in played}


def mean_over(found: Mapping[str, list[dict[str, Any]]], system: str) -> dict[str, Any]:
    """The mean of ratios where both meet the bound, by bound, and where only one of them does."""
    found = {name: cells for name, cells in found.items() if all(system in cell["systems"] for cell in cells)}
    scenarios = {name: some for name, cells in found.items() if (some := ratios(cells, system))}
    cells, every = list(chain.from_iterable(found.values())), list(chain.from_iterable(scenarios.values()))
    by_bound = {name: ratios((cell for cell in cells if cell["bound"] == name), system) for name in BOUNDS}
    return {
        "value": fmean(every),
        "unit": "times",
        "ci": interval(list(scenarios.values())),
        "scenarios": len(scenarios),
        "models": len({name.rpartition(".")[0] for name in scenarios}),
        "least": min(every),
        "most": max(every),
        "ahead": sum(ratio > 1 for ratio in every),
        "cells": len(cells),
        "both_meet": len(every),
        "only_exegpt": sum(bool(cell["exegpt"]) and not cell["systems"].get(system) for cell in cells),
        "only_other": sum(not cell["exegpt"] and bool(cell["systems"].get(system)) for cell in cells),
        "by_bound": {name: mean(some) for name, some in by_bound.items()},
        "in_replicas": mean(ratios(cells, system, own="exegpt_in_replicas")),
        "as_cut_for_ft": mean(ratios(cells, system, other="as_cut_for_ft")),
        "by_scenario": {name: mean(ratios(some, system)) for name, some in found.items()},
    }


def interval(scenarios: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % of the mean over all ratios, by Student's t over scenarios; None of fewer than two.

    Ratios of one scenario go together, so that each counts as one draw: by what its ratios miss the mean together.
    """
    n, every = len(scenarios), list(chain.from_iterable(scenarios))
    if n < 2:
        return None
    middle = fmean(every)
    missed = [sum(some) - middle * len(some) for some in scenarios]
    half = float(t.ppf(0.975, n - 1)) * math.sqrt(n / (n - 1) * sum(one**2 for one in missed)) / len(every)
    return middle - half, middle + half


def ratios(cells: Iterable[Mapping[str, Any]], system: str, **which: str) -> list[float]:
    """How many times a system's throughput the best schedule has, where both meet the bound."""
    return [ratio for cell in cells if (ratio := over(cell, system, **which))]


def mean(some: list[float]) -> float | None:
    return fmean(some) if some else None
