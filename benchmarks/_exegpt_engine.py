"""Schedules in the event engine: errors of the estimates, bounds that are met, and stage times (Table 7)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _exegpt_scenarios as ex
import numpy as np

from lengthwise.engine import simulate
from lengthwise.engine.step_time import CostReader
from lengthwise.schedule import Assumptions, Controls, Estimator, Strategy
from lengthwise.schedule.simulation import concurrency_limit, deployment_of
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records, RequestRecords
from lengthwise.schema.workload import Workload


def _run(
    of: Estimator, controls: Controls, count: int, seed: int, *, threshold: float | None = None, keep_steps: int = 0
) -> tuple[Deployment, np.ndarray, Records]:
    """Simulate a schedule with drawn lengths and a queue that never empties; return its [count] outputs, too."""
    rng, task = np.random.default_rng(seed), of.setting.task
    deployment = deployment_of(of, controls, threshold=threshold)
    prompt, output = (rng.choice(len(pmf), count, p=pmf) for pmf in (task.prompt_pmf, task.output_pmf))
    workload = Workload(np.zeros(count), prompt, output, concurrency=concurrency_limit(of, controls))
    return deployment, output, simulate(workload, deployment, keep_steps=keep_steps)


def _window(started_s: np.ndarray) -> tuple[float, float]:
    """Return the span without the first quarter of requests and the last eighth, next to which the queue runs empty."""
    return started_s[len(started_s) // 4], started_s[-len(started_s) // 8]


def _prefill_starts_s(requests: RequestRecords, deployment: Deployment) -> np.ndarray:
    """Return when each request's batch entered the first stage; WAA may form it while earlier ones are in front."""
    if deployment.decode is None:
        return requests.scheduled_s
    formed_s, batch = np.unique(requests.scheduled_s, return_inverse=True)
    first_s, _ = _prefill_stages_s(requests, deployment.cost)
    begin_s, free_s = np.empty(len(formed_s)), 0.0
    for i, formed in enumerate(formed_s.tolist()):
        begin_s[i] = max(formed, free_s)
        free_s = begin_s[i] + first_s[i]
    return begin_s[batch]


def _prefill_stages_s(requests: RequestRecords, cost: CostTables) -> tuple[np.ndarray, np.ndarray]:
    """Return [batches] seconds in the first stage and in the slowest one, in the order in which they were formed."""
    batch = np.unique(requests.scheduled_s, return_inverse=True)[1]
    order = np.argsort(batch, kind="stable")
    batches = np.split(requests.prompt_tokens[order], np.cumsum(np.bincount(batch))[:-1])
    reader = CostReader(cost)
    stages = [reader.step(0, 0, [(tokens, 0) for tokens in one.tolist()]).stages_s for one in batches]
    return np.array([one[0] for one in stages]), np.array([max(one) for one in stages])


def _interval(values: np.ndarray) -> tuple[float, float]:
    return tuple(float(end) for end in np.quantile(values, [0.025, 0.975]))


# Errors of the estimates of random schedules
AT_RANDOM = tuple((ex.OPT, task) for task in ex.TASKS)
AT_RANDOM += ((ex.T5, "s"), (ex.GPT39, "s"), (ex.GPT39, "t"), (ex.GPT101, "c1"))
PER_STRATEGY = 12
REQUESTS = 60_000


def errors(_: Path, quick: bool) -> dict[str, Any]:
    """Return P95 of the relative errors of throughput and of latency, of random schedules."""
    drawn = []
    for seed, strategies in ((7, (Strategy.RRA,)), (8, ex.WAA)):
        rng = np.random.default_rng(seed)
        for served, task in AT_RANDOM[:1] if quick else AT_RANDOM:
            if strategies != ex.WAA or served != ex.T5:  # the engine does not simulate WAA of an encoder-decoder
                drawn += _random_schedules(served, task, strategies, rng, 2 if quick else PER_STRATEGY)
    return {"exegpt.estimator_error_p95": _error_row(drawn)}


