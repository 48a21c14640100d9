"""The scheduler in numbers, for metrics, autoscaling and the admin page."""

from __future__ import annotations

from lengthwise.gateway.core.backlog import tokens_by_model
from lengthwise.gateway.core.bins import Bins
from lengthwise.gateway.core.crew import Crew
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.decisions import Statistics


def statistics(now_s: float, queue: Queue, bins: Bins, crew: Crew, cuts: int) -> Statistics:
    """Who waits and runs now, and what is still to come of them."""
    queued = len(queue) + len(bins)
    queued_tokens = queue.total_tokens() + bins.tokens
    tokens = queued_tokens + sum(worker.tokens for worker in crew)
    usual = crew.usual_speed()
    rate = sum(worker.speed.tokens_per_s or usual for worker in crew.up)
    numbers = (worker.numbers(worker.speed.tokens_per_s or usual or 1.0) for worker in crew)
    return Statistics(
        waiting=queued,
        waiting_bytes=queue.bytes + bins.bytes,
        running=sum(len(worker.there) for worker in crew),
        oldest_wait_s=max(queue.oldest_wait_s(now_s), bins.oldest_wait_s(now_s)),
        backlog_tokens=tokens,
        backlog_s=tokens / rate if rate else 0.0,
        predicted_wait_s=crew.wait_s(now_s, "", tokens_by_model(queue, bins)),
        ordering=queued > 0,
        cuts=cuts,
        workers=tuple(numbers),
    )
