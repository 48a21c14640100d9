"""Figures of profiles: how well this machine's operators are told from points, how fast tables are read."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _device import machine, this_thread

from lengthwise import catalog
from lengthwise.cost.estimators import fit_profile
from lengthwise.cost.profiles import import_aiconfigurator, write_profile
from lengthwise.measure.operators import measure_operators
from lengthwise.schema.deployment import EngineLimits, Parallelism

MODEL, LONGEST_TOKENS = "qwen2.5-0.5b", 2048
LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=1024, weight_dtype="float32", kv_dtype="float32")
BUDGET_S, QUICK_BUDGET_S = 300.0, 60.0
TABLES = "data/profiles/aiconfigurator"


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """Rows of benchmarks/fidelity.py by name; needs torch for this machine, recorded tables for the import."""
    told = imported(shared / TABLES) if (shared / TABLES).exists() else {}
    return told | measured(QUICK_BUDGET_S if fast else BUDGET_S)


def imported(tables: Path) -> dict[str, Any]:
    """Seconds to read all of one system's tables and to write them as one profile."""
    with tempfile.TemporaryDirectory() as folder:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        profile = import_aiconfigurator(tables, "h200_sxm", "vllm", "0.24.0")
        write_profile(profile, Path(folder) / "h200.parquet")
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert len(profile) > 200_000
    return {"profile.import_h200_s": {"value": wall_s, "cpu_s": cpu_s, "rows": len(profile)}}


def measured(budget_s: float) -> dict[str, Any]:
    """The median over operators of the median error on points that the fit has not seen.

    One thread of this machine, within a budget; by the interpolation that guides the sampling (each point from
    its neighbours) and by the estimators that become cost tables.
    """
    model, gpu = catalog.model(MODEL), this_thread()
    sizes = {"max_tokens": LIMITS.max_num_batched_tokens, "max_seqs": LIMITS.max_num_seqs}
    start = time.perf_counter()
    found = measure_operators(
        model, device="cpu", dtype="float32", threads=1, budget_s=budget_s, max_context=LONGEST_TOKENS, **sizes
    )
    wall_s = time.perf_counter() - start
    node = catalog.default_node(gpu, 1)
    _, report = fit_profile(found.profile, model, gpu, node, Parallelism(), LIMITS, LONGEST_TOKENS)
    operators = {
        fit.name: {"rows": fit.rows, "median error": fit.median_error, "p95 error": fit.p95_error}
        for fit in report.operators
    }
    details = {
        "model": MODEL,
        "budget_s": budget_s,
        "wall_s": wall_s,
        "points": len(found.profile),
        "machine": machine(gpu),
        "operators": operators,
        "picked": dict(report.picked),
    }
    value = float(np.median([fit["median error"] for fit in operators.values()]))
    return {"profile.cv_median_error": {"value": value, "details": details}}
