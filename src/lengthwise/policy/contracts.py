"""What a policy is: one small pure function on one axis.

A policy function takes any of its axis' arguments *by name* and returns a number (or, for
batching, three). The same function runs compiled inside the engine's kernel and interpreted
in the reference; none of the arguments tells the true output length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from lengthwise.schema.errors import PolicyError

Function = Callable[..., Any]

RANK_ARGUMENTS = (
    "now_s",
    "arrival_s",
    "prompt_tokens",
    "generated_tokens",
    "predicted_tokens",
    "remaining_tokens",
    "index_tokens",
    "queued_for_s",
    "priority",
    "admission",
    "eviction",
    "service_tokens",
    "batch",
)
BATCHING_ARGUMENTS = (
    "decodes",
    "prefills",
    "waiting",
    "num_running",
    "in_flight",
    "token_budget",
    "max_num_seqs",
    "steps_since_admit",
    "ended_since_admit",
    "phase_steps",
    "phase_rounds",
    "step_prompts",
    "step_tokens",
    "next_tokens",
    "stages",
    "parameter_0",
    "parameter_1",
    "parameter_2",
    "parameter_3",
    "parameter_4",
    "parameter_5",
)
PARAMETERS = sum(name.startswith("parameter_") for name in BATCHING_ARGUMENTS)
"""Whole numbers that a batching policy may have of its own."""
MEMORY_ARGUMENTS = (
    "context_tokens",
    "chunk_tokens",
    "predicted_tokens",
    "max_model_len",
    "block_size",
    "free_blocks",
    "total_blocks",
    "watermark_blocks",
    "num_running",
    "peak_tokens",
)
ROUTER_ARGUMENTS = ("sequence", "draw_a", "draw_b", "waiting", "running", "tokens")
TAKEOVER_ARGUMENTS = (
    "waiting_key",
    "running_key",
    "waiting_remaining_tokens",
    "running_remaining_tokens",
    "running_generated_tokens",
    "recompute_steps",
    "num_running",
    "waiting",
    "queued_for_s",
    "preemptions",
)
BINNING_ARGUMENTS = ("predicted_tokens", "prompt_tokens")

ARGUMENTS = {
    "rank": RANK_ARGUMENTS,
    "batching": BATCHING_ARGUMENTS,
    "memory": MEMORY_ARGUMENTS,
    "router": ROUTER_ARGUMENTS,
    "takeover": TAKEOVER_ARGUMENTS,
    "binning": BINNING_ARGUMENTS,
}
PREDICTED = (
    "predicted_tokens",
    "remaining_tokens",
    "index_tokens",
    "peak_tokens",
    "waiting_remaining_tokens",
    "running_remaining_tokens",
)
"""Arguments that tell a predicted length."""

CHUNKED = 1
"""A prompt may be cut to what is left of the step's prompt tokens."""
PADDED = 2
"""Prompts count as a padded batch: (prompts) x (longest prompt)."""
DECODES_WAIT = 4
"""Decodes run only in steps without prompts."""
RESERVE_BLOCK = 8
"""A decode runs only while a block is free, whether it needs one or not (vLLM v0, Vidur)."""
ADMIT_AFTER_EVICTION = 16
"""A step that evicted may still admit (Vidur's Sarathi)."""
FORM_ONCE = 32
"""A step that evicted all it could have run waits for the replica's next event (Vidur)."""
RESTART_AS_DECODE = 64
"""An evicted half-computed prompt ends where it had got to; its rest is decoded (Vidur)."""
ONE_BATCH = 128
"""Only requests of one completed bin are admitted together (Multi-Bin Batching)."""
DECODES_REST = 256
"""Decodes that are free go along with a step's prompts, not computed: a micro-batch stays together (ExeGPT)."""
NEW_PHASE = 512
"""``phase_steps`` and ``phase_rounds`` count from this step on."""
ONE_BY_ONE = 1024
"""The policy is asked again before each admission, and told what is in the step."""
UNIFORM_SHARES = 2048
"""A step takes at most an even share of the residents: one of as many micro-batches as may be in flight (ExeGPT)."""

SERVICE_OUTPUT_WEIGHT = 2.0
"""What an output token counts in a tenant's service; a prompt token counts 1 (VTC, OSDI '24)."""


