"""The contract of a policy: one small pure function on one axis (rank, batching, memory, router, ...).

A policy function takes any of its axis' arguments *by name* and returns a number (for batching, three). The same
function runs compiled in the engine's kernel and interpreted in the reference. No argument has the true output length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from lengthwise.schema.errors import PolicyError

Function = Callable[..., Any]
Decorator = Callable[[Function], "Policy"]

RANK_ARGUMENTS = (
    "now_s", "arrival_s", "prompt_tokens", "generated_tokens", "predicted_tokens", "remaining_tokens", "gittins_rank",
    "queued_for_s", "priority", "admission", "last_preemption", "service_tokens", "batch",
)  # fmt: skip
BATCHING_ARGUMENTS = (
    "decodes", "prefills", "num_waiting", "num_running", "in_flight", "token_budget", "max_num_seqs",
    "steps_since_admit", "ended_since_admit", "phase_steps", "phase_rounds", "step_prompts", "step_tokens",
    "next_tokens", "stages",
    "parameter_0", "parameter_1", "parameter_2", "parameter_3", "parameter_4", "parameter_5",
)  # fmt: skip
PARAMETERS = sum(name.startswith("parameter_") for name in BATCHING_ARGUMENTS)
MEMORY_ARGUMENTS = (
    "context_tokens", "chunk_tokens", "predicted_tokens", "max_model_len", "block_size", "free_blocks", "total_blocks",
    "watermark_blocks", "num_running", "peak_tokens",
)  # fmt: skip
ROUTER_ARGUMENTS = (
    "request_number", "draw_a", "draw_b", "prompt_tokens", "previous_replica", "total_blocks", "waiting", "running",
    "tokens", "free_blocks", "prefix_tokens", "index_tokens", "service_rate",
)  # fmt: skip
ROUTER_ARRAYS = ROUTER_ARGUMENTS[6:]
"""The arguments of routers that have one entry per replica."""
PREFIX_ARGUMENTS = ("prefix_tokens", "previous_replica")
"""The arguments of routers that need shared prefixes or sessions in the workload."""
PREEMPTION_ARGUMENTS = (
    "waiting_key", "running_key", "waiting_remaining_tokens", "running_remaining_tokens", "running_generated_tokens",
    "recompute_steps", "num_running", "num_waiting", "queued_for_s", "preemptions",
)  # fmt: skip
BINNING_ARGUMENTS = ("predicted_tokens", "prompt_tokens")

ARGUMENTS = {
    "rank": RANK_ARGUMENTS,
    "batching": BATCHING_ARGUMENTS,
    "memory": MEMORY_ARGUMENTS,
    "router": ROUTER_ARGUMENTS,
    "preemption": PREEMPTION_ARGUMENTS,
    "binning": BINNING_ARGUMENTS,
}
PREDICTION_ARGUMENTS = (
    "predicted_tokens", "remaining_tokens", "gittins_rank", "peak_tokens", "waiting_remaining_tokens",
    "running_remaining_tokens",
)  # fmt: skip
"""The arguments of all axes that need predicted output lengths in the workload."""

CHUNKED = 1
"""If a prompt exceeds the prompt tokens that the step has left, the step computes the first part of it."""
PADDED = 2
"""The prompts of a step count as a padded batch: number of prompts x tokens of the longest prompt."""
DECODES_WAIT = 4
"""Decodes run only in steps without prompts."""
RESERVE_BLOCK = 8
"""A decode runs only while a block is free, whether it needs one or not (vLLM v0, Vidur)."""
ADMIT_AFTER_PREEMPTION = 16
"""A step may admit requests although it preempted others for lack of blocks (Vidur's Sarathi)."""
FORM_ONCE = 32
"""A step that preemptions leave empty is formed again only at the next event. A replica's only request needs the block
of RESERVE_BLOCK, too (Vidur)."""
RESTART_AS_DECODE = 64
"""If a request is preempted within its prompt, the computed part becomes its prompt, the rest its output (Vidur)."""
ONE_BATCH = 128
"""Only requests of one completed bin are admitted together (Multi-Bin Batching)."""
PAUSE_DECODES = 256
"""Idle decodes join a step with prompts but are not computed, so that a micro-batch stays together (ExeGPT)."""
NEW_PHASE = 512
"""``phase_steps`` and ``phase_rounds`` count from this step on."""
ONE_BY_ONE = 1024
"""The policy is called again before each admission, with the current prompts of the step."""
UNIFORM_SHARES = 2048
"""A step takes at most 1 / (maximum number of steps in flight) of the residents: equal micro-batches (ExeGPT)."""

SERVICE_OUTPUT_WEIGHT = 2.0
"""Weight of an output token in a tenant's service; a prompt token counts 1 (VTC, OSDI '24)."""


@dataclass(frozen=True)
class Policy:
    """A policy function with the properties that the engine needs."""

    axis: str  # "rank" (also for victims), "batching", "memory", "router", "preemption" or "binning"
    name: str  # name in tables and scenario files
    function: Function  # the plain Python function
    arguments: tuple[str, ...]  # names of the arguments that it takes, a subset of those of its axis
    # for ranks: keys change with time, so the queue is ranked again at every step that may admit
    every_step: bool = False
    # whether its machine code is cached on disk: that of this package's functions, without the ones that ``families``
    # defines anew for each set of parameters
    builtin: bool = False
    bins: int = 0  # for binnings: number of bins
    # For batchings: at most 6 integers, passed as ``parameter_0`` and so on. Policies that differ only in these (and
    # their names) are compiled once.
    parameters: tuple[int, ...] = ()
    prefix: str = ""  # for routers: source of ``prefix_tokens``, "cache" or "index"; empty if it does not take them
    # Which requests may precede another one under this policy alone, whatever is predicted
    # (tests/laws/test_starvation.py). If empty, only ``Scheduler.max_wait_s`` limits a wait.
    starvation: str = ""

    @property
    def all_parameters(self) -> tuple[int, ...]:
        """Return the parameters, extended with zeros to the length ``PARAMETERS``."""
        return self.parameters + (0,) * (PARAMETERS - len(self.parameters))

    @property
    def doc(self) -> str:
        """Return the first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    def uses(self, *arguments: str) -> bool:
        """Return whether the function takes any of these arguments."""
        return any(argument in self.arguments for argument in arguments)


def make(axis: str, function: Function, **metadata: Any) -> Policy:
    """Return the policy of a plain function.

    Raises:
        PolicyError: ``function`` is no Python function, or takes arguments that its axis does not have.
    """
    known = ARGUMENTS[axis]
    name = getattr(function, "__name__", type(function).__name__)
    try:
        arguments = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise PolicyError(f"a {axis} policy must be a Python function; got {function!r}") from None
    if wrong := [argument for argument in arguments if argument not in known]:
        raise PolicyError(
            f"{axis} policy {name!r} takes {', '.join(map(repr, wrong))}, which {axis} policies do not get; "
            f"it may take, by name: {', '.join(known)}"
        )
    builtin = str(getattr(function, "__module__", "")).startswith("lengthwise.policy.")
    fields: dict[str, Any] = {"name": name, "builtin": builtin, **metadata}
    return Policy(axis, function=function, arguments=arguments, **fields)


@overload
def rank(function: Function) -> Policy: ...
@overload
def rank(*, every_step: bool = ..., starvation: str = ...) -> Decorator: ...
def rank(function: Function | None = None, *, every_step: bool = False, starvation: str = "") -> Any:
    """Decorate a function of RANK_ARGUMENTS that returns a key. The request with the smallest key runs first.

    A key is computed when the request joins the queue and, with ``every_step=True``, again at every step that may admit
    requests. Requests with equal keys run in the order of the workload. ``generated_tokens`` counts the output tokens
    so far, which a preempted request retains. ``predicted_tokens`` is the latest predicted output length (renewed after
    each window), and ``remaining_tokens`` the part of it still to come (at least 1). ``gittins_rank`` is the Gittins
    rank of the predicted distribution. ``queued_for_s`` is the total time in queues, ``service_tokens`` the service of
    the request's tenant (prompt tokens + 2 x output tokens). ``batch`` is the number of the request's completed bin (0:
    none). ``admission`` is the sequence number of the request's last admission (-1: never), ``last_preemption`` the
    sequence number of its last preemption (0: never). As ``victim`` the function chooses victims: the largest key is
    preempted first, and among equal keys the request that returned from a step last.
    """
    if function is None:
        return lambda f: make("rank", f, every_step=every_step, starvation=starvation)
    return make("rank", function, starvation=starvation)


def preemption(function: Function) -> Policy:
    """Decorate a function of PREEMPTION_ARGUMENTS that returns the gain if a waiting request preempts a running one.

    If the gain is above 0, the engine preempts. It calls the function at the first step after a request has entered the
    queue as its first one, and then every ``Scheduler.preemption_interval_steps``. Each call pairs the next waiting
    request that lacks a slot or memory with the last running one, both by ``rank``, if the waiting one has the smaller
    key. The calls end when one returns at most 0. ``recompute_steps`` is the cost of resuming the running request, in
    decode steps of the current batch. These steps delay all ``num_running`` and ``num_waiting`` requests.
    ``preemptions`` is how often the running request has been preempted.
    """
    return make("preemption", function)


def binning(*, bins: int) -> Decorator:
    """Decorate a function of BINNING_ARGUMENTS that returns a bin from 0 to ``bins - 1``.

    Arrivals collect in bins. A bin joins the queue as a batch once it has ``max_num_seqs`` requests, or its first one
    has waited ``batch_wait_s``.
    """
    return lambda function: make("binning", function, bins=bins)


def batching(function: Function) -> Policy:
    """Decorate a function of BATCHING_ARGUMENTS that forms a step.

    It returns three whole numbers: how many waiting requests may be admitted, how many tokens the step may have
    (decodes count first, prompts share the rest), and the sum of flags. Flags are CHUNKED, PADDED, DECODES_WAIT,
    RESERVE_BLOCK; for Vidur's rules ADMIT_AFTER_PREEMPTION, FORM_ONCE, RESTART_AS_DECODE; for Multi-Bin ONE_BATCH; for
    phases PAUSE_DECODES, NEW_PHASE, ONE_BY_ONE; for micro-batches UNIFORM_SHARES. ``decodes`` and ``prefills`` count
    the idle residents, ``in_flight`` the steps in the pipeline of ``stages`` stages. ``steps_since_admit`` and
    ``ended_since_admit`` count the steps and the requests that ended since admissions were last allowed.
    ``phase_steps`` counts the steps since the last NEW_PHASE, and ``phase_rounds`` how often all micro-batches have run
    since the last step with prompts. With ONE_BY_ONE, ``step_prompts`` and ``step_tokens`` count the prompts in the
    step and their tokens, and ``next_tokens`` are those of the next request; otherwise they are 0. ``parameter_0`` to
    ``parameter_5`` are the policy's own integers (``Policy.parameters``).
    """
    return make("batching", function)


def memory(function: Function) -> Policy:
    """Decorate a function of MEMORY_ARGUMENTS that returns the blocks to take at admission, or -1 to wait.

    ``context_tokens`` are the prompt and the output so far, and the KV cache has the first ``chunk_tokens`` of them
    after this step (found, loaded or computed). ``peak_tokens`` is the maximum of KV tokens that the replica would ever
    use with this request if all predictions were exact (Past-Future). A running sequence that outgrows its blocks takes
    one more at a time.
    """
    return make("memory", function)


@overload
def router(function: Function) -> Policy: ...
@overload
def router(*, name: str = ..., prefix: str = ...) -> Decorator: ...
def router(function: Function | None = None, *, name: str = "", prefix: str = "") -> Any:
    """Decorate a function of ROUTER_ARGUMENTS that returns the replica of an arriving request.

    These have one entry per replica: ``waiting`` and ``running`` (requests), ``tokens`` (prompt and predicted output
    tokens of both), ``free_blocks`` (of ``total_blocks``; those that can be evicted are free), ``prefix_tokens`` and
    ``index_tokens``. ``prefix_tokens`` is how many of the ``prompt_tokens`` a replica has: those in its prefix cache
    (``prefix="cache"``), or those in the router's own index of the prompts that it sent there (``prefix="index"``),
    which has ``index_tokens`` tokens. ``previous_replica`` is the replica that this router chose for the session's
    latest earlier turn, or -1 if there is none. ``service_rate`` is the requests of mean length that a replica
    with full slots completes per second, 1 for all in the gateway. ``draw_a`` and ``draw_b`` are uniform on [0, 1).
    """
    if function is None:
        return lambda f: make("router", f, name=name or f.__name__, prefix=prefix)
    return make("router", function)
