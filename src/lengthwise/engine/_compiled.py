"""The compiled kernel, from the disk cache or made once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from lengthwise import _jit
from lengthwise.engine import _kernel, _layout
from lengthwise.engine._outcome import Outcome, ending_s
from lengthwise.engine._setup import Setup
from lengthwise.engine._state import State, decode_state, new_state
from lengthwise.engine._told import policy_raised, stuck
from lengthwise.policy.compile import signatures
from lengthwise.schema.errors import InternalError, PolicyError
from lengthwise.schema.records import Status


def ready() -> bool:
    """Whether the kernel needs no compiling: it is in this process or in the disk cache."""
    return _jit.DISABLED or _compiled.cache_info().currsize > 0 or _jit.is_cached("run")


Kind = tuple[Any, ...]


@lru_cache(maxsize=1)
def _compiled(state_type: Any, decode_type: Any) -> Any:
    s = {axis: _jit.function_type(signature) for axis, signature in signatures().items()}
    axes = (
        "rank",
        "rank",
        "batching",
        "memory",
        "router",
        "takeover",
        "binning",
        "batching",
        "memory",
        "router",
    )
    signature = _jit.i8(state_type, decode_type, *(s[axis] for axis in axes))
    return _jit.compile_now(_kernel.run, signature, cached=True)


_KERNELS: dict[Kind, Any] = {}
"""By what a state is made of: to ask its compiled type anew takes longer than a short run."""


def arguments_of(setup: Setup, log_rows: int) -> tuple[Any, ...]:
    """What the kernel is called with; the state comes first."""
    state = new_state(setup, log_rows)
    side = setup.there or setup
    return state, decode_state(setup, state), *setup.functions, side.batching, side.memory, side.router


def kernel_of(arguments: tuple[Any, ...]) -> Any:
    """The kernel, compiled unless the compiler is off."""
    if _jit.DISABLED:
        return _kernel.run
    kind = _kind(arguments[:2])
    if kind not in _KERNELS:
        _KERNELS[kind] = _compiled(*map(_jit.type_of, arguments[:2]))
    return _KERNELS[kind]


def _kind(value: Any) -> Kind:
    """What a compiled type follows from."""
    if isinstance(value, tuple):
        return type(value), *map(_kind, value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.ndim, value.flags.c_contiguous, value.flags.writeable, value.flags.aligned
    return (type(value),)


def run_kernel(setup: Setup, log_rows: int) -> Outcome:
    """The outcome of a run, by the kernel.

    Raises:
        PolicyError: A policy raised, returned NaN, chose no replica, or took too many blocks.
    """
    arguments = arguments_of(setup, log_rows)
    state: State = arguments[0]
    try:
        code = kernel_of(arguments)(*arguments)
    except Exception as error:  # the kernel raises nothing itself
        raise policy_raised(setup, error) from error
    _raise_for(code, setup, state)
    return _outcome(state)


def _raise_for(code: int, setup: Setup, state: State) -> None:
    request = int(state.ctr[0]["problem_request"])
    if code == _layout.BAD_RANK:
        raise setup.bad_rank(request)
    if code == _layout.BAD_MEMORY:
        raise setup.bad_memory(request)
    if code == _layout.BAD_ROUTE:
        raise setup.bad_route(request)
    if code == _layout.BAD_DECODE_MEMORY and setup.there:
        raise setup.there.bad_memory(request)
    if code == _layout.BAD_DECODE_ROUTE and setup.there:
        raise setup.there.bad_route(request)
    if code == _layout.BAD_BIN:
        raise setup.bad_bin(request)
    if code == _layout.BAD_TAKEOVER:
        raise setup.bad_takeover(request)
    if code == _layout.STUCK:
        raise PolicyError(stuck(setup, request))
    if code != _layout.OK:
        raise InternalError(f"the kernel came back with {code}")


def _outcome(state: State) -> Outcome:
    ctr = state.ctr[0]
    _count_unfinished(state)
    if state.par[0]["follows"]:
        never = (state.follow_left > 0) & (state.results["status"] == Status.UNFINISHED)
        state.arrival_s[never] = np.nan
    kept = int(ctr["step_rows"]) <= len(state.step_log) and int(ctr["gap_rows"]) <= len(state.gap_log)
    return Outcome(
        arrival_s=state.arrival_s,
        results=state.results,
        replicas=state.replicas,
        series=state.series,
        histogram=state.histogram,
        steps=state.step_log[: int(ctr["step_rows"])] if kept else None,
        gaps=state.gap_log[: int(ctr["gap_rows"])] if kept else None,
        end_s=ending_s(float(ctr["last_s"]), float(state.par[0]["limit_s"]), state.results, state.replicas),
    )


def _count_unfinished(state: State) -> None:
    """Tokens so far of what the time limit cut off."""
    slots = state.slots[: int(state.ctr[0]["slots"])]
    index = slots["index"]
    tokens = slots["generated"] + slots["prompt"] - state.prompt[index]
    for g, group in enumerate(state.groups):
        members = state.heaps[g, : int(group["members"])] & 0xFFFFFFFF
        tokens[members] += group["steps"] - slots["join_step"][members]
    cut = state.results["status"][index] == Status.UNFINISHED
    state.results["output_tokens"][index[cut]] = np.maximum(tokens[cut], 0)
    state.results["waited_s"][index[cut]] = slots["waited_s"][cut]
