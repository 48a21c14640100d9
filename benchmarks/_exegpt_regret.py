"""Choices against every schedule there is, at many bounds."""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from _exegpt_scenarios import GPT39, GPT101, OPT, T5, chosen, estimator, faster_transformer, planner

from lengthwise.schedule import Strategy
from lengthwise.schedule.optimizer import evaluate_grid

ALL = tuple(Strategy)
WAA = (Strategy.WAA_C, Strategy.WAA_M)
QUESTIONS = (  # model, task, strategies
    (OPT, "s", ALL),
    (OPT, "t", ALL),
    (OPT, "g", ALL),
    (OPT, "c1", ALL),
    (T5, "s", ALL),
    (GPT39, "t", WAA),
    (GPT101, "t", WAA),
    (GPT101, "c1", WAA),
)
LARGE = (GPT39, "s", ALL)
"""All strategies and degrees on 16 GPUs, which takes minutes: a row of its own."""
BETWEEN = 12
"""Bounds from the least latency to that of the highest throughput, beside FasterTransformer's and none."""


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """The largest regret over questions and bounds, and that of one large question with what looking at all took."""
    questions = QUESTIONS[:1] if fast else QUESTIONS
    rows = {"exegpt.regret_max": told([one for question in questions for one in regrets(*question)])}
    return rows if fast else rows | {"exegpt.regret_16_gpus": told(regrets(*LARGE))}


def told(requested: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest regret, whose it is, and each question's."""
    worst = max(requested, key=lambda one: one["regret"])
    return {
        "value": worst["regret"],
        "unit": "share",
        "better": "lower",
        "of": worst["of"],
        "bounds": len(requested),
        "equal": sum(one["regret"] <= 1e-9 for one in requested),
        "mean": fmean(one["regret"] for one in requested),
        "questions": questions_of(requested),
    }


def regrets(served, task: str, strategies: tuple[Strategy, ...]) -> list[dict[str, Any]]:
    """By bound, the share of the best of all schedules that a choice falls short of."""
    of, start = estimator(served, task), time.process_time()
    sides = [side for side in planner(of, strategies).sides if side.size]
    boxes = [evaluate_grid(side.perf_anew, side.variables) for side in sides]
    latency_s = np.concatenate([box.latency_s.ravel() for box in boxes])
    rps = np.concatenate([box.throughput_rps.ravel() for box in boxes])
    minutes = (time.process_time() - start) / 60
    runs = np.isfinite(latency_s)
    latency_s, rps = latency_s[runs], rps[runs]
    ends = latency_s.min(), latency_s[np.argmax(rps)]
    about = {
        "of": f"{served.name}, {task}",
        "strategies": [strategy.value for strategy in strategies],
        "points": sum(side.size for side in sides),
        "exhaustive_minutes": minutes,
    }
    bounds_s = [*np.geomspace(1.001 * ends[0], ends[1], BETWEEN), *faster_transformer(of).bounds_s()]
    found = []
    for bound_s in bounds_s:
        good = latency_s <= bound_s
        if good.any():
            choice = chosen(planner(of, strategies), bound_s)
            best = float(rps[good].max())
            mine = choice.row.throughput_rps if choice else 0.0
            assert mine <= best * (1 + 1e-9), "no schedule is better than the best of all"
            found.append(about | {"regret": max(1 - mine / best, 0.0), "strategy": choice and choice.row.strategy})
            found[-1]["bound_s"] = bound_s if math.isfinite(bound_s) else None
    return found


def questions_of(requested: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By question: strategies, bounds, points, largest regret, how often each strategy was chosen."""
    names = dict.fromkeys(one["of"] for one in requested)
    return {name: _question([one for one in requested if one["of"] == name]) for name in names}


def _question(own: list[dict[str, Any]]) -> dict[str, Any]:
    kept = {key: own[0][key] for key in ("strategies", "points", "exhaustive_minutes")}
    won = [one["strategy"] for one in own]
    return kept | {
        "bounds": len(own),
        "regret_max": max(one["regret"] for one in own),
        "chosen": {name: won.count(name) for name in own[0]["strategies"]},
    }
