"""A full engine states its retry time: until then it gets nothing, and refused requests go elsewhere at once."""

from __future__ import annotations

import itertools
import math

import pytest
from scheduler_worlds import request, scheduler, sent, worker

from lengthwise.gateway.scheduling import WorkerState


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


def served_beside(refused, *, retry_s, full=False, workers=None, seconds=20.0, **order):
    """An engine refuses the requests in ``refused``, and also all others if it is full.

    One of the others arrives every 0.1 s and takes 0.05 s. Returns, for each refused request, when it was sent until it
    had to end, and how many of the others were served.
    """
    made = scheduler("fcfs", workers=workers or [WorkerState("w", ("m",))], **order)
    for number in refused:
        made.offer(0.0, request(number))
    sent_s, running, served = {number: [] for number in refused}, [], 0
    for tick in range(int(seconds * 100)):
        now_s = tick / 100
        for done_s, number in [one for one in running if one[0] <= now_s]:
            running.remove((done_s, number))
            made.on_progress(now_s, number, 5)
            made.remove(now_s, number)
            served += 1
        if tick % 10 == 0:
            made.offer(now_s, request(1000 + tick, now_s))
        for number, name in made.schedule(now_s).assign:
            if number in refused:
                sent_s[number].append(now_s)
            if not (number in refused or full):
                running.append((now_s + 0.05, number))
            elif made.on_queue_full(now_s, name, number, retry_s) is False:
                made.remove(now_s, number)
    return sent_s, served


@pytest.mark.parametrize("retry_s", [0.0, 2.0])
def test_a_request_that_an_engine_always_refuses_ends_and_does_not_stall_the_others(retry_s):
    sent_s, served = served_beside([1], retry_s=retry_s)
    assert 3 <= len(sent_s[1]) <= 6, "on several occasions, and no more"
    assert sent_s[1][-1] - sent_s[1][0] > 4.0
    assert served >= 198, "all but the latest"


@pytest.mark.parametrize("retry_s", [0.0, 2.0])
def test_several_of_them_do_not_stall_the_others_either(retry_s):
    sent_s, served = served_beside([1, 2, 3], retry_s=retry_s, seconds=60.0)
    assert all(3 <= len(one) <= 15 for one in sent_s.values())
    assert max(one[-1] for one in sent_s.values()) < 40.0
    assert served >= 598


@pytest.mark.parametrize("retry_s", [0.0, 2.0])
def test_a_request_makes_an_engine_back_off_only_four_times(retry_s):
    """The engine may be full for it: the others ran alone, and it would have run beside one."""
    sent_s, served = served_beside([1], retry_s=retry_s, workers=[worker(cap=4)])
    assert all(after_s - before_s > 1.9 for before_s, after_s in itertools.pairwise(sent_s[1][5:]))
    assert served >= 198


def test_a_full_engine_refuses_no_request_alone():
    sent_s, served = served_beside([1], retry_s=0.0, full=True, max_wait_s=600.0)
    assert (len(sent_s[1]) > 9, sent_s[1][-1] > 17.0, served) == (True, True, 0)


def test_a_request_without_a_free_slot_at_the_engine_is_not_refused_alone():
    """The limit is too high: the engine takes two requests, and refuses any third one."""
    made, running = scheduler("fcfs", workers=[worker(cap=3)]), []
    for number in range(300):
        now_s = number / 10
        for one in running[: len(running) - 1]:
            running.remove(one)
            made.remove(now_s, one)
        made.offer(now_s, request(number, now_s))
        for one, name in made.schedule(now_s).assign:
            if len(running) < 2:
                running.append(one)
                made.on_progress(now_s, one, 1)
            else:
                assert made.on_queue_full(now_s, name, one)
    assert len(running) == 2


def test_a_request_that_loses_the_last_place_in_an_engines_queue_is_tried_ten_times():
    """The engine's queue has one place. Request 0 always reaches it in one step with another request."""
    made, may_stay, number = scheduler("fcfs", workers=[worker(cap=2)]), [], 0
    made.offer(0.0, request(0))
    while (may_stay or [True])[-1] and len(may_stay) < 20:
        started = []
        for now_s in (0.2 * number, 0.2 * number + 0.1):
            number += 1
            made.offer(now_s, request(number, now_s))
            sent_ids = sent(made.schedule(now_s))
            if 0 in sent_ids:
                may_stay.append(made.on_queue_full(now_s + 0.01, "w", 0))
            started += [one for one in sent_ids if one]
            made.on_progress(now_s + 0.05, started[-1], 5)
        for one in started:
            made.remove(now_s + 0.06, one)
    assert len(may_stay) >= 10
    assert may_stay == [True] * (len(may_stay) - 1) + [False]


def test_a_request_that_is_held_expires_at_its_deadline_and_may_leave():
    for expires in (True, False):
        made = scheduler("fcfs", workers=[worker(cap=2)])
        made.offer(0.0, request(1, deadline_s=1.5 if expires else math.inf))
        made.offer(0.0, request(2))
        assert sent(made.schedule(0.0)) == [1, 2]
        made.on_queue_full(0.0, "w", 1)
        assert sent(made.schedule(0.2)) == [1]
        made.on_progress(0.25, 2, 1)
        made.offer(0.3, request(3, 0.3))
        made.on_queue_full(0.3, "w", 1)
        assert made.position(1) is None
        if expires:
            while made.next_s(0.3) < 1.5:
                made.schedule(made.next_s(0.3))
            assert [one for one, _ in made.schedule(1.5).expire] == [1]
        made.remove(1.6, 1)
        assert 1 not in made.entries
        made.schedule(9.0)
