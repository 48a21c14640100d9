"""Policies by name, and schedulers as named points on the axes."""

from __future__ import annotations

from typing import Any

from lengthwise.policy import batchings, memories, ranks, routers
from lengthwise.policy.contracts import Policy
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import PolicyError, UnknownNameError

_ROOMS = {"rank": ranks, "batching": batchings, "memory": memories, "router": routers}
_SCHEDULERS = {
    "faster_transformer": Scheduler(batching="static", memory="reserve_max"),
    "orca": Scheduler(batching="mixed", memory="reserve_max"),
    "vllm_v0": Scheduler(leave="latest_arrival", batching="prefill_first", memory="paged"),
    "sarathi": Scheduler(batching="chunked", memory="paged"),
    "lightllm": Scheduler(batching="prefill_first", memory="predicted_peak"),
    "vllm_v1": Scheduler(rank="fcfs_evicted_first", batching="unified", memory="paged_by_chunk"),
    "vidur_vllm": Scheduler(
        rank="fcfs_evicted_first", leave="latest_arrival", batching="vidur_vllm", memory="paged_strict"
    ),
    "vidur_sarathi": Scheduler(rank="fcfs_evicted_first", batching="vidur_sarathi", memory="paged_strict"),
    "vidur_orca": Scheduler(batching="mixed", memory="vidur_reserve_max"),
    "vidur_faster_transformer": Scheduler(batching="static", memory="vidur_reserve_max"),
}
PREEMPTIONS = ("recompute", "swap")


def known(axis: str) -> dict[str, Policy]:
    """The built-in policies of an axis ("leave" is the axis "rank")."""
    room = _ROOMS["rank" if axis == "leave" else axis]
    return {value.name: value for value in vars(room).values() if isinstance(value, Policy)}


def resolve(axis: str, policy: Any) -> Policy:
    """A policy from its name or from itself.

    Raises:
        UnknownNameError: There is no built-in policy of this name.
        PolicyError: The object is no policy, or one of another axis.
    """
    wanted = "rank" if axis == "leave" else axis
    if isinstance(policy, str):
        policies = known(axis)
        if policy not in policies:
            raise UnknownNameError(f"{axis} policy", policy, policies)
        return policies[policy]
    if not isinstance(policy, Policy) or policy.axis != wanted:
        got = f"one of axis {policy.axis!r}" if isinstance(policy, Policy) else repr(policy)
        raise PolicyError(
            f"{axis} must be a name or a function decorated with lengthwise.policy.{wanted}; got {got}"
        )
    return policy


def named() -> dict[str, Scheduler]:
    """The named schedulers: points on the axes under the names of the systems that use them."""
    return dict(_SCHEDULERS)


def scheduler(name: str) -> Scheduler:
    """A named scheduler; raises UnknownNameError."""
    if name not in _SCHEDULERS:
        raise UnknownNameError("scheduler", name, _SCHEDULERS)
    return _SCHEDULERS[name]


def catalog() -> list[tuple[str, str, str]]:
    """(axis, name, what it does) of every built-in policy and named scheduler."""
    rows = [(axis, name, policy.doc) for axis in _ROOMS for name, policy in sorted(known(axis).items())]
    return rows + [("scheduler", name, _describe(s)) for name, s in _SCHEDULERS.items()]


def _describe(s: Scheduler) -> str:
    return f"rank {s.rank}, leave {s.leave}, batching {s.batching}, memory {s.memory}"
