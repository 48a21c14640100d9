"""Preemption policies: whether a waiting request preempts a running one."""

from __future__ import annotations

from lengthwise.policy.contracts import preemption


@preemption
def never():
    """No request is preempted unless memory is short."""
    return 0.0


@preemption
def by_rank(waiting_key, running_key):
    """The request with the better rank gets the slot (SRTF, MLFQ)."""
    return running_key - waiting_key


@preemption
def is_improvement(
    waiting_key, running_key, waiting_remaining_tokens, running_remaining_tokens, recompute_steps, num_running,
    num_waiting,
):  # fmt: skip
    """A preemption must save more predicted steps than the steps by which it delays all requests."""
    saved = running_remaining_tokens - waiting_remaining_tokens
    return saved - recompute_steps * (num_running + num_waiting) if waiting_key < running_key else 0.0
