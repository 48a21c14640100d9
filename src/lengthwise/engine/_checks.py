"""Checks before any time passes: can these policies run this workload on this deployment?"""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.policy import CHUNKED, PREDICTED, PREEMPTIONS, Policy, interpreted, resolve
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, PolicyError, UnknownNameError
from lengthwise.schema.workload import Workload


@dataclass(frozen=True)
class Policies:
    """The policies of a run."""

    rank: Policy
    leave: Policy
    batching: Policy
    memory: Policy
    router: Policy
    takeover: Policy
    binning: Policy

    def each(self) -> tuple[Policy, ...]:
        """In the order in which the kernel takes them."""
        return self.rank, self.leave, self.batching, self.memory, self.router, self.takeover, self.binning


def policies_of(deployment: Deployment) -> Policies:
    """The policies of a deployment's scheduler, from their names or objects."""
    s = deployment.scheduler
    if s.preempt not in PREEMPTIONS:
        raise UnknownNameError("preemption", s.preempt, PREEMPTIONS)
    axes = ("rank", "leave", "batching", "memory", "router", "takeover")
    binning = "one" if s.binning is None else s.binning
    found = {axis: resolve(axis, getattr(s, axis)) for axis in axes}
    return Policies(**found, binning=resolve("binning", binning))


def check(workload: Workload, deployment: Deployment, policies: Policies) -> None:
    """Nothing, if the workload and the deployment can be simulated together.

    Raises:
        InputError: The cache or a limit is too small.
        PolicyError: A policy needs predictions that are not there, or refuses everybody.
    """
    for policy in policies.each():
        if policy.uses(*PREDICTED) and workload.predicted_tokens is None:
            raise PolicyError(
                f"{policy.axis} policy {policy.name!r} looks at predicted output lengths, and this workload has "
                'none; give predicted_tokens ([predictor] kind = "oracle" in a scenario predicts the truth)'
            )
    kv = deployment.kv
    if kv.num_blocks * kv.block_size < deployment.max_model_len:
        raise InputError(
            f"the KV cache must hold one sequence of max_model_len {deployment.max_model_len} tokens; it holds "
            f"{kv.num_blocks * kv.block_size}. Lower max_model_len, or give more memory or GPUs"
        )
    _check_memory(policies.memory, deployment)


def check_sides(deployment: Deployment) -> None:
    """Nothing, if the sides of a deployment that decodes apart can work together.

    Raises:
        InputError: One queue for all replicas, or blocks of two sizes.
    """
    here, there = deployment, deployment.decode
    if there is None:
        return
    for who, router in (("scheduler", here.scheduler.router), ("decode", there.router)):
        if resolve("router", router) == resolve("router", "central"):
            raise InputError(
                f'{who}.router must pick a replica where a decode side is apart; "central" keeps one queue for all. '
                'Take "round_robin" or "least_outstanding"'
            )
    if here.kv.block_size != there.kv.block_size:
        raise InputError(
            f"block_size must be the same where prompts are prefilled and where they decode; it is "
            f"{here.kv.block_size} and {there.kv.block_size}"
        )


def empty_plan(batching: Policy, deployment: Deployment) -> tuple[int, int, int]:
    """What the batching policy says to one request before an idle replica: it must let it in."""
    limits, own = deployment.limits, (len(deployment.cost.stage_layers), *batching.all_parameters)
    budget, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    try:
        plan = interpreted(batching)(0, 0, 1, 0, 0, budget, seqs, 0, 0, 0, 0, 0, 0, 0, *own)
        admit, tokens, flags = (int(x) for x in plan)
    except Exception as error:
        raise PolicyError(
            f"batching policy {batching.name!r} must return three whole numbers (admit, tokens, flags); "
            f"on an idle replica with one request waiting it failed: {error}"
        ) from error
    if admit < 1 or (flags & CHUNKED and tokens < 1):
        raise PolicyError(
            f"batching policy {batching.name!r} admits nothing on an idle replica with one request waiting "
            f"(admit {admit}, tokens {tokens}); no request would ever run"
        )
    return admit, tokens, flags


def _check_memory(memory: Policy, deployment: Deployment) -> None:
    """The memory policy must let a request of one token onto an idle replica."""
    kv, watermark = deployment.kv, int(deployment.limits.watermark * deployment.kv.num_blocks)
    sizes = (deployment.max_model_len, kv.block_size, kv.num_blocks, kv.num_blocks, watermark)
    try:
        blocks = interpreted(memory)(1, 1, 1.0, *sizes, 0, 2)
    except Exception as error:
        raise PolicyError(
            f"memory policy {memory.name!r} must return a whole number of blocks; for one token on an idle replica "
            f"it raised {type(error).__name__}: {error}"
        ) from error
    if blocks < 0:
        raise PolicyError(
            f"memory policy {memory.name!r} refuses a request of one token on an idle replica; no request would "
            "ever run"
        )
