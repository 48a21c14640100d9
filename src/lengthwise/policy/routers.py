"""Choice of the replica of an arriving request."""

from __future__ import annotations

from lengthwise.policy.contracts import router


@router
def round_robin(request_number, waiting):
    """Replicas in turn."""
    return request_number % len(waiting)


@router
def random(draw_a, waiting):
    """A replica at random."""
    return int(draw_a * len(waiting))


@router(name="least_outstanding")
def fewest_requests(waiting, running):
    """The fewest requests waiting or running; the lowest number among equals."""
    best = 0
    for replica in range(1, len(waiting)):
        if waiting[replica] + running[replica] < waiting[best] + running[best]:
            best = replica
    return best


@router(name="least_waiting")
def fewest_waiting(waiting):
    """Vidur's "lor": the fewest requests waiting; running ones do not count."""
    best = 0
    for replica in range(1, len(waiting)):
        if waiting[replica] < waiting[best]:
            best = replica
    return best


@router(name="least_tokens")
def fewest_tokens(tokens):
    """The fewest prompt and predicted output tokens outstanding."""
    best = 0
    for replica in range(1, len(tokens)):
        if tokens[replica] < tokens[best]:
            best = replica
    return best


@router
def power_of_two(draw_a, draw_b, waiting, running):
    """The less loaded of two replicas drawn at random."""
    a = int(draw_a * len(waiting))
    b = int(draw_b * len(waiting))
    return a if waiting[a] + running[a] <= waiting[b] + running[b] else b


@router
def central():
    """No replica: one queue for all, from which a replica takes requests when it forms a step."""
    return -1
