"""Recorded runs of vLLM on GPUs: the plain roofline calibrated to the first half of each run, scored on the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from _intervals import of_scores
from _recorded import LATENCIES, LONGEST_TOKENS, ROOT, RUNS, Run

from lengthwise.engine import deploy
from lengthwise.measure import calibrate, read_foreign
from lengthwise.measure.calibration import Calibration
from lengthwise.schema.deployment import Deployment, EngineLimits

METRICS = dict(zip(LATENCIES, ("ttft", "tpot", "jct"), strict=True))
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
"""Those of the runs' own summaries, over which a MAPE is taken."""


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """Errors on held-out requests over all runs; quick: the first run alone."""
    found = {run.name: of_run(shared, run) for run in (RUNS[:1] if fast else RUNS)}
    told: dict[str, Any] = {
        f"fidelity.calibrated.{name}_mape": over_runs(metric, found) for name, metric in METRICS.items()
    }
    notes = {run: list(c.notes) for run, c in found.items()}
    for row in told.values():
        row["details"]["notes"] = notes
    return told


def of_run(shared: Path, run: Run) -> Calibration:
    """A run's calibration to its first half."""
    folder = shared / ROOT / "measured_runs" / run.folder
    measured, deployment = read_foreign(folder / "vllm" / "requests.jsonl.gz"), deployment_of(run)
    return calibrate([measured], deployment, holdout=0.5, allow=("warnings",))


def deployment_of(run: Run) -> Deployment:
    """What ran, by the roofline; the one run that tells its count of KV blocks has it."""
    small = run.gpu == "RTX-4090"
    limits = EngineLimits(256 if small else 128, 2048, max_model_len=LONGEST_TOKENS)
    return deploy(run.model, run.gpu, tp=run.tp, limits=limits, num_blocks=2588 if small else None)


def over_runs(metric: str, found: dict[str, Calibration]) -> dict[str, Any]:
    """The mean over runs and statistics of absolute errors, before and after, and each of them."""
    runs = {
        run: {
            s.statistic: [round(x, 4) for x in (s.before, s.after, s.low, s.high)]
            for s in c.scores
            if s.metric == metric
        }
        for run, c in found.items()
    }
    before, after = (
        float(np.mean([abs(of[s][at]) for of in runs.values() for s in STATISTICS if s in of])) for at in (0, 1)
    )
    parameters = {
        run: {p.name: [float(f"{x:.4g}") for x in (p.value, p.low, p.high)] for p in c.determined}
        for run, c in found.items()
    }
    return {
        "value": after,
        "ci": of_scores(runs),
        "details": {"before": before, "runs": runs, "parameters": parameters},
    }
