"""Who is brought back from a worker, how often, and who never is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import World, request, scheduler, sent, worker

from lengthwise.gateway.request import LengthPrediction


def on_demand(**order):
    return scheduler("isrtf", **({"preemption": "by_rank", "preemptions_per_s": 10.0} | order))


def running_long_waiting_short(made, **metadata):
    """A long one runs; a short one comes; what is decided then."""
    made.offer(0.0, request(1, predicted=1000, **metadata))
    assert sent(made.schedule(0.0)) == [1]
    made.offer(1.0, request(2, 1.0, predicted=10))
    return made.schedule(1.0)


def test_a_short_one_takes_a_long_ones_place():
    made = on_demand()
    decisions = running_long_waiting_short(made)
    assert decisions.preempt == (1,)
    assert decisions.assign == (), "there is room only once the cut one is back"
    assert made.schedule(1.1).preempt == ()
    made.requeue(1.2, 1, 40)
    assert sent(made.schedule(1.2)) == [2]
    assert made.statistics(1.2).preemptions == 1
    assert made.position(1) == 0


def test_one_place_that_is_coming_free_is_enough_for_one():
    made = scheduler("isrtf", preemption="by_rank", workers=[worker(cap=2)])
    for i in range(2):
        made.offer(0.0, request(i, predicted=1000))
    made.schedule(0.0)
    made.offer(1.0, request(7, 1.0, predicted=100))
    assert made.schedule(1.0).preempt == (1,)
    made.on_progress(2.0, 0, 50)
    assert not made.schedule(2.0), "the place of the first is for the one that waits"
    made.offer(3.0, request(8, 3.0, predicted=90))
    assert made.schedule(3.0).preempt == (0,), "another one that waits takes another place"


def test_a_request_that_cannot_be_resumed_is_not_preempted():
    assert not running_long_waiting_short(on_demand(), preemptible=False)


def test_other_modes_preempt_no_request():
    assert not running_long_waiting_short(scheduler("srtf", preemption="by_rank"))


def test_a_preemption_must_be_worth_its_cost():
    cheap = scheduler("isrtf", preemption="worth(factor=1)")
    assert running_long_waiting_short(cheap).preempt == (1,)
    dear = scheduler("isrtf", preemption="worth(factor=100)")
    assert not running_long_waiting_short(dear, prompt_tokens=1000)


def test_no_request_is_preempted_more_often_than_allowed():
    made = on_demand(max_preemptions=2, preemptions_per_s=math.inf)
    jobs = [(request(0, 0.0, predicted=3000), 3000)]
    jobs += [(request(i, float(i), predicted=20), 20) for i in range(1, 12)]
    world = World(made, jobs, [worker()]).run()
    assert world.jobs[0].request.dispatch.preemptions == 2


def test_one_that_was_cut_is_left_alone_for_a_window():
    made = on_demand(preemptions_per_s=math.inf)
    running_long_waiting_short(made)
    made.requeue(1.0, 1, 40)
    made.schedule(1.0)
    made.remove(1.5, 2)
    assert sent(made.schedule(1.5)) == [1]
    made.offer(2.0, request(3, 2.0, predicted=10))
    made.on_progress(2.0, 1, 89)
    assert not made.schedule(2.0)
    made.on_progress(3.0, 1, 90)
    assert made.schedule(3.0).preempt == (1,)


def test_equal_ones_never_take_turns():
    made = on_demand(preemptions_per_s=math.inf, max_preemptions=1000)
    jobs = [(request(i, 0.3 * i, predicted=500), 500) for i in range(12)]
    world = World(made, jobs, [worker(cap=2)]).run()
    assert all(job.request.dispatch.preemptions == 0 for job in world.jobs.values())


def test_equal_keys_that_do_not_move_never_take_turns():
    """Predicted totals that move with the tokens, so that what remains is always the same."""
    made = on_demand(preemptions_per_s=math.inf, max_preemptions=1000)
    for i in range(6):
        made.offer(0.0, request(i, predicted=100))
    running = sent(made.schedule(0.0))
    for step in range(1, 200):
        now_s = 0.05 * step
        made.on_progress(now_s, running[0], 50 * step)
        made.repredict(now_s, running[0], LengthPrediction(100 + 50 * step, at_tokens=50 * step))
        assert not made.schedule(now_s).preempt


def test_an_overdue_request_is_not_preempted():
    made = on_demand(max_wait_s=2.0)
    made.offer(0.0, request(1, predicted=1000))
    assert sent(made.schedule(3.0)) == [1]
    made.offer(3.5, request(2, 3.5, predicted=1))
    assert not made.schedule(3.5)


def test_a_better_class_is_not_cut_for_a_worse_one():
    made = on_demand()
    made.offer(0.0, request(1, predicted=1000, priority=0))
    made.schedule(0.0)
    made.offer(1.0, request(2, 1.0, predicted=1, priority=5))
    assert not made.schedule(1.0)


def test_no_request_is_preempted_where_that_frees_no_slot():
    """The worker's cap fell below what runs there: a place that comes free goes to no request."""
    made = scheduler("isrtf", preemption="by_rank", workers=[worker(cap=3)])
    for i in range(3):
        made.offer(0.0, request(i, predicted=1000))
    made.schedule(0.0)
    made.update_workers(0.5, [worker(cap=1)])
    made.offer(1.0, request(7, 1.0, predicted=1))
    assert not made.schedule(1.0)
    for i in range(2):
        made.remove(2.0, i)
    assert not made.schedule(2.0)
    made.update_workers(2.5, [worker(cap=1)])
    assert made.schedule(2.5).preempt == (2,)


