"""A full engine states its retry time: until then it gets nothing, and refused requests go elsewhere at once."""

from __future__ import annotations

import pytest
from scheduler_worlds import request, scheduler, sent, worker


@pytest.mark.parametrize(("wanted_s", "constrained_latency_s"), [(1.5, 1.5), (60.0, 2.0)])
def test_a_full_engine_gets_nothing_for_the_stated_time_and_two_seconds_at_most(wanted_s, constrained_latency_s):
    made = scheduler("fcfs", workers=[worker("a", cap=4), worker("b", cap=4)])
    made.offer(0.0, request(1))
    ((one, full),) = made.schedule(0.0).assign
    made.on_queue_full(1.0, full, one, wanted_s)
    other = {"a": "b", "b": "a"}[full]
    for number in range(2, 6):
        made.offer(1.0, request(number, 1.0))
    assert made.schedule(1.0).assign == ((1, other), (2, other), (3, other), (4, other))
    assert made.next_s(1.0) == 1.0 + constrained_latency_s
    assert not made.schedule(1.0 + constrained_latency_s - 0.01).assign
    assert made.schedule(1.0 + constrained_latency_s).assign == ((5, full),)


def test_a_full_engine_without_a_retry_time_is_retried_soon():
    made = scheduler("fcfs")
    made.offer(0.0, request(1))
    made.schedule(0.0)
    made.on_queue_full(1.0, "w", 1)
    assert not made.schedule(1.0)
    assert made.next_s(1.0) == pytest.approx(1.1)
    assert sent(made.schedule(1.1)) == [1]
