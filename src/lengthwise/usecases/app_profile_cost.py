"""What an engine's steps cost: it is put under the lengths that the sample had, and tables are calibrated to that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import measure
from lengthwise.apps.launch import Launcher
from lengthwise.apps.launch.engine import HttpEngine
from lengthwise.backend.openai_protocol import Server
from lengthwise.measure.calibration import Calibration
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, InternalError
from lengthwise.schema.records import Measured, shape_facts
from lengthwise.schema.workload import Workload

Ints = npt.NDArray[np.int64]
Report = Callable[[int, int], None]
_LEAST = (24, 32, 48)
"""Requests at least at one at a time, at the middle and at the most: a calibration fits to 50 and holds 10 out."""
_TURNS = (1, 3, 3)
"""How often each seat is taken."""


def calibrated(
    launcher: Launcher,
    plan: ModelPlan,
    gpus: Replica,
    deployment: Deployment,
    lengths: tuple[Ints, Ints],
    *,
    seed: int = 0,
    report: Report = lambda *_: None,
) -> tuple[Calibration, int]:
    """Cost tables that agree with one replica, held against a load that they were not fitted to; and its requests.

    Closed loops: one request at a time, as many as there are seats, and the geometric mean of these, which is held out.

    Args:
        lengths: (prompt, output) tokens of each of the sample's requests.

    Raises:
        EngineError: The engine did not start.
    """
    with _up(launcher, plan, gpus) as (server, max_num_seqs):
        loads = list(_loads(min(max_num_seqs, deployment.limits.max_num_seqs), lengths, deployment.max_model_len, seed))
        of = sum(len(load) for load in loads)
        runs, done = [], 0
        for load in loads:
            runs.append(_bench(server, load, deployment, seed, lambda n, _, done=done: report(done + n, of)))  # type: ignore[misc]
            done += len(load)
    found = measure.calibrate(runs, deployment, seed=seed)
    return found, of


@contextmanager
def _up(launcher: Launcher, plan: ModelPlan, gpus: Replica) -> Iterator[tuple[Server, int]]:
    """An engine's address and seats while it runs; its loop stands still while the load generator has its own."""
    with asyncio.Runner() as runner:
        engine = runner.run(launcher.start(plan, gpus))
        try:
            if not isinstance(engine, HttpEngine):
                raise InternalError(f"only engines at an address can be measured; {engine.description} has none")
            yield engine.server, engine.max_num_seqs
        finally:
            runner.run(launcher.stop(engine))


def concurrencies(max_num_seqs: int) -> tuple[int, ...]:
    """How many requests at a time: one, some and all."""
    return tuple(sorted({1, max(1, round(max_num_seqs**0.5)), max_num_seqs}))


def _loads(max_num_seqs: int, lengths: tuple[Ints, Ints], longest: int, seed: int) -> Iterator[Workload]:
    """Requests drawn from the sample's; no two loads have the same."""
    rng = np.random.default_rng(seed)
    levels = concurrencies(max_num_seqs)
    least = _LEAST if len(levels) == 3 else (sum(_LEAST),) * len(levels)
    for level, few, turns in zip(levels, least, _TURNS, strict=False):
        yield _load(level, max(few, turns * level), lengths, longest, rng)


def _load(level: int, count: int, lengths: tuple[Ints, Ints], longest: int, rng: np.random.Generator) -> Workload:
    drawn = rng.integers(0, len(lengths[0]), count)
    output = np.clip(lengths[1][drawn], 2, max(2, longest // 2))
    prompt = np.clip(lengths[0][drawn], 1, longest - output)
    return Workload(np.zeros(count), prompt, output, concurrency=level, name=f"{level} at a time")


def _bench(
    server: Server, load: Workload, deployment: Deployment, seed: int, report: Callable[[int, int], None]
) -> Measured:
    measured = measure.bench(
        server, load, seed=seed, warmup_requests=2, deployment=_metadata(deployment), report=report
    )
    if any(f"ended by {measure.INTERRUPTED}" in doubt for doubt in measured.warnings):
        raise KeyboardInterrupt
    return measured


def _metadata(deployment: Deployment) -> dict[str, Any]:
    """What is behind the server, as records keep it."""
    parallel, limits = deployment.parallel, deployment.limits
    return {
        "model": deployment.model.name,
        "model_shape": shape_facts(deployment.model),
        "gpu": deployment.gpu.name,
        "gpus": parallel.gpus,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "replicas": parallel.replicas,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }


def require_help(found: Calibration) -> None:
    """Nothing, if the tables are worth having."""
    if not found.helps:
        raise InputError(f"calibrated tables must not only be worse than those given: {'; '.join(found.warnings)}")
    if not found.changed and found.disagreement:
        raise InputError(
            f"runs and tables must agree, or tell which part of a step is off; they disagree ({found.disagreement})"
        )


def off(found: Calibration) -> tuple[float, float]:
    """By how much single held-out requests' JCT is off before and after, as a share."""
    change = next(one for one in found.changes if one.metric == "jct")
    return change.before, change.after


__all__: Sequence[str] = ["calibrated", "concurrencies", "off", "require_help"]