@dataclass(frozen=True)
class Policy:
    """A policy function with what the engine must know of it.

    Attributes:
        axis: "rank" (also used for who leaves), "batching", "memory", "router", "takeover" or "binning".
        name: For tables and scenario files.
        function: The plain Python function.
        arguments: The names it takes, a subset of its axis'.
        every_step: For ranks: keys change with time, so the queue is re-keyed at every step.
        builtin: Whether it ships with the package (its machine code is then cached on disk).
        bins: For binnings: how many bins there are.
        parameters: For batchings: at most 6 whole numbers, told as ``parameter_0`` and so on. Policies that differ in
            these (and their names) alone are compiled once.
        starvation: What holds of who may pass whom under this policy alone, in words, whatever is predicted
            (tests/laws/test_starvation.py); "" where only ``Scheduler.max_wait_s`` bounds a wait.
    """

    axis: str
    name: str
    function: Function
    arguments: tuple[str, ...]
    every_step: bool = False
    builtin: bool = False
    bins: int = 0
    parameters: tuple[int, ...] = ()
    starvation: str = ""

    @property
    def all_parameters(self) -> tuple[int, ...]:
        """As many as a batching is told, 0 for those that it does not have."""
        return self.parameters + (0,) * (PARAMETERS - len(self.parameters))

    @property
    def doc(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    def uses(self, *arguments: str) -> bool:
        """Whether the function looks at any of these arguments."""
        return any(argument in self.arguments for argument in arguments)


def _arguments_of(axis: str, function: Function) -> tuple[str, ...]:
    known = ARGUMENTS[axis]
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise PolicyError(f"a {axis} policy must be a Python function; got {function!r}") from None
    wrong = [name for name in names if name not in known]
    if wrong:
        raise PolicyError(
            f"{axis} policy {getattr(function, '__name__', function)!r} takes {', '.join(map(repr, wrong))}, "
            f"which no {axis} policy is given; it may take, by name: {', '.join(known)}"
        )
    return names


def make(axis: str, function: Function, **metadata: Any) -> Policy:
    """A policy from a plain function; raises PolicyError for arguments its axis does not have."""
    names = _arguments_of(axis, function)
    builtin = str(getattr(function, "__module__", "")).startswith("lengthwise.policy.")
    name = getattr(function, "__name__", type(function).__name__)
    return Policy(axis, name, function, names, **({"builtin": builtin} | metadata))


@overload
def rank(function: Function) -> Policy: ...
@overload
def rank(*, every_step: bool = ..., starvation: str = ...) -> Callable[[Function], Policy]: ...
def rank(function: Function | None = None, *, every_step: bool = False, starvation: str = "") -> Any:
    """Decorator: a function of RANK_ARGUMENTS that returns a key; the smallest key goes first.

    Keys are taken when a request joins the queue, or at every step with ``every_step=True``;
    equal keys keep the order of arrival. ``generated_tokens`` counts tokens so far (an evicted
    request keeps them). ``predicted_tokens`` is the output length predicted at the last window of
    these, ``remaining_tokens`` what is still to come of it (at least 1), ``index_tokens`` the
    Gittins index of the predicted distribution. ``waited_s`` is time spent in queues in all,
    ``service_tokens`` what the request's tenant was served (prompt tokens + 2 x output tokens),
    ``batch`` the number of the completed bin it belongs to (0: none). ``admission`` is the
    sequence number of the last admission (-1: never), ``eviction`` that of the last eviction
    (0: never). As ``leave`` the same function says who is evicted: the largest key, and of equal
    ones whoever came out of a step last.
    """
    if function is None:
        return lambda f: make("rank", f, every_step=every_step, starvation=starvation)
    return make("rank", function, starvation=starvation)


def takeover(function: Function) -> Policy:
    """Decorator: a function of TAKEOVER_ARGUMENTS; above 0: a waiting request takes a running one's place.

    It is asked at the first step after an arrival that goes before all who wait, and every
    ``Scheduler.window_tokens`` steps, of the best waiting request that finds no seat or memory and
    of the worst running one, both by ``rank``. ``recompute_steps`` is what bringing the running one
    back (computed again, or swapped) would cost, in decode steps of the present batch; these delay
    all ``resident`` and ``waiting`` requests. ``preemptions`` is how often it had to leave before.
    """
    return make("takeover", function)


def binning(*, bins: int) -> Callable[[Function], Policy]:
    """Decorator: a function of BINNING_ARGUMENTS that returns a bin from 0 to ``bins - 1``.

    Arrivals gather in bins; one that holds ``max_num_seqs`` requests joins the queue as a batch.
    """
    return lambda function: make("binning", function, bins=bins)


def batching(function: Function) -> Policy:
    """Decorator: a function of BATCHING_ARGUMENTS that forms a step.

    It returns three whole numbers: how many waiting requests may be admitted, how many tokens
    the step may hold (its decodes count first, prompts share what is left), and flags added up:
    CHUNKED, PADDED, DECODES_WAIT, SPARE_BLOCK, and for Vidur's rules ADMIT_AFTER_EVICTION,
    FORM_ONCE and RESTART_AS_DECODE, for Multi-Bin ONE_BATCH, for phases DECODES_REST, NEW_PHASE and ONE_BY_ONE, for
    micro-batches EVEN_SHARES.
    ``decodes`` and ``prefills`` count the resident sequences that are free to run; ``in_flight`` the steps still in
    the pipeline, which has ``stages``; ``steps_since_admit`` and ``ended_since_admit`` the steps and requests that
    ended since admissions were last allowed; ``phase_steps`` the steps that began since the last NEW_PHASE, and
    ``phase_rounds`` how often all in the pipeline have had their turn since the last of them with prompts. Where
    ONE_BY_ONE asks again, ``step_prompts`` and ``step_tokens`` count the prompts in the step and their tokens, and
    ``next_tokens`` is what the next request would add; else they are 0. ``parameter_0`` to ``parameter_5`` are
    whole numbers of the policy's own (``Policy.parameters``).
    """
    return make("batching", function)


def memory(function: Function) -> Policy:
    """Decorator: a function of MEMORY_ARGUMENTS that returns the blocks to take at admission, or -1 to wait.

    ``context_tokens`` are to be computed, ``chunk_tokens`` of them in this step; ``peak_tokens``
    is the most KV tokens the replica would ever hold with this request if all predictions held
    (Past-Future). A running sequence that outgrows its blocks takes one more at a time.
    """
    return make("memory", function)


def router(function: Function) -> Policy:
    """Decorator: a function of ROUTER_ARGUMENTS that returns the replica of an arriving request.

    ``waiting``, ``running`` (requests) and ``tokens`` (prompt and predicted tokens outstanding)
    have one entry a replica; ``draw_a`` and ``draw_b`` are uniform on [0, 1).
    """
    return make("router", function)
