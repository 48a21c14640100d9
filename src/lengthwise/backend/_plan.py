"""How many KV blocks were simulated, and whether by a plan that a real engine would repeat."""

from __future__ import annotations

from lengthwise.backend.launch import policy_name
from lengthwise.schema.deployment import Deployment


def is_overridden(deployment: Deployment) -> bool:
    """Whether the number of KV blocks was given rather than planned."""
    from lengthwise import cost
    from lengthwise.schema.errors import DoesNotFitError

    d = deployment
    try:
        planned = cost.plan_memory(d.model, d.gpu, d.parallel, d.limits, d.max_model_len, d.kv.planner)
    except DoesNotFitError:
        return True  # only a given number lets such a deployment be made
    return planned.num_blocks != d.kv.num_blocks


def kv_tokens(deployment: Deployment) -> int:
    """Tokens that the KV cache of a replica holds."""
    return deployment.kv.num_blocks * deployment.kv.block_size


def resident_bound(deployment: Deployment) -> int:
    """Sequences that may be resident: reserving the maximum for each leaves room for so many."""
    most = deployment.limits.max_num_seqs
    memory, kv = policy_name(deployment.scheduler.memory), deployment.kv
    if memory == "reserve_max":
        most = min(most, kv.num_blocks // -(-deployment.max_model_len // kv.block_size))
    elif memory == "vidur_reserve_max":
        most = min(most, kv.num_blocks // max(1, deployment.max_model_len // kv.block_size))
    return max(1, most)


def cuts_prompts(deployment: Deployment) -> bool:
    """Whether the simulated steps cut prompts into chunks."""
    return policy_name(deployment.scheduler.batching) in {"unified", "chunked", "vidur_sarathi"}


def step_tokens(deployment: Deployment) -> int:
    """The token budget of a step; where prompts stay whole it must hold the longest one."""
    budget = deployment.limits.max_num_batched_tokens
    return budget if cuts_prompts(deployment) else max(budget, deployment.max_model_len)
