"""Whether what is chosen under a bound keeps it in the event engine, with and without dynamic adjustment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _exegpt_play import LATER, encodings_begin_s, run
from _exegpt_scenarios import BOUNDS, OPT, T5, chosen, estimator, everything, faster_transformer, planner
from scipy.stats import binom

from lengthwise.schedule import Assumptions, Strategy
from lengthwise.schedule.simulation import concurrency_limit, deployment_of

THRESHOLDS = (None, 0.05)
REQUESTS, RESAMPLES = 40_000, 2000
LEVEL, UNLIKELY = 0.01, 0.001
"""So many may be late: the range of work at which a bound is held has 99 %. What chance seldom explains is told."""
NEAR = 0.005
"""Outputs of the quantile's length, or so much shorter, are what the bound is for."""


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """The share of outputs of the quantile that took longer than the bound, over all choices."""
    some = [(OPT, "s")] if fast else list(everything())
    found = [one for served, task in some for one in of_task(served, task)]
    return {"exegpt.bound_broken_share": row(found)}


def row(found: list[dict[str, Any]]) -> dict[str, Any]:
    """With the interval from drawing the choices again, and those that broke more than chance explains."""
    late, count = (np.array([one[name] for one in found]) for name in ("late", "requests"))
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(found), size=(RESAMPLES, len(found)))
    again = late[drawn].sum(axis=1) / count[drawn].sum(axis=1)
    odd = [one for one in found if binom.sf(one["late"] - 1, one["requests"], LEVEL) < UNLIKELY]
    return {
        "value": float(late.sum() / count.sum()),
        "unit": "share of outputs of the quantile",
        "better": "lower",
        "target": LEVEL,
        "ci": tuple(float(end) for end in np.quantile(again, [0.025, 0.975])),
        "choices": len(found),
        "requests_each": REQUESTS,
        "outputs": int(count.sum()),
        "broke_more_than_chance_explains": sorted(odd, key=lambda one: -one["late"] / one["requests"]),
    }


def of_task(served, task: str) -> Iterator[dict[str, Any]]:
    """Each strategy's choice under each finite bound, played."""
    bounds_s = faster_transformer(estimator(served, task)).bounds_s()[:-1]
    for threshold in THRESHOLDS:
        of = estimator(served, task, assumptions=Assumptions(threshold=threshold))
        for strategies in ([Strategy.RRA], *([[Strategy.WAA_C, Strategy.WAA_M]] if served != T5 else [])):
            plan = planner(of, strategies)
            for name, bound_s in zip(BOUNDS, bounds_s, strict=False):
                choice = chosen(plan, bound_s)
                if choice is not None:
                    about = {"of": f"{served.name}, {task}, bound {name}", "threshold": threshold}
                    yield about | played(of, choice, bound_s, threshold)


def played(of, choice, bound_s: float, threshold: float | None) -> dict[str, Any]:
    """How often outputs of the quantile took longer than the bound, and than the plan's worst case."""
    deployment = deployment_of(of, choice.controls, threshold=threshold)
    output, records = run(of, deployment, REQUESTS, 3, concurrency_limit(of, choice.controls))
    started_s, quantile = encodings_begin_s(records.requests, deployment), of.setting.bound_tokens
    inside = (started_s >= started_s[REQUESTS // LATER]) & (started_s < started_s[-REQUESTS // (2 * LATER)])
    long = inside & (output <= quantile) & (output >= quantile * (1 - NEAR))
    duration_s = (records.requests.finished_s - started_s)[long]
    return {
        "schedule": choice.row.words,
        "bound_s": bound_s,
        "worst_case_s": choice.row.latency_high_s,
        "expected_s": choice.row.latency_s,
        "mean_s": float(duration_s.mean()),
        "requests": int(long.sum()),
        "late": int((duration_s > bound_s).sum()),
        "above_worst_case": int((duration_s > choice.row.latency_high_s).sum()),
    }
