"""Figures of profiles: prediction of this machine's operators from measured points, time to import tables."""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _circle import machine_of, this_thread

from lengthwise import catalog
from lengthwise.cost.estimators import fit_profile
from lengthwise.cost.profiles import import_aiconfigurator, write_profile
from lengthwise.measure.operators import measure_operators
from lengthwise.schema.deployment import EngineLimits, Parallelism

MODEL, MAX_TOKENS = "qwen2.5-0.5b", 2048
LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=1024, weight_dtype="float32", kv_dtype="float32")
BUDGET_S, QUICK_BUDGET_S = 300.0, 60.0
TABLES = "data/profiles/aiconfigurator"


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the seconds to import one system's tables as a profile, and the error of this machine's operators.

    The error is the median over operators of the median error on points that the fit has not seen.
    """
    rows: dict[str, Any] = {}
    if (shared / TABLES).exists():
        with tempfile.TemporaryDirectory() as folder:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            profile = import_aiconfigurator(shared / TABLES, "h200_sxm", "vllm", "0.24.0")
            write_profile(profile, Path(folder) / "h200.parquet")
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        assert len(profile) > 200_000
        rows["profile.import_h200_s"] = {"value": wall_s, "cpu_s": cpu_s, "rows": len(profile)}
    model, gpu, budget_s = catalog.model(MODEL), this_thread(), QUICK_BUDGET_S if quick else BUDGET_S
    sizes = {"max_tokens": LIMITS.max_num_batched_tokens, "max_seqs": LIMITS.max_num_seqs, "max_context": MAX_TOKENS}
    found = measure_operators(model, device="cpu", dtype="float32", threads=1, budget_s=budget_s, **sizes)
    node = catalog.default_node(gpu, 1)
    _, report = fit_profile(found.profile, model, gpu, node, Parallelism(), LIMITS, MAX_TOKENS)
    details = {
        "model": MODEL,
        "budget_s": budget_s,
        "points": len(found.profile),
        "machine": machine_of(gpu, "float32"),
        "operators": {
            fit.name: {"rows": fit.rows, "median error": fit.median_error, "p95 error": fit.p95_error}
            for fit in report.operators
        },
    }
    value = float(np.median([fit.median_error for fit in report.operators]))
    return rows | {"profile.cv_median_error": {"value": value, "details": details}}
