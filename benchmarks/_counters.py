"""Planted runs whose server counted its steps as vLLM does: what a calibration gains of that, and of a log of steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.engine import deploy
from lengthwise.measure.calibration import Calibration, calibrate
from lengthwise.schema.deployment import Deployment

sys.path.append(str(Path(__file__).parents[1] / "tests" / "measure"))

RUNS, QUICK_RUNS = 12, 2
PERIODS_S = (0.25, 0.5, 1.0)
"""Between two looks at the counters, in turns."""
ANSWER_S = 0.005
KINDS = ("requests", "counters", "log")
"""What is fitted to: requests alone, and counters or a log of every step beside them."""


@dataclass(frozen=True)
class Report:
    """What a calibration says of a planted value, in logs of it."""

    off: float
    low: float
    high: float

    @property
    def is_satisfied(self) -> bool:
        """Whether its interval holds the truth."""
        return self.low <= 0 <= self.high


Runs = Sequence[Mapping[str, Mapping[str, Report]]]
"""Of each run, by kind, then by parameter."""


def figures(_shared: Path, fast: bool) -> dict[str, Any]:
    """By parameter the mean error in log of what was planted, with counters; the other kinds beside it."""
    from planted_runs import LIMITS, TRUTH

    deployment = deploy("llama-3-8b", "H100", limits=LIMITS)
    runs = [of_run(deployment, seed) for seed in range(QUICK_RUNS if fast else RUNS)]
    return {f"fidelity.counters.{name}_error": row(name, runs, TRUTH[name]) for name in TRUTH}


def of_run(deployment: Deployment, seed: int) -> dict[str, dict[str, Report]]:
    """One run of 120 requests with 2 % of noise, calibrated three times; a log does not see half of the host."""
    from planted_counters import logged, scraped
    from planted_runs import MIN_COUNT, NOISE, TRUTH, requests

    workload, period_s = requests(seed=seed), PERIODS_S[seed % len(PERIODS_S)]
    run = scraped(workload, deployment, TRUTH, period_s, noise=NOISE, seed=seed, answer_s=ANSWER_S)
    log = logged(workload, deployment, TRUTH, TRUTH["host_step"] / 2)
    fitted = partial(calibrate, [run], deployment, fit=MIN_COUNT, seed=seed)
    found = {"requests": fitted(scrape="no"), "counters": fitted(), "log": fitted(iterations=log)}
    return {kind: told(one, TRUTH) for kind, one in found.items()}


def told(found: Calibration, truth: Mapping[str, float]) -> dict[str, Report]:
    """Of each planted parameter what was found, against it."""
    return {
        name: Report(*(math.log(ends / planted) for ends in (found[name].value, found[name].low, found[name].high)))
        for name, planted in truth.items()
    }


def row(name: str, runs: Runs, planted: float) -> dict[str, Any]:
    """A parameter's mean error over runs by kind, with intervals, and how they differ run by run."""
    off = {kind: np.array([abs(run[kind][name].off) for run in runs]) for kind in KINDS}
    kinds = {kind: _of_kind([run[kind][name] for run in runs], off[kind]) for kind in KINDS}
    pairs = (("counters", "requests"), ("log", "requests"), ("counters", "log"))
    of = kinds["counters"]
    return {
        "value": of["error"],
        "ci": [of["low"], of["high"]],
        "details": {
            "of_runs": len(runs),
            "planted": planted,
            "kinds": kinds,
            "differences": {f"{a} less {b}": _difference(off[a] - off[b]) for a, b in pairs},
        },
    }


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """The mean, and its 95 % interval by Student's t."""
    from scipy.stats import t

    n, mean = len(values), float(np.mean(values))
    half = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half


def _of_kind(found: Sequence[Report], off: np.ndarray) -> dict[str, Any]:
    mean, low, high = mean_interval(off)
    return {
        "error": round(mean, 4),
        "low": round(max(0.0, low), 4),
        "high": round(high, 4),
        "width": round(float(np.mean([one.high - one.low for one in found])), 3),
        "satisfied": sum(one.is_satisfied for one in found),
    }


def _difference(off: np.ndarray) -> dict[str, Any]:
    mean, low, high = mean_interval(off)
    return {"mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4), "ranks": not low <= 0 <= high}
