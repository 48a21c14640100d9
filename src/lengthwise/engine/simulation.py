"""Simulates a workload on a deployment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lengthwise import _jit
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, LengthwiseError, UnknownNameError
from lengthwise.schema.records import Records, Rejection, Status
from lengthwise.schema.workload import Workload

LOG_ROWS = 200_000
ENGINES = ("kernel", "reference")
MAX_WAIT_S = 40.0  # for another process that compiles, perhaps at the lowest priority of a busy machine
MAX_REFERENCE_S = 20.0  # the reference answers runs of up to so many seconds, instead of a wait for the compilation
_STEP_S, _TOKEN_S, _REQUEST_S = 7e-5, 2.5e-6, 1e-4
"""CPU seconds by step, output token and request, fitted to 500 chats on a core that compiles the kernel in 25 s."""


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
        max_log_steps: Logs (``Records.steps``, exact gaps between tokens) are returned only if the run has at most
            ``max_log_steps`` steps and at most ``2 * max_log_steps`` rows of gaps. A step adds a row for each distinct
            gap in it.
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
            outcome = Reference(setup).run().with_logs_of_at_most(max_log_steps)
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


_listeners: list[Callable[[bool], None]] = []


@contextmanager
def on_compile(listener: Callable[[bool], None]) -> Iterator[None]:
    """Call ``listener`` when ``warm_up`` finds no compiled kernel, while this context is open.

    Its argument states whether the reference answers while the kernel is compiled in the background. Otherwise the
    caller waits for about half a minute.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def reference_s(workload: Workload, deployment: Deployment) -> float:
    """Estimate the seconds that the reference takes for a run. The result is infinity with policies that users define.

    The number of steps is estimated as the sum of three: those of one sequence that decodes while requests arrive,
    those of the longest output, and those of all output tokens in full batches. It is at most the number of output
    tokens.
    """
    from lengthwise.engine.step_time import step_time

    sides: list[Any] = [*deployment.replica_groups, *([deployment.decode] if deployment.decode else [])]
    settings = [*vars(deployment.scheduler).values(), *(value for side in sides for value in vars(side).values())]
    if not all(getattr(value, "builtin", True) for value in settings):
        return math.inf
    output, prompt = workload.output_tokens, int(workload.prompt_tokens.mean())
    arrival_s = workload.arrival_s[np.isfinite(workload.arrival_s)]
    tokens, steps = float(output.sum()), 0.0
    for side in sides:
        decode_s = step_time(side.cost)(1, prompt, [])
        in_turn = np.ptp(arrival_s) / decode_s + float(output.max())
        steps += side.parallel.ranks * in_turn + tokens / max(1, side.limits.max_num_seqs)
    return _STEP_S * min(tokens, steps) + _TOKEN_S * tokens + _REQUEST_S * len(workload)


def warm_up(reference_seconds: Callable[[], float] = lambda: math.inf) -> str:
    """Return the engine for the next runs, "kernel", or "reference" while the kernel is compiled in the background.

    Call this before several threads or processes simulate. If the kernel is not ready and the reference takes at most
    MAX_REFERENCE_S for these runs (``reference_seconds()``, see ``reference_s``), a detached process compiles the
    kernel for later ones. Otherwise, with LENGTHWISE_COMPILE=wait, and in CI, compile it now. Both engines give
    the same results.
    """
    if ready():
        return "kernel"
    in_background = reference_seconds() <= MAX_REFERENCE_S and compile_in_background()
    for listener in _listeners:
        listener(in_background)
    if in_background:
        return "reference"
    with _jit.compile_lock(wait_s=MAX_WAIT_S):
        if not ready():  # another process has not compiled it in the meantime
            compile_kernel()
    return "kernel"


def compile_in_background() -> bool:
    """Let a detached process compile the kernel; return False where ``_jit.compile_detached`` does not start one."""
    program = "from lengthwise.engine import simulation; simulation.warm_up()"
    return ready() or _jit.compile_detached(program)


def compile_kernel() -> None:
    """Compile the kernel and the default policies by a run of one request."""
    from lengthwise.engine.deployment_builder import deploy

    one = np.ones(1, np.int64)
    simulate(Workload(np.zeros(1), one, one), deploy("opt-125m", "A100-80GB"))
