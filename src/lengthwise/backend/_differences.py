"""What the simulated scheduler does that no stock engine does, and what stands nearest."""

from __future__ import annotations

import math

from lengthwise.backend._plan import cuts_prompts, is_overridden, kv_tokens, resident_bound, step_tokens
from lengthwise.backend.launch import fits_node, policy_name
from lengthwise.policy import PREDICTED, resolve
from lengthwise.schema.deployment import Deployment

ORDERED_BY_PRIORITY = {
    "priority": "Requests went by their class: send it as the field `priority`, smaller first.",
    "sjf": "Requests went by predicted output: send it, in tokens, as the field `priority`.",
    "srtf": "Requests went by the predicted output that remained: send the prediction, in tokens, as the "
    "field `priority`; it cannot change once a request is sent.",
    "gittins": "Requests went by the Gittins index of their predicted length: send it, in tokens, as the field "
    "`priority`; it cannot change once a request is sent.",
    "longest_remaining": "Requests went by the predicted output that remained: send the prediction, in "
    "tokens, as the field `priority`; it cannot change once a request is sent.",
    "ljf": "Requests went by predicted output, longest first: send it negated as the field `priority`.",
    "shortest_prompt": "Requests went by prompt length: send it, in tokens, as the field `priority`.",
}
"""Ranks that an engine follows if whoever sends the requests tells it the key."""

ARRIVAL = ("fcfs", "fcfs_evicted_first")

_MEMORIES = {
    "reserve_max": "Memory for the longest sequence was reserved for each request. No engine does so; as many "
    "sequences are let in ({bound}), and their memory is paged.",
    "vidur_reserve_max": "Memory for the longest sequence was reserved for each request. No engine does so; as "
    "many sequences are let in ({bound}), and their memory is paged.",
    "predicted_peak": "Requests were admitted by the predicted peak of KV tokens; the engine admits by what is "
    "free now and evicts later.",
}
_PAGED = ("paged", "paged_by_chunk", "paged_strict")
_ROUTERS = {
    "round_robin": "round_robin",
    "random": "random",
    "power_of_two": "power_of_two",
    "least_outstanding": "power_of_two",
    "least_waiting": "power_of_two",
    "least_tokens": "power_of_two",
    "central": "power_of_two",
}


def router_policy(deployment: Deployment) -> str:
    """The policy of vLLM's router that stands nearest to the simulated one."""
    return _ROUTERS.get(policy_name(deployment.scheduler.router), "power_of_two")


def shared_notes(deployment: Deployment) -> tuple[str, ...]:
    """What differs whichever engine runs: memory, eviction, steps, replicas, clients, caches."""
    found = (
        _blocks,
        _memory,
        _by_length,
        _takeover,
        _binning,
        _max_wait,
        _preempt,
        _step,
        _budget,
        _replicas,
        _nodes,
        _timeout,
    )
    made = (note(deployment) for note in found)
    return (
        *tuple(note for note in made if note),
        "Prefix caching was not simulated and is turned off; turning it on can only help.",
    )


def _blocks(d: Deployment) -> str | None:
    if is_overridden(d):
        return f"The KV cache was given as {d.kv.num_blocks:,} blocks ({kv_tokens(d):,} tokens) a replica."
    how = "" if d.kv.planner == "lengthwise" else f" by the rules of {d.kv.planner}"
    return (
        f"{kv_tokens(d):,} tokens of KV cache a replica were planned{how}; the engine measures its own when it "
        "starts and logs them. Compare the two."
    )


def _memory(d: Deployment) -> str | None:
    name = policy_name(d.scheduler.memory)
    if name in _PAGED:
        return None
    text = _MEMORIES.get(name, f"Memory policy {name} has no counterpart; the engine pages on demand.")
    return text.format(bound=resident_bound(d))


def _by_length(d: Deployment) -> str | None:
    rank = resolve("rank", d.scheduler.rank)
    if not rank.uses(*PREDICTED):
        return None
    again = " Predictions made again as tokens come cannot reach a request that the engine holds."
    return (
        f"Rank {rank.name} goes by predicted lengths, which no engine knows. A gateway orders exactly so: it keeps the "
        "queue and passes an engine no more requests than run at once."
        + (again if rank.uses("remaining_tokens", "index_tokens") else "")
    )


def _takeover(d: Deployment) -> str | None:
    name = policy_name(d.scheduler.takeover)
    if name == "never":
        return None
    return (
        f"A waiting request took a running one's place where takeover {name} said so. vLLM evicts only when a running "
        "request finds no memory; a gateway can cut a stream after some tokens and ask for the rest later, with what "
        "the request has produced as its prompt."
    )


def _binning(d: Deployment) -> str | None:
    if d.scheduler.binning is None:
        return None
    return (
        f"Arrivals were gathered by predicted length into batches of {d.limits.max_num_seqs} ("
        f"{policy_name(d.scheduler.binning)}). No engine does so; a gateway gathers them and passes whole batches on."
    )


def _max_wait(d: Deployment) -> str | None:
    if math.isinf(d.scheduler.max_wait_s):
        return None
    return (
        f"Who had waited {d.scheduler.max_wait_s:g} s went before all others. An engine's priority cannot change once "
        "a request is with it: keep the bound where the queue is, in a gateway."
    )


def _preempt(d: Deployment) -> str | None:
    if d.scheduler.preempt != "swap":
        return None
    return "An evicted request's KV cache was swapped to the host; the engine computes it again."


def _step(d: Deployment) -> str | None:
    limit = d.limits.max_step_seqs
    if limit is None or limit >= d.limits.max_num_seqs:
        return None
    return (
        f"At most {limit} of {d.limits.max_num_seqs} resident sequences took part in a step; the engine has one "
        "bound for both."
    )


def _budget(d: Deployment) -> str | None:
    if cuts_prompts(d) or step_tokens(d) == d.limits.max_num_batched_tokens:
        return None
    return (
        f"Prompts stayed whole: the step's token budget is raised from {d.limits.max_num_batched_tokens} to "
        f"{step_tokens(d)}, the longest request."
    )


def _replicas(d: Deployment) -> str | None:
    if d.parallel.replicas == 1:
        return None
    name, near = policy_name(d.scheduler.router), router_policy(d)
    end = "" if name == near else f"; {near} stands nearest in vLLM's router"
    queue = " A queue shared by all replicas is a gateway's work." if name == "central" else ""
    return f"{d.parallel.replicas} replicas stood behind a {name} router{end}.{queue}"


def _nodes(d: Deployment) -> str | None:
    if fits_node(d):
        return None
    return (
        f"A replica of {d.parallel.tp * d.parallel.pp} GPUs spans nodes of {d.node.gpus}: the command must run on "
        "each of them and be told so."
    )


def _timeout(d: Deployment) -> str | None:
    if math.isinf(d.limits.timeout_s):
        return None
    return (
        f"Clients gave up after {d.limits.timeout_s:g} s: set this in the client; the engine drops a request "
        "whose connection closes."
    )
