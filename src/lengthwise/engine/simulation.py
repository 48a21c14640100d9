"""Simulates a workload on a deployment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, LengthwiseError, UnknownNameError
from lengthwise.schema.records import Records, Rejection, Status
from lengthwise.schema.workload import Workload

LOG_ROWS = 200_000
ENGINES = ("kernel", "reference")


def simulate(
    workload: Workload,
    deployment: Deployment,
    *,
    seed: int = 0,
    time_limit_s: float = math.inf,
    strict: bool = False,
    max_log_steps: int = LOG_ROWS,
    engine: str = "kernel",
) -> Records:
    """Simulate a workload on a deployment and return its records.

    Args:
        workload: Requests. Only the engine sees their true output lengths. Policies do not.
        deployment: Replicas that serve them.
        seed: Seed of the routers' random numbers. Equal inputs give bit-identical records.
        time_limit_s: Simulated seconds after which the run stops. Requests that are not finished by then are
            UNFINISHED. A step in flight at the limit counts completely in the sums over steps, and the run lasts until
            the step ends, but no request gets a token from it.
        strict: Raise InputError after the run if even an idle replica could not serve a request.
        max_log_steps: The kernel returns its logs (``Records.steps``, exact gaps between tokens) only if the run has at
            most ``max_log_steps`` steps and at most ``2 * max_log_steps`` rows of gaps. A step adds a row for each
            distinct gap in it.
        engine: "kernel" (compiled) or "reference" (plain Python: the same results, slow).

    Raises:
        InputError: The workload and the deployment do not fit together.
        PolicyError: A policy raised or returned an invalid value, needs data that the workload lacks, or lets a request
            wait forever.
    """
    from lengthwise.engine.outcome import to_records
    from lengthwise.engine.setup import policy_error, prepare

    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES)
    if not time_limit_s > 0:
        raise InputError(f"time_limit_s must be above 0; it is {time_limit_s}")
    if seed < 0 or max_log_steps < 0:
        raise InputError(f"seed and max_log_steps must not be negative; they are {seed} and {max_log_steps}")
    setup = prepare(workload, deployment, seed=seed, limit_s=time_limit_s, compiled=engine == "kernel")
    if engine == "kernel":
        from lengthwise.engine.kernel_runner import run_kernel

        outcome = run_kernel(setup, max_log_steps)
    else:
        from lengthwise.engine.reference import Reference

        try:
            outcome = Reference(setup).run()
        except LengthwiseError:
            raise
        except Exception as error:
            raise policy_error(setup, error) from error
    speculates = deployment.speculation is not None
    records = to_records(workload, outcome, seed, deployment.name, speculates=speculates)
    r = records.requests
    rejected = np.flatnonzero((r.status == Status.REJECTED) & (r.rejection != Rejection.PARENT_NOT_FINISHED))
    if strict and len(rejected):
        first = int(rejected[0])
        raise InputError(
            f"{len(rejected)} of {len(workload)} requests can never fit; the first is request {first} with "
            f"{r.prompt_tokens[first]} prompt tokens; raise max_model_len, max_num_batched_tokens or the KV memory, or "
            "set strict = false"
        )
    return records


def ready() -> bool:
    """Return whether the kernel is compiled. A user's policies and an engine's own rules may still need compilation."""
    from lengthwise.engine.kernel_runner import ready as compiled_ready

    return compiled_ready()


_listeners: list[Callable[[], None]] = []


@contextmanager
def on_compile(listener: Callable[[], None]) -> Iterator[None]:
    """Call ``listener`` before ``warm_up`` compiles the kernel, while this context is open.

    The compilation takes about half a minute, which a listener can announce.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def warm_up() -> None:
    """Compile the kernel unless it is ready. Call this before several threads or processes simulate."""
    if ready():
        return
    from lengthwise.engine.deployment_builder import deploy

    for listener in _listeners:
        listener()
    one = np.ones(1, np.int64)
    simulate(Workload(np.zeros(1), one, one), deploy("opt-125m", "A100-80GB"))
