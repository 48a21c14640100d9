"""How many requests a worker is given, and which worker gets one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import request, scheduler, sent, worker

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.worker import ConcurrencyLimit
from lengthwise.gateway.scheduling import Signals, WorkerState


def found_cap(*, batch=40, polls=200, start=8):
    """The caps over time before an engine that runs ``batch`` at once and queues the rest."""
    cap, caps = ConcurrencyLimit(Dispatch(start=start)), []
    for look in range(1, polls):
        in_flight = cap.limit(None)
        cap.note_in_flight(in_flight)
        waiting = max(0, in_flight - batch)
        cap.adapt(float(look), Signals(running=in_flight - waiting, waiting=waiting, at_s=look), in_flight)
        caps.append(cap.limit(None))
    return caps


@pytest.mark.parametrize(("batch", "start"), [(40, 8), (3, 8), (200, 1), (1, 1)])
def test_the_cap_finds_what_the_engine_runs_at_once(batch, start):
    caps = found_cap(batch=batch, start=start)
    settled = caps[50:]
    assert max(settled) <= batch + max(1, batch / 16) + 1, "its own queue stays near empty"
    assert min(settled) >= 0.9 * batch - 1, "and its batch near full"


def test_an_engine_that_reports_nothing_keeps_its_initial_cap():
    cap = ConcurrencyLimit(Dispatch(start=5))
    for look in range(20):
        cap.note_in_flight(5)
        cap.adapt(float(look), Signals(at_s=look), 5)
    assert cap.limit(None) == 5


@pytest.mark.parametrize(
    "error", [{"waiting": 3.0}, {"waiting": 0.0, "kv_used": 0.95}, {"waiting": 0.0, "preemptions": 2.0}]
)
def test_signs_of_too_many_shrink_the_cap(error):
    cap = ConcurrencyLimit(Dispatch(start=16))
    cap.note_in_flight(16)
    cap.adapt(1.0, Signals(waiting=0.0, preemptions=1.0, at_s=1.0), 16)
    before = cap.limit(None)
    cap.adapt(3.0, Signals(**{"preemptions": 1.0, "at_s": 3.0} | error), 16)
    assert cap.limit(None) < before


def test_a_cap_that_is_not_used_does_not_grow():
    cap = ConcurrencyLimit(Dispatch(start=8))
    for look in range(1, 20):
        cap.note_in_flight(3)
        cap.adapt(float(look), Signals(waiting=0.0, at_s=look), 3)
    assert cap.limit(None) == 8


def test_stale_signals_change_nothing():
    cap = ConcurrencyLimit(Dispatch(start=8))
    for look in range(1, 20):
        cap.note_in_flight(8)
        cap.adapt(float(look), Signals(waiting=4.0, at_s=1.0), 8)
    assert cap.limit(None) == 6


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 1), st.integers(0, 9)), max_size=60), st.integers(1, 8))
def test_the_cap_stays_within_its_bounds(signals, least):
    cap = ConcurrencyLimit(Dispatch(start=8, min_concurrency=least, max_concurrency=64))
    for look, (waiting, kv_used, preemptions) in enumerate(signals):
        cap.note_in_flight(cap.limit(None))
        reported = Signals(waiting=waiting, kv_used=kv_used, preemptions=preemptions, at_s=look)
        cap.adapt(float(look), reported, cap.limit(None))
        if look % 7 == 0:
            cap.back_off(float(look), 0)
        assert least <= cap.limit(None) <= 64
        assert cap.limit(4) <= 4


def fill(made, count, now_s=0.0, **metadata):
    for i in range(count):
        made.offer(now_s, request(i, now_s, **metadata))
    return made.schedule(now_s)


def adapting(**metadata):
    return WorkerState("w", ("m",), **metadata)


def test_slots_bound_the_cap():
    assert len(fill(scheduler(workers=[adapting(slots=3)]), 20).assign) == 3


def test_a_fixed_cap_is_obeyed():
    assert len(fill(scheduler(workers=[worker(cap=5)]), 20).assign) == 5


def test_a_full_engine_queue_is_no_failure():
    made = scheduler(workers=[adapting()], dispatch=Dispatch(start=4))
    assert sent(fill(made, 6)) == [0, 1, 2, 3]
    made.on_queue_full(0.5, "w", 3)
    assert made.position(3) == 0, "back to its place, before those who came later"
    assert sent(made.schedule(0.5)) == [], "the cap is what the engine took"
    assert made.statistics(0.5).workers[0].limit == 3
    made.remove(0.7, 0)
    assert sent(made.schedule(0.7)) == [3]


def test_a_worker_that_refuses_all_is_tried_ever_more_rarely():
    made = scheduler(workers=[adapting()])
    made.offer(0.0, request(1))
    now_s, requested = 0.0, []
    while now_s < 10.0:
        if sent(made.schedule(now_s)):
            requested.append(now_s)
            made.on_queue_full(now_s, "w", 1)
            made.schedule(now_s)
        now_s = made.next_s(now_s)
    gaps = [b - a for a, b in itertools.pairwise(requested)]
    assert 4 < len(requested) < 12
    assert gaps == sorted(gaps)
    assert max(gaps) <= 2.0 + 1e-9


def test_the_least_backlog_gets_the_next_one():
    made = scheduler("fcfs", workers=[worker("a", cap=9), worker("b", cap=9)])
    made.offer(0.0, request(1, predicted=500))
    made.offer(0.0, request(2, predicted=100))
    made.offer(0.0, request(3, predicted=100))
    made.offer(0.0, request(4, predicted=400))
    assert made.schedule(0.0).assign == ((1, "a"), (2, "b"), (3, "b"), (4, "b"))


def test_backlog_is_counted_in_the_seconds_of_the_worker():
    fast = WorkerState("fast", ("m",), concurrency=9, tokens_per_s=1000.0)
    slow = WorkerState("slow", ("m",), concurrency=9, tokens_per_s=10.0)
    made = scheduler("fcfs", workers=[slow, fast])
    made.offer(0.0, request(1, predicted=900))
    made.schedule(0.0)
    for i in range(2, 8):
        made.offer(0.0, request(i, predicted=50))
    assert {name for _, name in made.schedule(0.0).assign} == {"fast"}


@pytest.mark.parametrize(("behind_tokens", "stays"), [(20, True), (200, False)])
def test_a_session_stays_where_it_was_while_that_is_worth_it(behind_tokens, stays):
    """A prompt of 1000 tokens, half of it expected there, saves as much time as 50 output tokens."""
    made = scheduler("fcfs", workers=[worker("a", cap=9), worker("b", cap=9)], dispatch=Dispatch(affinity=0.5))
    made.offer(0.0, request(1, session="s", prompt_tokens=1000))
    assert made.schedule(0.0).assign == ((1, "a"),)
    made.remove(0.1, 1)
    made.offer(0.2, request(2, predicted=behind_tokens))
    assert made.schedule(0.2).assign == ((2, "a"),)
    made.offer(0.3, request(3, session="s", prompt_tokens=1000))
    assert made.schedule(0.3).assign == ((3, "a" if stays else "b"),)


def test_a_worker_that_failed_it_is_avoided_until_no_other_is_up():
    both = [worker("a"), worker("b")]
    made = scheduler("fcfs", workers=both)
    made.offer(0.0, request(1))
    made.schedule(0.0)
    made.requeue(0.1, 1, 0, avoid="a")
    assert made.schedule(0.1).assign == ((1, "b"),)
    made.requeue(0.2, 1, 0, avoid="b")
    assert made.schedule(0.2).assign[0][0] == 1, "both failed it: any is better than none"


def test_only_what_fits_the_cache_is_sent():
    made = scheduler("fcfs", workers=[worker(cap=9, kv_tokens=1000)])
    for i in range(4):
        made.offer(0.0, request(i, predicted=390, prompt_tokens=10))
    assert sent(made.schedule(0.0)) == [0, 1]
    made.remove(1.0, 0)
    assert sent(made.schedule(1.0)) == [2]


def test_an_empty_worker_takes_even_what_does_not_fit():
    made = scheduler("fcfs", workers=[worker(cap=9, kv_tokens=100)])
    made.offer(0.0, request(1, predicted=math.inf))
    assert sent(made.schedule(0.0)) == [1]


def test_a_model_goes_only_to_a_worker_that_serves_it():
    made = scheduler("fcfs", workers=[worker("a", cap=9, models=("x",)), worker("b", models=("y", "x"))])
    made.offer(0.0, request(1, model="y"))
    made.offer(0.0, request(2, model="y"))
    made.offer(0.0, request(3, model="x"))
    assert made.schedule(0.0).assign == ((1, "b"), (3, "a"))


def test_a_full_queue_holds_longer_each_time_until_a_request_is_taken_again():
    cap, now_s, holds = ConcurrencyLimit(Dispatch(start=16)), 0.0, []
    for _ in range(6):
        cap.back_off(now_s, 4)
        holds.append(cap.backoff_until_s - now_s)
        cap.accepted(now_s, now_s - 1.0, 1)  # tokens of one that was there before say nothing
        now_s = cap.backoff_until_s
    assert holds == sorted(holds)
    assert holds[-1] > 8 * holds[0]
    cap.accepted(now_s, now_s, 1)
    cap.back_off(now_s + 0.1, 4)
    assert cap.backoff_until_s - now_s - 0.1 == pytest.approx(holds[0])
