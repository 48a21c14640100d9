"""What the scheduler keeps does not grow with the requests that were."""

from __future__ import annotations

import gc
import pickle
import random
import sys
import types

import pytest
from scheduler_worlds import request, scheduler, worker

from lengthwise.gateway.config import Order
from lengthwise.gateway.core.queue import TimePerRequest


def retained(thing, seen=None):
    """How many items the containers that an object holds have in all, outside of classes and modules."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type | types.ModuleType | types.FunctionType | Order):
        return 0
    seen.add(id(thing))
    size = len(thing) if hasattr(thing, "__len__") and not isinstance(thing, str) else 0
    return size + sum(retained(one, seen) for one in gc.get_referents(thing))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["isrtf", "bins"])
def test_nothing_is_left_of_a_hundred_thousand_requests(mode):
    draws = random.Random(1)
    made = scheduler(mode, workers=[worker(cap=4)], fairness="vtc", max_wait_s=1e9, batch_wait_s=0.01)
    running, sizes, now_s = [], [], 0.0
    for number in range(100_000):
        now_s += 0.01
        made.offer(
            now_s,
            request(
                number,
                now_s,
                predicted=draws.uniform(1, 500),
                tenant=number % 7,
                deadline_s=now_s + 1e8,
                session=f"session {number % 50}",
            ),
        )
        running += [one for one, _ in made.schedule(now_s).assign]
        if len(running) == 4 or number % 3 == 0:
            for one in running:
                made.on_progress(now_s, one, 60)
                made.remove(now_s, one)
            running = []
        if number in (20_000, 99_999):
            sizes.append((retained(made), sys.getsizeof(made.entries)))
    assert sizes[1][0] <= 1.2 * sizes[0][0] + 3000
    assert made.statistics(now_s).waiting < 50


def test_alarms_that_are_called_off_take_no_room():
    alarms = TimePerRequest()
    for number in range(10_000):
        alarms.set(number, 1e6 + number)
        if number >= 10:
            alarms.discard(number - 10)
    assert len(alarms) == 10
    assert len(pickle.dumps(alarms)) < 100 * 50
    assert alarms.next_s() == 1e6 + 9990
    assert alarms.pop_due(1e6 + 9991) == [9990, 9991]


def test_nothing_to_do_takes_no_time_however_many_wait():
    """Not a stopwatch: with nothing to do, the scheduler looks at no waiting request."""
    made = scheduler("srtf")
    for number in range(2000):
        made.offer(0.0, request(number))
    made.schedule(0.0)
    made.queue = made.worker_pool = made.dispatcher = None
    assert not made.schedule(0.1)
