"""Ranks, which order requests: the smallest key runs first; as ``victim``, the largest key is preempted first."""

from __future__ import annotations

from lengthwise.policy.contracts import rank


@rank(starvation="no later request precedes it")
def fcfs(arrival_s):
    """First come, first served."""
    return arrival_s


@rank(starvation="no later request precedes it, unless that was preempted")
def fcfs_preempted_first(arrival_s, last_preemption):
    """First come, first served. A preempted request returns to the front of the queue (vLLM, Vidur)."""
    return -float(last_preemption) if last_preemption > 0 else arrival_s


@rank(starvation="no later request precedes it")
def queue_order():
    """First come, first served; under scheduler sglang a preempted request returns to the end of the queue."""
    return 0.0


@rank
def sjf(predicted_tokens):
    """Shortest predicted output first."""
    return predicted_tokens


@rank
def shortest_prompt(prompt_tokens):
    """Shortest prompt first."""
    return float(prompt_tokens)


@rank
def srtf(remaining_tokens):
    """Shortest remaining predicted output first."""
    return remaining_tokens


@rank
def gittins(gittins_rank):
    """Smallest Gittins rank of the predicted distribution first: expected work per probability of finishing."""
    return gittins_rank


@rank(
    every_step=True,
    starvation="passed only by requests that have waited at least its wait x (their predicted remaining / its own), "
    "so by no later request that is predicted at least as long",
)
def hrrn(queued_for_s, remaining_tokens):
    """Highest response ratio next: time waited over predicted remaining output."""
    return -queued_for_s / remaining_tokens


@rank(
    every_step=True,
    starvation="of tenants with requests waiting in one queue none is charged more than one request (prompt + 2 x "
    "predicted output) ahead of another, plus 4 x the largest error of prediction for each of their running requests",
)
def vtc(service_tokens):
    """The tenant with the least service first (VTC). Predictions are charged at admission and corrected at the end."""
    return service_tokens


@rank(starvation="batches run in the order in which their bins filled; no request is in a bin beyond batch_wait_s")
def completed_batches(batch):
    """Multi-Bin: batches in the order in which their bins filled. Without bins, first come, first served."""
    return float(batch)


@rank
def ljf(predicted_tokens):
    """Longest predicted output first."""
    return -predicted_tokens


@rank
def priority(priority, arrival_s):
    """Priority classes, the smallest first. Within a class first come, first served."""
    return priority * 1e12 + arrival_s


@rank
def latest_admitted(admission):
    """As ``victim``: the request admitted last is preempted (vLLM v1, Sarathi)."""
    return float(admission)


@rank
def latest_arrival(arrival_s):
    """As ``victim``: the request that arrived last is preempted (vLLM v0)."""
    return arrival_s


@rank
def longest_remaining(predicted_tokens, generated_tokens):
    """As ``victim``: the request with the longest predicted remaining output is preempted."""
    return predicted_tokens - generated_tokens


@rank
def lowest_priority(priority, admission):
    """As ``victim``: the lowest priority class is preempted first, and in it the latest admitted request."""
    return priority * 1e12 + admission
