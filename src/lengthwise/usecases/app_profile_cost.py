"""Calibrate an engine's cost tables: send requests with the sample's lengths, and fit the tables to their records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from lengthwise import measure
from lengthwise.apps.launch import Launcher
from lengthwise.apps.launch.engine import HttpEngine
from lengthwise.backend.openai_protocol import Server
from lengthwise.measure.calibration import Calibration, client_was_disturbed
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, InternalError
from lengthwise.schema.records import Measured, shape_facts
from lengthwise.schema.workload import Workload

Ints = npt.NDArray[np.int64]
_MIN_REQUESTS = (24, 32, 48)
"""By concurrency, lowest first: a calibration fits to at least 50 requests and holds out at least 10."""
_REQUESTS_PER_SEQUENCE = (1, 3, 3)
_REPEATS = 4
"""A load is sent this often at most, until other work on the client's machine does not disturb it."""


def calibrate_replica(
    launcher: Launcher,
    plan: ModelPlan,
    gpus: Replica,
    deployment: Deployment,
    lengths: tuple[Ints, Ints],
    *,
    seed: int = 0,
) -> tuple[Calibration, int]:
    """Return cost tables fitted to one replica under load, and the number of requests of the fit; raise EngineError.

    Closed loops: one request at a time, the maximum, and their geometric mean. One load is held out of the fit.
    ``lengths`` are (prompt, output) tokens of each request of the sample.
    """
    with _running(launcher, plan, gpus) as (server, max_num_seqs):
        max_concurrency = min(max_num_seqs, deployment.limits.max_num_seqs)
        loads = list(_loads(max_concurrency, lengths, deployment.max_model_len, seed))
        runs = [_bench(server, load, deployment, seed) for load in loads]
    return measure.calibrate(runs, deployment, seed=seed), sum(map(len, loads))


@contextmanager
def _running(launcher: Launcher, plan: ModelPlan, gpus: Replica) -> Iterator[tuple[Server, int]]:
    """Start an engine and yield its address and concurrency limit; its event loop pauses while the load is sent."""
    with asyncio.Runner() as runner:
        engine = runner.run(launcher.start(plan, gpus))
        try:
            if not isinstance(engine, HttpEngine):
                raise InternalError(f"only engines at an address can be measured; {engine.description} has none")
            yield engine.server, engine.max_num_seqs
        finally:
            runner.run(launcher.stop(engine))


def concurrencies(max_num_seqs: int) -> tuple[int, ...]:
    """Return the concurrencies to measure at: one, the geometric mean, and the maximum."""
    return tuple(sorted({1, max(1, round(max_num_seqs**0.5)), max_num_seqs}))


def _loads(max_num_seqs: int, lengths: tuple[Ints, Ints], max_model_len: int, seed: int) -> Iterator[Workload]:
    """Yield one load for each concurrency, of requests drawn from the sample; every load has other requests."""
    rng = np.random.default_rng(seed)
    levels = concurrencies(max_num_seqs)
    min_requests = _MIN_REQUESTS if len(levels) == 3 else (sum(_MIN_REQUESTS),) * len(levels)
    for level, fewest, factor in zip(levels, min_requests, _REQUESTS_PER_SEQUENCE, strict=False):
        count = max(fewest, factor * level)
        rows = rng.integers(0, len(lengths[0]), count)
        output = np.clip(lengths[1][rows], 2, max(2, max_model_len // 2))
        prompt = np.clip(lengths[0][rows], 1, max_model_len - output)
        yield Workload(np.zeros(count), prompt, output, concurrency=level, name=f"{level} at a time")


def _bench(server: Server, load: Workload, deployment: Deployment, seed: int) -> Measured:
    parallel, limits = deployment.parallel, deployment.limits
    model, gpu = deployment.model, deployment.gpu
    metadata = {"model": model.name, "model_shape": shape_facts(model), "gpu": gpu.name, "gpus": parallel.gpus}
    metadata |= {name: getattr(parallel, name) for name in ("tp", "pp", "replicas")}
    metadata |= {name: getattr(limits, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    settings = measure.LoadSettings(seed=seed, warmup_requests=2)
    for _ in range(_REPEATS):
        measured = measure.bench(server, load, settings, deployment=metadata)
        if any(f"ended by {measure.INTERRUPTED}" in warning for warning in measured.warnings):
            raise KeyboardInterrupt
        if not client_was_disturbed(measured):
            break
    return measured


def require_improvement(found: Calibration) -> None:
    """Raise InputError if the calibrated tables are only worse than the given ones, or disagree with the runs."""
    if not found.helps:
        raise InputError(f"the calibrated tables are only worse than the given ones: {'; '.join(found.warnings)}")
    if not found.changed and found.disagreement:
        hidden = "the noise of the runs hides which part of a step is off"
        raise InputError(f"runs and tables disagree ({found.disagreement}), and {hidden}")


def jct_errors(found: Calibration) -> tuple[float, float]:
    """Return the mean absolute relative error of single held-out requests' JCT, before and after."""
    change = next(change for change in found.changes if change.metric == "jct")
    return change.before, change.after
