"""Policies by name, and schedulers as named points on the axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lengthwise.policy import batchings, binnings, memories, preemptions, ranks, routers
from lengthwise.policy.contracts import Policy
from lengthwise.policy.families import FAMILIES, from_text, parameters_of
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import PolicyError, UnknownNameError

_ROOMS = {
    "rank": ranks,
    "batching": batchings,
    "memory": memories,
    "router": routers,
    "takeover": preemptions,
    "binning": binnings,
}
LONGEST_WAIT_S = 300.0
"""After so long a request goes first under the named schedulers that go by length; inf lifts it."""
LONGEST_GATHERING_S = 30.0
"""After so long a bin of the named Multi-Bin schedulers leaves as it is."""
_SCHEDULERS = {
    "faster_transformer": Scheduler(batching="static", memory="reserve_max"),
    "orca": Scheduler(batching="mixed", memory="reserve_max"),
    "vllm_v0": Scheduler(leave="latest_arrival", batching="prefill_first", memory="paged"),
    "sarathi": Scheduler(batching="chunked", memory="paged"),
    "lightllm": Scheduler(batching="prefill_first", memory="predicted_peak"),
    "vllm_v1": Scheduler(rank="fcfs_evicted_first", batching="unified", memory="paged_by_chunk"),
    "sjf": Scheduler(rank="sjf", batching="unified", memory="paged_by_chunk", max_wait_s=LONGEST_WAIT_S),
    "srtf": Scheduler(
        rank="srtf",
        leave="longest_remaining",
        batching="unified",
        memory="paged_by_chunk",
        preempt="swap",
        takeover="by_rank",
        max_wait_s=LONGEST_WAIT_S,
    ),
    "isrtf": Scheduler(
        rank="srtf",
        leave="longest_remaining",
        batching="unified",
        memory="paged_by_chunk",
        takeover="worth(factor=100)",
        max_wait_s=LONGEST_WAIT_S,
    ),
    "elis": Scheduler(rank="srtf", batching="windowed", memory="paged", takeover="by_rank", max_wait_s=LONGEST_WAIT_S),
    "gittins": Scheduler(
        rank="gittins",
        leave="longest_remaining",
        batching="unified",
        memory="paged_by_chunk",
        takeover="worth(factor=100)",
        max_wait_s=LONGEST_WAIT_S,
    ),
    "hrrn": Scheduler(rank="hrrn", batching="unified", memory="paged_by_chunk"),
    "mlfq": Scheduler(
        rank="mlfq(quantum=64, levels=6)",
        batching="unified",
        memory="paged_by_chunk",
        preempt="swap",
        takeover="by_rank",
        max_wait_s=LONGEST_WAIT_S,
    ),
    "vtc": Scheduler(rank="vtc", batching="unified", memory="paged_by_chunk"),
    "multi_bin": Scheduler(
        rank="completed_batches",
        batching="static_bins",
        memory="paged",
        binning="one",
        batch_wait_s=LONGEST_GATHERING_S,
    ),
    "multi_bin_continuous": Scheduler(
        rank="completed_batches",
        batching="unified",
        memory="paged_by_chunk",
        binning="one",
        batch_wait_s=LONGEST_GATHERING_S,
    ),
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
        return from_text(wanted, policy) or _known_one(axis, policy)
    if not isinstance(policy, Policy) or policy.axis != wanted:
        got = f"one of axis {policy.axis!r}" if isinstance(policy, Policy) else repr(policy)
        raise PolicyError(f"{axis} must be a name or a function decorated with lengthwise.policy.{wanted}; got {got}")
    return policy


def _known_one(axis: str, name: str) -> Policy:
    policies = known(axis)
    if name not in policies:
        families = FAMILIES.get("rank" if axis == "leave" else axis, {})
        raise UnknownNameError(f"{axis} policy", name, [*policies, *(f"{one}(...)" for one in families)])
    return policies[name]


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
    for axis, families in FAMILIES.items():
        rows += [(axis, f"{name}({parameters_of(make)})", _first_line(make)) for name, make in families.items()]
    return rows + [("scheduler", name, _describe(s)) for name, s in _SCHEDULERS.items()]


def _first_line(make: Callable[..., Policy]) -> str:
    return (make.__doc__ or "").split("\n")[0]


def _describe(s: Scheduler) -> str:
    takeover = "" if s.takeover == "never" else f", takeover {s.takeover}"
    binning = "" if s.binning is None else f", binning {s.binning}"
    wait = f", who has waited {s.max_wait_s:g} s goes first" if math.isfinite(s.max_wait_s) else ""
    bins = f" for at most {s.batch_wait_s:g} s" if binning and math.isfinite(s.batch_wait_s) else ""
    axes = f"rank {s.rank}, leave {s.leave}, batching {s.batching}, memory {s.memory}"
    return f"{axes}{takeover}{binning}{bins}{wait}"
