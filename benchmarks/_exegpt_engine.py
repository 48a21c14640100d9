"""What is estimated of schedules against the event engine: at random and as they are chosen, by strategy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _exegpt_play import played
from _exegpt_scenarios import GPT39, GPT101, OPT, T5, chosen, estimator, everything, faster_transformer, planner

from lengthwise.schedule import Controls, Estimates, Strategy

AT_RANDOM = (
    *((OPT, task) for task in ("s", "t", "g", "c1", "c2")),
    *((T5, "s"), (GPT39, "s"), (GPT39, "t"), (GPT101, "c1")),
)
EACH = 12
"""Of each strategy and each of these."""
REQUESTS = 60_000
FULL = 4
"""A micro-batch of so many in the mean is hardly ever empty."""
PHASES = ("fewer new than micro-batches", "a micro-batch may run empty", "all others")
APART = ("WAA, encoding binds", "WAA, decoding binds")
KINDS = (*PHASES, *APART)
WAA = (Strategy.WAA_C, Strategy.WAA_M)
RESAMPLES = 2000


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """P95 of the relative errors of throughput and of latency, of random schedules and of those that are chosen."""
    some, count = (AT_RANDOM[:1], 2) if fast else (AT_RANDOM, EACH)
    drawn = []
    for seed, strategies in ((7, (Strategy.RRA,)), (8, WAA)):
        rng = np.random.default_rng(seed)
        drawn += [one for pair in played_apart(some, strategies) for one in at_random(*pair, strategies, rng, count)]
    rows = {"exegpt.estimator_error_p95": error(drawn)}
    taken = [] if fast else [one for pair in everything() for one in of_choices(*pair)]
    return rows | ({"exegpt.estimator_error_p95_of_choices": error(taken)} if taken else {})


def played_apart(some, strategies) -> Iterator[tuple[Any, str]]:
    """Those that the engine can play: it lets decoding GPUs project no prompts, as WAA of an encoder-decoder does."""
    return (pair for pair in some if strategies != WAA or pair[0] != T5)


def at_random(served, task: str, strategies, rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Errors of schedules of any degree, groups and batch, phase or micro-batches, that memory holds."""
    of, found = estimator(served, task), []
    sides = [side for side in planner(of, strategies).sides if side.size]
    while sides and len(found) < count:
        side = sides[rng.integers(len(sides))]
        values = [np.array(one.values) for one in side.variables]
        point = [_log_draw(rng, one) if at < len(values) - 1 else int(rng.choice(one)) for at, one in enumerate(values)]
        if np.isfinite(side.perf_anew(np.array([point], dtype=np.int64)).latency_s[0]):
            found.append(compared(of, side.controls(tuple(point)), len(found)) | {"of": f"{served.name}, {task}"})
    return found


def of_choices(served, task: str) -> list[dict[str, Any]]:
    """Errors of choices: RRA's under the paper's tightest bound and its loosest, either WAA's under all four."""
    of, found = estimator(served, task), []
    bounds_s = faster_transformer(of).bounds_s()
    for strategy in (Strategy.RRA, *(WAA if served != T5 else ())):
        plan = planner(of, [strategy])
        choices = [chosen(plan, bound_s) for bound_s in (bounds_s[::3] if strategy is Strategy.RRA else bounds_s)]
        each = dict.fromkeys(choice.controls for choice in choices if choice)
        found += [compared(of, controls, 1) | {"of": f"{served.name}, {task}"} for controls in each]
    return found


def _log_draw(rng: np.random.Generator, values: np.ndarray) -> int:
    """One of the values, small ones as likely as large ones."""
    return int(values[int(len(values) ** rng.random()) - 1])


def compared(of, controls: Controls, seed: int, requests: int = REQUESTS) -> dict[str, Any]:
    """The relative errors of one schedule."""
    expected = of.estimate([controls])
    rate_rps, latency_s = played(of, controls, requests, seed)
    return {
        "strategy": controls.strategy.value,
        "controls": words(controls, expected),
        "rps_error": float(expected.throughput_rps[0]) / rate_rps - 1,
        "latency_error": float(expected.latency_s[0]) / latency_s - 1,
        "kind": kind(of, controls, expected),
    }


def words(controls: Controls, expected: Estimates) -> str:
    """A schedule in short."""
    groups = f"{controls.tp_groups} x TP {controls.tp}"
    if controls.strategy is Strategy.RRA:
        return f"B_E {controls.encode_batch}, N_D {controls.decode_steps}, {groups}"
    parts, gpus = int(expected.micro_batches[0]), int(expected.encode_gpus[0])
    return f"{controls.strategy.value}, B_E {controls.encode_batch}, B_m {parts}, {gpus} GPUs encode, {groups}"


def kind(of, controls: Controls, expected: Estimates) -> str:
    """Which of KINDS a schedule is.

    RRA: by its new requests, and by who is left at the end of a phase. WAA: by the side that the other waits for.
    """
    if controls.strategy is not Strategy.RRA:
        return APART[int(expected.decode_s[0] >= expected.cycle_s[0])]
    micro_batches = int(expected.micro_batches[0])
    if controls.encode_batch < micro_batches:
        return PHASES[0]
    last = of.setting.phase(controls.decode_steps).seqs[-1]
    return PHASES[1] if last * controls.encode_batch / micro_batches < FULL else PHASES[2]


def error(found: list[dict[str, Any]]) -> dict[str, Any]:
    """P95 over both errors of every schedule, with the interval from drawing the schedules again."""
    both = _both(found)
    rng = np.random.default_rng(0)
    again = [np.quantile(both[rng.integers(len(both), size=len(both))], 0.95) for _ in range(RESAMPLES)]
    return {
        "value": float(np.quantile(both, 0.95)),
        "unit": "relative",
        "better": "lower",
        "target": 0.05,
        "ci": tuple(float(end) for end in np.quantile(again, [0.025, 0.975])),
        **spread(found),
        "by_strategy": _by(found, "strategy", tuple(Strategy)),
        "by_kind": _by(found, "kind", KINDS),
        "worst": sorted(found, key=lambda one: -_both([one]).max())[:5],
    }


def spread(found: list[dict[str, Any]]) -> dict[str, Any]:
    """How many, and quantiles of their errors."""
    both = _both(found)
    return {
        "schedules": len(found),
        "p95": float(np.quantile(both, 0.95)),
        "median": float(np.median(both)),
        "throughput_p95": float(np.quantile(both[:, 0], 0.95)),
        "latency_p95": float(np.quantile(both[:, 1], 0.95)),
        "beyond_5_percent": int((both.max(axis=1) > 0.05).sum()),
    }


def _both(found: list[dict[str, Any]]) -> np.ndarray:
    return np.abs([[one["rps_error"], one["latency_error"]] for one in found])


def _by(found: list[dict[str, Any]], key: str, names: tuple[str, ...]) -> dict[str, Any]:
    """``spread`` of those of each name, of which there are some."""
    parts = {str(name): [one for one in found if one[key] == name] for name in names}
    return {name: spread(part) for name, part in parts.items() if part}
