"""What a policy of each axis may be asked, and may answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lengthwise import policy as room
from lengthwise.policy import Policy
from lengthwise.policy.contracts import ARGUMENTS

_CALLS = 60
_REAL = {
    "now_s",
    "arrival_s",
    "waited_s",
    "service_tokens",
    "predicted_tokens",
    "index_tokens",
    "recompute_steps",
}
_KEYS = {"waiting_key", "running_key"}
_REMAINING = {"remaining_tokens", "waiting_remaining_tokens", "running_remaining_tokens"}
_SHARES = {"draw_a", "draw_b"}
_LOADS = {"waiting", "running", "tokens"}
_STEP = ("step_prompts", "step_tokens", "next_tokens")
_FROM_ONE = {"prompt_tokens", "context_tokens", "chunk_tokens", "token_budget", "max_num_seqs", "max_model_len",
             "block_size", "total_blocks", "stages"}  # fmt: skip


def calls(policy: Policy, seed: int = 0) -> list[tuple[Any, ...]]:
    """Full argument lists of the policy's axis, the same for the same seed."""
    rng = np.random.default_rng(seed)
    made = [_call(policy.axis, rng, number) for number in range(_CALLS)]
    own = policy.all_parameters if policy.axis == "batching" else ()
    return [one[: len(one) - len(own)] + own for one in made]


def _call(axis: str, rng: np.random.Generator, number: int) -> tuple[Any, ...]:
    replicas = int(rng.integers(1, 5))
    top = (1, 10, 1000, 10**9)[number % 4]
    given = {name: _kind(axis, name)(rng, top, replicas) for name in ARGUMENTS[axis]}
    if axis == "batching" and number % 3 == 0:
        given |= dict.fromkeys(("decodes", "prefills", "resident", "in_flight", *_STEP), 0)
    elif axis == "batching":
        given["resident"] = max(
            given["resident"], given["decodes"] + given["prefills"] + given["step_prompts"]
        )
    if axis == "memory":
        given["free_blocks"] = min(given["free_blocks"], given["total_blocks"])
    return tuple(given.values())


def _kind(axis: str, name: str) -> Callable[[np.random.Generator, int, int], Any]:
    if axis == "router" and name in _LOADS:
        return lambda rng, top, replicas: rng.integers(0, top + 1, replicas)
    if name in _SHARES:
        return lambda rng, *_: float(rng.random())
    if name in _KEYS:
        return lambda rng, top, _: float(rng.uniform(-top, top))
    if name in _REMAINING:
        return lambda rng, top, _: float(1 + rng.uniform(0, top) * (rng.random() < 0.8))
    if name in _REAL:
        return lambda rng, top, _: float(rng.uniform(0, top) * (rng.random() < 0.8))
    least = 1 if name in _FROM_ONE else 0
    return lambda rng, top, _: int(rng.integers(least, top + 1))


def fault(policy: Policy, got: Any, given: dict[str, Any]) -> str:
    """What is wrong with an answer; "" where its axis can use it."""
    return _RANGES[policy.axis](got, given, policy)


def _rank(got: float, _: dict[str, Any], __: Policy) -> str:
    return "" if math.isfinite(got) else "must return a finite key"


def _batching(got: tuple[int, int, int], given: dict[str, Any], _: Policy) -> str:
    if got[2] < 0 or got[2] >= 2 * room.EVEN_SHARES:
        return "must return flags of lengthwise.policy added up"
    idle = given["resident"] == 0 and given["waiting"] > 0
    return "must admit somebody on an idle replica" if idle and (got[0] < 1 or got[1] < 1) else ""


def _memory(got: int, given: dict[str, Any], _: Policy) -> str:
    return "" if -1 <= got <= given["free_blocks"] else "must return -1 or blocks that are free"


def _router(got: int, given: dict[str, Any], policy: Policy) -> str:
    if policy == room.known("router")["central"]:
        return ""
    return "" if 0 <= got < len(given["waiting"]) else "must return a replica that is there"


def _takeover(got: float, _: dict[str, Any], __: Policy) -> str:
    return "must return a number" if math.isnan(got) else ""


def _binning(got: int, _: dict[str, Any], policy: Policy) -> str:
    return "" if 0 <= got < policy.bins else f"must return a bin from 0 to {policy.bins - 1}"


_RANGES: dict[str, Callable[[Any, dict[str, Any], Policy], str]] = {
    "rank": _rank,
    "batching": _batching,
    "memory": _memory,
    "router": _router,
    "takeover": _takeover,
    "binning": _binning,
}
