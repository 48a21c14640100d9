"""A workload on a deployment becomes records."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, LengthwiseError, UnknownNameError
from lengthwise.schema.records import Records, Status
from lengthwise.schema.workload import Workload

if TYPE_CHECKING:
    from lengthwise.engine.outcome import Outcome
    from lengthwise.engine.setup import Setup

LOG_ROWS = 200_000
ENGINES = ("kernel", "reference")


def simulate(
    workload: Workload,
    deployment: Deployment,
    *,
    seed: int = 0,
    time_limit_s: float = math.inf,
    strict: bool = False,
    keep_steps: int = LOG_ROWS,
    engine: str = "kernel",
) -> Records:
    """What happens when a workload meets a deployment.

    Args:
        workload: The requests; their true output lengths are for the engine alone.
        deployment: What serves them.
        seed: Of the routers that draw; equal inputs give equal bytes.
        time_limit_s: Simulated seconds after which the run stops; what is not finished then is
            UNFINISHED. A step under way at the limit counts whole in the sums over steps, and the
            run lasts until its end, but its tokens are not handed out.
        strict: Raise when a request can never fit instead of rejecting it.
        keep_steps: Keep the step log and every token gap of runs up to so many steps.
        engine: "kernel" (compiled) or "reference" (plain Python, the same answer, slow).

    Raises:
        InputError: The workload and the deployment cannot be simulated together.
        PolicyError: A policy misbehaved.
    """
    from lengthwise.engine.outcome import to_records
    from lengthwise.engine.setup import prepare

    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES)
    if not time_limit_s > 0:
        raise InputError(f"time_limit_s must be above 0; it is {time_limit_s}")
    if seed < 0 or keep_steps < 0:
        raise InputError(f"seed and keep_steps must not be negative; they are {seed} and {keep_steps}")
    setup = prepare(workload, deployment, seed=seed, limit_s=time_limit_s, compiled=engine == "kernel")
    if engine == "kernel":
        from lengthwise.engine.kernel_runner import run_kernel

        outcome = run_kernel(setup, keep_steps)
    else:
        outcome = _run_reference(setup)
    records = to_records(workload, outcome, seed, deployment.name)
    if strict:
        _require_no_rejects(records)
    return records


def _run_reference(setup: Setup) -> Outcome:
    from lengthwise.engine.reference import simulate_reference
    from lengthwise.engine.setup import policy_raised

    try:
        return simulate_reference(setup)
    except LengthwiseError:
        raise
    except Exception as error:
        raise policy_raised(setup, error) from error


def _require_no_rejects(records: Records) -> None:
    rejected = np.flatnonzero(records.requests.status == Status.REJECTED)
    if len(rejected):
        i = int(rejected[0])
        raise InputError(
            f"{len(rejected)} of {len(records.requests.status)} requests can never fit, the first is request {i} with "
            f"{records.requests.prompt_tokens[i]} prompt tokens; raise max_model_len or the KV memory, or allow rejects"
        )


def ready() -> bool:
    """Whether a run starts at once; else the first one compiles the kernel and caches it."""
    from lengthwise.engine.kernel_runner import ready as compiled_ready

    return compiled_ready()


def warm_up() -> None:
    """Compiles the kernel into the cache, if it is not there yet."""
    from lengthwise.engine.deployment_builder import deploy

    one = np.ones(1, np.int64)
    simulate(Workload(np.zeros(1), one, one), deploy("opt-125m", "A100-80GB"))
