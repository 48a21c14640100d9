"""Whether a waiting request takes a running one's place."""

from __future__ import annotations

from lengthwise.policy.contracts import takeover


@takeover
def never():
    """Who runs stays, until memory runs out."""
    return 0.0


@takeover
def by_rank(waiting_key, running_key):
    """Whoever ranks better has the seat (SRTF, MLFQ)."""
    return running_key - waiting_key


@takeover
def is_improvement(
    waiting_key, running_key, waiting_remaining_tokens, running_remaining_tokens, recompute_steps, num_running, waiting
):
    """Only for more than it costs: predicted steps saved above those that recomputing takes from everybody."""
    saved = running_remaining_tokens - waiting_remaining_tokens
    return saved - recompute_steps * (num_running + waiting) if waiting_key < running_key else 0.0