def _random_schedules(served, task: str, strategies, rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Draw schedules that fit in memory: batch and phase or split on a logarithmic scale, any degree and groups."""
    of, found = ex.estimator(served, task), []
    spaces = [space for space in ex.planner(of, strategies).spaces if space.size]
    while spaces and len(found) < count:
        space = spaces[rng.integers(len(spaces))]
        *logarithmic, last = (np.array(one.values) for one in space.variables)
        point = [int(values[int(len(values) ** rng.random()) - 1]) for values in logarithmic] + [int(rng.choice(last))]
        if np.isfinite(space.perf_uncached(np.array([point], dtype=np.int64)).latency_s[0]):
            found.append(_compared(of, space.controls(tuple(point)), len(found), f"{served.name}, {task}"))
    return found


def _compared(of: Estimator, controls: Controls, seed: int, name: str) -> dict[str, Any]:
    """Return the relative errors of one schedule; its latency is that of outputs near the quantile."""
    expected, setting = of.estimate([controls]), of.setting
    deployment, output, records = _run(of, controls, REQUESTS, seed)
    started_s = _prefill_starts_s(records.requests, deployment)
    from_s, to_s = _window(started_s)
    inside = (started_s >= from_s) & (started_s < to_s)
    quantile, rra = setting.task.output_quantile(setting.assumptions.level), controls.strategy is Strategy.RRA
    long = inside & (np.abs(output - quantile) <= max(0.01 * quantile, 0 if rra else 2))
    if rra:  # only outputs that need as many phases
        phases = -(-(output - setting.assumptions.encode_output_tokens) // controls.decode_steps)
        long &= phases == -(-setting.iterations // controls.decode_steps)
    assert long.sum() > 5
    latency_s = float((records.requests.finished_s - started_s)[long].mean())
    return {
        "of": name,
        "controls": _words(controls),
        "rps_error": float(expected.throughput_rps[0] / (inside.sum() / (to_s - from_s))) - 1,
        "latency_error": float(expected.latency_s[0]) / latency_s - 1,
        "micro_batches": int(expected.micro_batches[0]),
    }


def _words(controls: Controls) -> str:
    steps = f", N_D = {controls.decode_steps}" if controls.strategy is Strategy.RRA else ""
    name = controls.strategy.value.upper()
    return f"{name}, B_E = {controls.prefill_batch}{steps}, {controls.tp_groups} x TP {controls.tp}"


def _error_row(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return P95 over both errors of every schedule; the interval is from resampled schedules."""
    both = np.abs([[one["rps_error"], one["latency_error"]] for one in found])
    rng = np.random.default_rng(0)
    again = [np.quantile(both[rng.integers(len(both), size=len(both))], 0.95) for _ in range(2000)]
    throughput_p95, latency_p95 = np.quantile(both, 0.95, axis=0).tolist()
    value = {"value": float(np.quantile(both, 0.95)), "unit": "relative", "better": "lower", "target": 0.05}
    details = {"schedules": len(both), "throughput_p95": throughput_p95, "latency_p95": latency_p95}
    worst = [found[i] for i in np.argsort(-both.max(axis=1))[:20]]
    return value | {"ci": _interval(again), "worst": worst} | details


# Bounds: whether choices meet them, with and without dynamic adjustment
BOUND_REQUESTS, LATE, UNLIKELY = 40_000, 0.01, 0.001
"""A bound limits the latency at which the work's range is 99 %, so that 1 % may be late."""


def bounds(_: Path, quick: bool) -> dict[str, Any]:
    """Return the share of outputs near the quantile that took longer than the bound, over all choices."""
    from scipy.stats import binom

    found = [one for pair in ([(ex.OPT, "s")] if quick else ex.EVERYTHING) for one in _bounds_of(*pair)]
    late, count = (np.array([one[name] for one in found]) for name in ("late", "requests"))
    drawn = np.random.default_rng(0).integers(len(found), size=(2000, len(found)))
    odd = [one for one in found if binom.sf(one["late"] - 1, one["requests"], LATE) < UNLIKELY]
    unit, ci = "share of outputs of the quantile", _interval(late[drawn].sum(axis=1) / count[drawn].sum(axis=1))
    value = {"value": float(late.sum() / count.sum()), "unit": unit, "better": "lower", "target": LATE, "ci": ci}
    details = {"choices": len(found), "outputs": int(count.sum()), "broke_more_than_chance_explains": odd}
    return {"exegpt.bound_broken_share": value | details}


def _bounds_of(served, task: str) -> Iterator[dict[str, Any]]:
    """Simulate each strategy's choice under each finite bound; count late outputs within 0.5 % below the quantile."""
    bounds_s = ex.faster_transformer(ex.estimator(served, task)).bounds_s()[:-1]
    for threshold in (None, 0.05):
        of = ex.estimator(served, task, assumptions=Assumptions(threshold=threshold))
        for strategies in ((Strategy.RRA,), *((ex.WAA,) if served != ex.T5 else ())):
            plan = ex.planner(of, strategies)
            for bound, bound_s in zip(ex.BOUNDS, bounds_s, strict=False):
                choice = ex.chosen(plan, bound_s)
                if choice is None:
                    continue
                deployment, output, records = _run(of, choice.controls, BOUND_REQUESTS, 3, threshold=threshold)
                started_s, quantile = _prefill_starts_s(records.requests, deployment), of.setting.bound_tokens
                from_s, to_s = _window(started_s)
                long = (started_s >= from_s) & (started_s < to_s) & (output <= quantile) & (output >= 0.995 * quantile)
                duration_s = (records.requests.finished_s - started_s)[long]
                about = {"of": f"{served.name}, {task}, bound {bound}, {choice.row.words}", "threshold": threshold}
                yield about | {"requests": int(long.sum()), "late": int((duration_s > bound_s).sum())}


# Table 7: stage times of OPT-13B and task S, with and without dynamic adjustment
STAGE_REQUESTS, LEVEL = 40_000, 0.99
SCHEDULES = {  # of the paper, and such that decode on one stage, so that a step is a stage's time
    "paper_11.5s": ("the paper's at 11.5 s", Controls(Strategy.RRA, 52, 13, tp=4, tp_groups=1)),
    "paper_none": ("the paper's, no bound", Controls(Strategy.RRA, 49, 7, tp=4, tp_groups=1)),
    "paper_3.1s": ("the paper's at 3.1 s", Controls(Strategy.WAA_C, 4, 1, tp=2, tp_groups=2)),
    "paper_5.9s": ("the paper's at 5.9 s", Controls(Strategy.WAA_C, 10, 1, tp=2, tp_groups=2)),
}


def variance(_: Path, quick: bool) -> dict[str, Any]:
    """Return a row per schedule and threshold of the dynamic adjustment: its value is the range of an encoding."""
    of, schedules = ex.estimator(ex.OPT, "s"), dict(SCHEDULES)
    if not quick:
        sides = ex.chosen(ex.planner(of, [Strategy.RRA]), float("inf"), separately=True).sides
        row = next(side.best for side in sides if side.tp == ex.OPT.gpus)
        rra = Controls(Strategy.RRA, row.prefill_batch, row.decode_steps, tp=row.tp, tp_groups=row.tp_groups)
        waa = ex.chosen(ex.planner(of, ex.WAA), ex.faster_transformer(of).bounds_s()[0]).controls
        schedules |= {"ours_none": ("ours at TP 4, no bound", rra), "ours_10": ("ours under the 10 % bound", waa)}
    rows = {}
    for name, (title, controls) in schedules.items():
        for threshold in (None, 0.1, 0.05):
            label = "as_it_comes" if threshold is None else f"within_{100 * threshold:.0f}_percent"
            row = _stage_times(of, controls, threshold, STAGE_REQUESTS // 8 if quick else STAGE_REQUESTS)
            rows[f"exegpt.variance.{name}.{label}"] = row | {"schedule": f"{title}: {_words(controls)}"}
    return rows


def _stage_times(of: Estimator, controls: Controls, threshold: float | None, count: int) -> dict[str, Any]:
    """Return mean and 99 % range of encodings and of decode iterations, throughput and P99 latency."""
    deployment, _, records = _run(of, controls, count, 3, threshold=threshold, keep_steps=10**7)
    requests, steps = records.requests, records.steps
    from_s, to_s = _window(np.sort(requests.scheduled_s))
    served = (requests.scheduled_s >= from_s) & (requests.scheduled_s < to_s)
    inside = (steps.start_s >= from_s) & (steps.start_s < to_s)
    if controls.strategy is Strategy.RRA:
        duration_s, encodes = (steps.end_s - steps.start_s)[inside], steps.prefill_seqs[inside] > 0
        assert 0 < encodes.sum() < len(encodes)
        encode, decode = _spread(duration_s[encodes]), _spread(duration_s[~encodes])
        decode["range_at_its_place"] = _range(_over_mean_at_place(duration_s, encodes))
    else:
        assert deployment.decode is not None
        assert deployment.decode.parallel.pp == 1
        formed_s, (_, slowest_s) = np.unique(requests.scheduled_s), _prefill_stages_s(requests, deployment.cost)
        encode = _spread(slowest_s[(formed_s >= from_s) & (formed_s < to_s)])
        decode = _spread((steps.end_s - steps.start_s)[inside & (steps.replica == deployment.parallel.replicas)])
    value = {"value": encode["range"], "unit": "relative", "better": "lower", "ci": encode["ci"]}
    rps = float(served.sum() / (to_s - from_s))
    latency_s = float(np.quantile((requests.finished_s - requests.scheduled_s)[served], 0.99))
    return value | {
        "threshold": threshold, "encode": encode, "decode": decode, "rps": rps, "latency_p99_s": latency_s
    }  # fmt: skip


def _over_mean_at_place(duration_s: np.ndarray, encodes: np.ndarray) -> np.ndarray:
    """Return [decodes] times over the mean of those equally long after an encoding: a batch shrinks in a phase."""
    started = np.maximum.accumulate(np.where(encodes, np.arange(len(encodes)), -1))
    decodes = (started >= 0) & ~encodes
    place, seconds = (np.arange(len(encodes)) - started)[decodes], duration_s[decodes]
    mean_s = np.bincount(place, weights=seconds) / np.maximum(np.bincount(place), 1)
    return seconds / mean_s[place]


def _spread(seconds: np.ndarray) -> dict[str, Any]:
    """Return mean, range, and the range's interval from resampled blocks of consecutive values."""
    rng, blocks = np.random.default_rng(0), np.array_split(seconds, 40)
    again = [_range(np.concatenate([blocks[i] for i in rng.integers(40, size=40)])) for _ in range(400)]
    return {"mean_s": float(seconds.mean()), "range": _range(seconds), "ci": _interval(again)}


def _range(seconds: np.ndarray) -> float:
    """Return half of the width that contains 99 %, relative to the mean."""
    low, high = np.quantile(seconds, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float((high - low) / 2 / seconds.mean())