def test_no_request_is_preempted_for_one_that_still_would_not_fit():
    made = scheduler("isrtf", preemption="by_rank", workers=[worker(cap=2, kv_tokens=1000)])
    made.offer(0.0, request(1, predicted=400, prompt_tokens=0))
    made.offer(0.0, request(2, predicted=300, prompt_tokens=0, preemptible=False))
    assert len(made.schedule(0.0).assign) == 2
    made.offer(1.0, request(3, 1.0, predicted=10, prompt_tokens=800))
    assert not made.schedule(1.0)
    made.offer(1.1, request(4, 1.1, predicted=5, prompt_tokens=600))
    assert made.schedule(1.1).preempt == (1,)


@pytest.mark.parametrize("preemptions_per_s", [0.0, 0.5, 3.0])
def test_storms_are_capped(preemptions_per_s):
    """Ever shorter requests arrive, each worth a preemption of a running one."""
    made = on_demand(preemptions_per_s=preemptions_per_s, max_preemptions=1000)
    jobs = [(request(i, 0.02 * i, predicted=100_000 / (i + 1)), 400) for i in range(200)]
    world = World(made, jobs, [worker(cap=8)]).run()
    times = [now_s for now_s, decisions in world.log for _ in decisions.preempt]
    most = max(1.0, preemptions_per_s) if preemptions_per_s else 0
    for i, start_s in enumerate(times):
        for n, end_s in enumerate(times[i:], start=1):
            assert n <= most + preemptions_per_s * (end_s - start_s) + 1e-6
    assert (len(times) > 0) == (preemptions_per_s > 0)


@settings(max_examples=20)
@given(st.integers(0, 1 << 30), st.integers(1, 4))
def test_every_request_finishes_within_its_preemption_limit_whatever_is_predicted(seed, cap):
    draws = random.Random(seed)
    predictions = [0.0, 10.0, 200.0, math.inf]
    jobs = [(request(i, 0.1 * i, predicted=draws.choice(predictions)), draws.choice([5, 200, 600])) for i in range(25)]
    made = on_demand(max_preemptions=2, preemptions_per_s=math.inf)
    world = World(made, jobs, [worker(cap=cap)]).run()
    assert all(not math.isnan(job.finished_s) for job in world.jobs.values())
    assert all(job.request.dispatch.preemptions <= 2 for job in world.jobs.values())
    assert all(len(job.sent_s) == job.request.dispatch.preemptions + 1 for job in world.jobs.values())


