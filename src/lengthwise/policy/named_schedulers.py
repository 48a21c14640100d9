"""Policies by name, and named schedulers: one policy for each axis (rank, batching, memory, router, ...)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from lengthwise.policy import batchings, binnings, memories, preemptions, ranks, routers
from lengthwise.policy.contracts import Policy
from lengthwise.policy.families import FAMILIES, from_text, parameters_of
from lengthwise.schema.deployment import Scheduler, SglangSettings, TrtllmSettings
from lengthwise.schema.errors import PolicyError, UnknownNameError

_MODULES = {
    "rank": ranks,
    "batching": batchings,
    "memory": memories,
    "router": routers,
    "preemption": preemptions,
    "binning": binnings,
}
GATEWAY_ROUTER = "earliest_finish"
PREEMPTION_MODES = ("recompute", "swap")
MAX_WAIT_S = 300.0
"""Wait after which a request precedes others under sjf, srtf, isrtf, elis, gittins and mlfq; inf removes the limit."""
MAX_BIN_WAIT_S = 30.0
"""Wait after which a bin of the named Multi-Bin schedulers becomes a batch although it is not full."""

_PAGED_V1 = {"batching": "unified", "memory": "paged_by_chunk"}
_BY_LENGTH = {**_PAGED_V1, "victim": "longest_remaining", "max_wait_s": MAX_WAIT_S}
_BINNED = {"rank": "completed_batches", "binning": "one", "batch_wait_s": MAX_BIN_WAIT_S}
_AXES: dict[str, dict[str, Any]] = {
    "faster_transformer": {"batching": "static", "memory": "reserve_max"},
    "orca": {"batching": "mixed", "memory": "reserve_max"},
    "vllm_v0": {"victim": "latest_arrival", "batching": "prefill_first", "memory": "paged"},
    "sarathi": {"batching": "chunked", "memory": "paged"},
    "lightllm": {"batching": "prefill_first", "memory": "predicted_peak"},
    "vllm_v1": {"rank": "fcfs_preempted_first", **_PAGED_V1},
    "sglang": {"rank": "queue_order", "sglang": SglangSettings()},
    "trtllm": {"trtllm": TrtllmSettings()},
    "sjf": {"rank": "sjf", **_PAGED_V1, "max_wait_s": MAX_WAIT_S},
    "srtf": {"rank": "srtf", **_BY_LENGTH, "preemption_mode": "swap", "preemption": "by_rank"},
    "isrtf": {"rank": "srtf", **_BY_LENGTH, "preemption": "worth(factor=100)"},
    "elis": {
        "rank": "srtf", "victim": "longest_remaining", "batching": "windowed", "memory": "paged",
        "preemption": "by_rank", "router": "least_outstanding", "max_wait_s": MAX_WAIT_S,
    },
    "gittins": {"rank": "gittins", **_BY_LENGTH, "preemption": "worth(factor=100)"},
    "hrrn": {"rank": "hrrn", **_PAGED_V1},
    "mlfq": {
        "rank": "mlfq(quantum=64, levels=6)", **_PAGED_V1, "preemption_mode": "swap", "preemption": "by_rank",
        "max_wait_s": MAX_WAIT_S,
    },
    "vtc": {"rank": "vtc", **_PAGED_V1},
    "multi_bin": {**_BINNED, "batching": "static_bins", "memory": "paged"},
    "multi_bin_continuous": {**_BINNED, **_PAGED_V1},
    "vidur_vllm": {
        "rank": "fcfs_preempted_first", "victim": "latest_arrival", "batching": "vidur_vllm", "memory": "paged_strict",
    },
    "vidur_sarathi": {"rank": "fcfs_preempted_first", "batching": "vidur_sarathi", "memory": "paged_strict"},
    "vidur_orca": {"batching": "mixed", "memory": "vidur_reserve_max"},
    "vidur_faster_transformer": {"batching": "static", "memory": "vidur_reserve_max"},
}  # fmt: skip
_SCHEDULERS = {name: Scheduler(**axes) for name, axes in _AXES.items()}


@cache
def known(axis: str) -> Mapping[str, Policy]:
    """Return the built-in policies of an axis by name. The axis "victim" has the policies of "rank"."""
    module = _MODULES["rank" if axis == "victim" else axis]
    return MappingProxyType({value.name: value for value in vars(module).values() if isinstance(value, Policy)})


def resolve(axis: str, policy: Any) -> Policy:
    """Return the policy of an axis that has this name. A policy object is returned unchanged.

    Raises:
        UnknownNameError: No built-in policy has this name.
        PolicyError: The object is no policy, or a policy of another axis; the name is that of the gateway's own router.
    """
    policy_axis = "rank" if axis == "victim" else axis
    if isinstance(policy, str):
        policies = known(axis)
        found = from_text(policy_axis, policy) or policies.get(policy)
        if found is None and (axis, policy) == ("router", GATEWAY_ROUTER):
            names = ", ".join(sorted(policies))
            raise PolicyError(f"{policy} is a router of the gateway; the simulator has {names}")
        if found is None:
            families = [f"{one}(...)" for one in FAMILIES.get(policy_axis, {})]
            raise UnknownNameError(f"{axis} policy", policy, [*policies, *families])
        return found
    if not isinstance(policy, Policy) or policy.axis != policy_axis:
        got = f"one of axis {policy.axis!r}" if isinstance(policy, Policy) else repr(policy)
        raise PolicyError(
            f"{axis} must be a name or a function decorated with lengthwise.policy.{policy_axis}; got {got}"
        )
    return policy


def named() -> dict[str, Scheduler]:
    """Return the named schedulers, most of them under the names of the systems that schedule in this way."""
    return dict(_SCHEDULERS)


def scheduler(name: str) -> Scheduler:
    """Return a named scheduler. Raises UnknownNameError if no scheduler has this name."""
    if name not in _SCHEDULERS:
        raise UnknownNameError("scheduler", name, _SCHEDULERS)
    return _SCHEDULERS[name]


_PREFIXES = {
    "": "",
    "cache": " It knows the blocks in the replicas' caches.",
    "index": " It estimates the prefixes by its own index of the prompts that it sent.",
}


def catalog() -> list[tuple[str, str, str]]:
    """Return (axis, name, description) of every built-in policy and named scheduler."""
    policies = [(axis, name, policy) for axis in _MODULES for name, policy in sorted(known(axis).items())]
    rows = [(axis, name, policy.doc + _PREFIXES[policy.prefix]) for axis, name, policy in policies]
    for axis, families in FAMILIES.items():
        for name, make in families.items():
            rows.append((axis, f"{name}({parameters_of(make)})", (make.__doc__ or "").split("\n")[0]))
    return rows + [("scheduler", name, _describe(s)) for name, s in named().items()]


def _describe(s: Scheduler) -> str:
    if s.sglang is not None:
        return f"rank {s.rank}, steps, admission by max_tokens and retraction of SGLang 0.5.23"
    if s.trtllm is not None:
        return f"rank {s.rank}, capacity scheduler {s.trtllm.capacity_scheduler_policy} and steps of TensorRT-LLM"
    text = f"rank {s.rank}, victim {s.victim}, batching {s.batching}, memory {s.memory}"
    for axis in ("preemption", "router"):  # where it differs from the default
        text += "" if (own := getattr(s, axis)) == getattr(Scheduler, axis) else f", {axis} {own}"
    if s.binning is not None:
        text += f", binning {s.binning}"
        if math.isfinite(s.batch_wait_s):
            text += f" for at most {s.batch_wait_s:g} s"
    if math.isfinite(s.max_wait_s):
        text += f", first after a wait of {s.max_wait_s:g} s"
    return text
