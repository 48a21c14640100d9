"""The compiled kernel, from the disk cache or made once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from lengthwise import _jit
from lengthwise.engine import _kernel, _layout
from lengthwise.engine._outcome import Outcome, ending_s
from lengthwise.engine._setup import Setup
from lengthwise.engine._state import State, new_state
from lengthwise.policy.compile import signatures
from lengthwise.schema.errors import InternalError, PolicyError
from lengthwise.schema.records import Status


def ready() -> bool:
    """Whether the kernel needs no compiling: it is in this process or in the disk cache."""
    return _jit.DISABLED or _compiled.cache_info().currsize > 0 or _jit.is_cached("run")


@lru_cache(maxsize=1)
def _compiled(state_type: Any) -> Any:
    s = {axis: _jit.function_type(signature) for axis, signature in signatures().items()}
    signature = _jit.i8(
        state_type, s["rank"], s["rank"], s["batching"], s["memory"], s["router"], s["takeover"], s["binning"]
    )
    return _jit.compile_now(_kernel.run, signature, cached=True)


def run_kernel(setup: Setup, log_rows: int) -> Outcome:
    """The outcome of a run, by the kernel.

    Raises:
        PolicyError: A policy raised, returned NaN, chose no replica, or took too many blocks.
    """
    state = new_state(setup, log_rows)
    kernel = _kernel.run if _jit.DISABLED else _compiled(_jit.type_of(state))
    try:
        code = kernel(state, *setup.functions)
    except Exception as error:  # the kernel raises nothing itself
        raise setup.policy_raised(error) from error
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
    if code == _layout.BAD_BIN:
        raise setup.bad_bin(request)
    if code == _layout.BAD_TAKEOVER:
        raise setup.bad_takeover(request)
    if code == _layout.STUCK:
        raise PolicyError(setup.stuck(request))
    if code != _layout.OK:
        raise InternalError(f"the kernel came back with {code}")


def _outcome(state: State) -> Outcome:
    ctr = state.ctr[0]
    _count_unfinished(state)
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