def windowed():
    made = scheduler("windowed", window_tokens=50)
    made.offer(0.0, request(1, predicted=1000))
    made.schedule(0.0)
    return made


def test_an_expired_window_makes_room_for_a_waiting_request():
    made = windowed()
    made.offer(0.1, request(2, 0.1, predicted=10))
    assert not made.schedule(0.1), "not before its end"
    made.on_progress(0.2, 1, 49)
    assert not made.schedule(0.2)
    made.on_progress(0.3, 1, 50)
    assert made.schedule(0.3).preempt == (1,)
    made.requeue(0.4, 1, 51)
    assert sent(made.schedule(0.4)) == [2]


def test_a_request_that_returns_at_the_end_of_a_window_is_not_preempted_at_once():
    """It left late, as its text was incomplete, at the end of its next window."""
    made = windowed()
    made.offer(0.1, request(2, 0.1, predicted=9000))
    made.on_progress(0.3, 1, 50)
    assert made.schedule(0.3).preempt == (1,)
    made.on_progress(0.4, 1, 100)
    made.requeue(0.4, 1, 100)
    decisions = made.schedule(0.4)
    assert sent(decisions) == [1]
    assert decisions.preempt == ()


def test_a_rank_gets_the_number_of_a_preemption_among_those_of_all_requests():
    made = scheduler("windowed", rank="fcfs_preempted_first", window_tokens=10, workers=[worker(cap=2)])
    for i in range(4):
        made.offer(0.0, request(i))
    assert sent(made.schedule(0.0)) == [0, 1]
    for i in (0, 1):
        made.on_progress(0.1, i, 10)
        assert made.schedule(0.1).preempt == (i,)
    for i in (0, 1):
        made.requeue(0.2, i, 10)
    assert sent(made.schedule(0.2)) == [1, 0], "the last one preempted is first"
    assert [made.entries[i].request.dispatch.dispatch_number for i in (0, 1, 2)] == [4, 3, -1]


def test_a_window_continues_where_no_request_waits():
    made = windowed()
    made.on_progress(0.3, 1, 50)
    assert not made.schedule(0.3)
    made.offer(0.5, request(2, 0.5, predicted=10))
    made.on_progress(0.6, 1, 99)
    assert not made.schedule(0.6)
    made.on_progress(0.7, 1, 100)
    assert made.schedule(0.7).preempt == (1,)


def test_no_more_windows_end_than_requests_wait_at_all_workers_together():
    """One waits; windows are over at two workers: only the longest request leaves, and no other while it is cut."""
    made = scheduler("windowed", workers=[worker("a", cap=2), worker("b", cap=2)])
    for i, predicted in enumerate([300, 900, 600, 700]):
        made.offer(0.0, request(i, predicted=predicted))
    made.schedule(0.0)
    made.offer(0.1, request(7, 0.1, predicted=10))
    for i in range(4):
        made.on_progress(0.5, i, 50)
    assert made.schedule(0.5).preempt == (1,)
    for i in (0, 2, 3):
        made.on_progress(0.6, i, 100)
    assert made.schedule(0.6).preempt == ()


def test_no_more_windows_end_than_requests_wait():
    made = scheduler("windowed", workers=[worker(cap=3)])
    for i, predicted in enumerate([300, 900, 600]):
        made.offer(0.0, request(i, predicted=predicted))
    made.schedule(0.0)
    made.offer(0.1, request(7, 0.1, predicted=10))
    for i in range(3):
        made.on_progress(0.5, i, 50)
    assert made.schedule(0.5).preempt == (1,), "of those whose windows are over the longest leaves"
