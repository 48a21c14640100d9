"""Table 7: how far stage times spread when OPT-13B serves task S, with and without dynamic adjustment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from _exegpt_choices import controls
from _exegpt_play import LATER, encode_stages_s, run
from _exegpt_scenarios import OPT, chosen, estimator, faster_transformer, planner

from lengthwise.schedule import Assumptions, Controls, Strategy
from lengthwise.schedule.simulation import concurrency_limit, deployment_of
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records

PAPER = {"rra": (1.68, 0.071, 0.038, 0.024), "waa": (0.85, 0.118, 0.041, 0.055)}
"""Seconds of an encoding and its range, of a decode iteration and its range."""
THRESHOLDS = (None, 0.1, 0.05)
LEVEL = 0.99
SCHEDULES = {  # that decode on one stage, so that a step is a stage's time
    "paper_11.5s": controls(Strategy.RRA, 52, 13, 4, 1),
    "paper_none": controls(Strategy.RRA, 49, 7, 4, 1),
    "paper_3.1s": controls(Strategy.WAA_C, 4, 1, 2, 2),
    "paper_5.9s": controls(Strategy.WAA_C, 10, 1, 2, 2),
}
TITLES = {
    "paper_11.5s": "the paper's at 11.5 s",
    "paper_none": "the paper's, no bound",
    "paper_3.1s": "the paper's at 3.1 s",
    "paper_5.9s": "the paper's at 5.9 s",
    "ours_none": "ours at TP 4, no bound",
    "ours_10": "ours under the 10 % bound",
}
REQUESTS = 40_000
RESAMPLES, BLOCKS = 400, 40


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """A row a schedule and threshold."""
    of = estimator(OPT, "s")
    schedules = SCHEDULES | ({} if fast else {"ours_none": ours(of), "ours_10": ours_apart(of)})
    count = REQUESTS // 8 if fast else REQUESTS
    return {
        f"exegpt.variance.{name}.{label(threshold)}": spread(of, name, schedule, threshold, count)
        for name, schedule in schedules.items()
        for threshold in THRESHOLDS
    }


def ours(of) -> Controls:
    """RRA's choice without a bound at TP 4."""
    plan = planner(of, [Strategy.RRA])
    choice = chosen(plan, float("inf"), disaggregated=True)
    row = next(side.best for side in choice.sides if side.tp == OPT.gpus)
    return controls(Strategy.RRA, row.encode_batch, row.decode_steps, row.tp, row.tp_groups)


def ours_apart(of) -> Controls:
    """WAA's choice under the bottom 10 % of FasterTransformer's latencies; its decoding GPUs are one stage."""
    plan = planner(of, [Strategy.WAA_C, Strategy.WAA_M])
    return chosen(plan, faster_transformer(of).bounds_s()[0]).controls


def label(threshold: float | None) -> str:
    return "as_it_comes" if threshold is None else f"within_{100 * threshold:.0f}_percent"


def spread(of, name: str, schedule: Controls, threshold: float | None, count: int) -> dict[str, Any]:
    """Mean and 99 % range of encodings and of decode iterations, with what the run served and how long it took."""
    expected = estimator(OPT, "s", assumptions=Assumptions(threshold=threshold)).estimate([schedule])
    deployment = deployment_of(of, schedule, threshold=threshold)
    _, records = run(of, deployment, count, 3, concurrency_limit(of, schedule), keep_steps=10**7)
    requests, started_s = records.requests, np.sort(records.requests.scheduled_s)
    from_s, to_s = started_s[count // LATER], started_s[-count // (2 * LATER)]
    served = (requests.scheduled_s >= from_s) & (requests.scheduled_s < to_s)
    latency_s = (requests.finished_s - requests.scheduled_s)[served]
    phases = schedule.strategy is Strategy.RRA
    encode_s, decode_s, relative = (of_phases if phases else of_sides)(records, deployment, from_s, to_s)
    decode = ranged(decode_s)
    if relative is not None:
        decode["range_at_its_place"] = _range(relative)
    encode = ranged(encode_s)
    return {
        "value": encode["range"],
        "unit": "relative",
        "better": "lower",
        "ci": encode["ci"],
        "strategy": schedule.strategy.value,
        "schedule": f"{TITLES[name]}: {words(schedule)}",
        "threshold": threshold,
        "encode": encode,
        "decode": decode,
        "expected_encode_range": float(expected.encode_range[0]),
        "expected_decode_range": float(expected.decode_range[0]),
        "rps": float(served.sum() / (to_s - from_s)),
        "latency_p99_s": float(np.quantile(latency_s, LEVEL)),
        "paper": dict(
            zip(
                ("encode_s", "encode_range", "decode_s", "decode_range"), PAPER["rra" if phases else "waa"], strict=True
            )
        ),
    }


def words(schedule: Controls) -> str:
    """A schedule as the table has it."""
    name = schedule.strategy.value.upper()
    steps = f", N_D = {schedule.decode_steps}" if schedule.strategy is Strategy.RRA else ""
    return f"{name}, B_E = {schedule.encode_batch}{steps}, {schedule.tp_groups} x TP {schedule.tp}"


def of_phases(records: Records, _: Deployment, from_s: float, to_s: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of encodings and of decode iterations on one stage, and these over the mean at their place in a phase."""
    steps = records.steps
    inside = (steps.start_s >= from_s) & (steps.start_s < to_s)
    duration_s, encodes = (steps.end_s - steps.start_s)[inside], steps.prefill_seqs[inside] > 0
    assert 0 < encodes.sum() < len(encodes)
    return duration_s[encodes], duration_s[~encodes], over_its_place(duration_s, encodes)


def of_sides(
    records: Records, deployment: Deployment, from_s: float, to_s: float
) -> tuple[np.ndarray, np.ndarray, None]:
    """Seconds of encodings in their slowest stage, and of decode iterations on one stage."""
    assert deployment.decode is not None
    assert deployment.decode.parallel.pp == 1
    formed_s, steps = np.unique(records.requests.scheduled_s), records.steps
    _, slowest_s = encode_stages_s(records.requests, deployment.cost)
    there = steps.replica == deployment.parallel.replicas
    inside = there & (steps.start_s >= from_s) & (steps.start_s < to_s)
    return slowest_s[(formed_s >= from_s) & (formed_s < to_s)], (steps.end_s - steps.start_s)[inside], None


def over_its_place(duration_s: np.ndarray, encodes: np.ndarray) -> np.ndarray:
    """[decodes] each one's time over the mean of those equally long after an encoding: a batch shrinks in a phase."""
    started = np.maximum.accumulate(np.where(encodes, np.arange(len(encodes)), -1))
    place = (np.arange(len(encodes)) - started)[(started >= 0) & ~encodes]
    seconds = duration_s[(started >= 0) & ~encodes]
    mean_s = np.bincount(place, weights=seconds) / np.maximum(np.bincount(place), 1)
    return seconds / mean_s[place]


def ranged(seconds: np.ndarray) -> dict[str, Any]:
    """Mean, half of the width that holds 99 % as a share of it, and that share's interval over blocks drawn again."""
    rng, blocks = np.random.default_rng(0), np.array_split(seconds, BLOCKS)
    again = [_range(np.concatenate([blocks[i] for i in rng.integers(BLOCKS, size=BLOCKS)])) for _ in range(RESAMPLES)]
    ci = tuple(float(end) for end in np.quantile(again, [0.025, 0.975]))
    return {"mean_s": float(seconds.mean()), "range": _range(seconds), "ci": ci, "count": len(seconds)}


def _range(seconds: np.ndarray) -> float:
    low, high = np.quantile(seconds, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float((high - low) / 2 / seconds.mean())
