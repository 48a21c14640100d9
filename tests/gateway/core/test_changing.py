"""Settings that change while requests wait and run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scheduler_worlds import World, request, scheduler, sent, worker

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.scheduling import Signals, WorkerState
from lengthwise.schema.errors import InputError


def reported(made, now_s, order, admission=None, dispatch=None):
    made.configure(now_s, order, admission or Admission(), dispatch or Dispatch())


def filled(mode, cap=1, **order):
    """One runs, a long one (1) and a short one (2) wait since 0."""
    made = scheduler(mode, workers=[worker(cap=cap)], **order)
    made.offer(0.0, request(0, predicted=50))
    made.schedule(0.0)
    made.offer(0.0, request(1, predicted=500, tenant=1))
    made.offer(0.0, request(2, predicted=5, tenant=2))
    made.schedule(0.0)
    return made


@pytest.mark.parametrize(("max_wait_s", "first"), [(3.0, 1), (30.0, 2)])
def test_a_bound_on_waiting_applies_to_requests_that_already_wait(max_wait_s, first):
    made = filled("srtf", max_wait_s=10.0)
    reported(made, 1.0, Order(mode="srtf", max_wait_s=max_wait_s))
    made.schedule(1.0)
    made.remove(4.0, 0)
    assert sent(made.schedule(4.0)) == [first]


def test_an_overdue_request_is_not_overdue_under_a_longer_bound():
    made = filled("srtf", max_wait_s=2.0)
    made.schedule(3.0)
    assert made.position(1) == 0
    reported(made, 3.0, Order(mode="srtf", max_wait_s=60.0))
    assert (made.position(2), made.position(1)) == (0, 1)
    made.schedule(3.0)
    assert made.next_s(3.0) == 60.0


def test_fairness_begins_with_what_tenants_were_served_before():
    made = scheduler("fcfs", workers=[worker(cap=1)])
    for i, tenant in enumerate([1, 1, 1, 2]):
        made.offer(0.0, request(i, predicted=100, tenant=tenant))
    assert sent(made.schedule(0.0)) == [0]
    reported(made, 0.0, Order(mode="fcfs", fairness="vtc"))
    made.remove(1.0, 0)
    assert sent(made.schedule(1.0)) == [3], "tenant 1 has had one already"
    reported(made, 1.0, Order(mode="fcfs"))
    made.remove(2.0, 3)
    assert sent(made.schedule(2.0)) == [1]


def test_preemptions_are_allowed_and_forbidden_as_configured():
    none = Order(mode="isrtf", preemption="by_rank", preemptions_per_s=0.0)
    made = filled("isrtf", preemption="by_rank", preemptions_per_s=0.0)
    assert made.schedule(1.0).preempt == ()
    reported(made, 1.0, replace(none, preemptions_per_s=10.0))
    assert made.schedule(1.0).preempt == (), "none for the time before"
    assert made.next_s(1.0) == pytest.approx(1.1)
    assert made.schedule(1.11).preempt == (0,)
    other = filled("isrtf", preemption="by_rank", preemptions_per_s=0.0)
    reported(other, 1.0, replace(none, preemptions_per_s=10.0, max_preemptions=0))
    assert [other.schedule(now_s).preempt for now_s in (1.0, 1.5, 2.0)] == [(), (), ()]


def test_telling_rates_again_and_again_makes_no_storm():
    made = scheduler("isrtf", preemption="by_rank", preemptions_per_s=2.0, workers=[worker(cap=40)])
    for i in range(40):
        made.offer(0.0, request(i, predicted=1000))
    made.schedule(0.0)
    for i in range(40, 80):
        made.offer(0.0, request(i, predicted=5))
    cuts = 0
    for step in range(100):
        now_s = 0.1 * step
        reported(made, now_s, Order(mode="isrtf", preemption="by_rank", preemptions_per_s=2.0 + step % 2))
        cuts += len(made.schedule(now_s).preempt)
    assert 2 <= cuts <= 3 + 3 * 10


def test_another_preemption_policy_selects_the_preempted_request():
    made = filled("isrtf", preemption="worth(factor=100)")
    assert made.schedule(1.0).preempt == ()
    reported(made, 1.0, Order(mode="isrtf", preemption="by_rank"))
    assert made.schedule(1.1).preempt == (0,)


def test_requests_in_bins_leave_by_the_new_time():
    made = scheduler("bins", bins=1, batch_wait_s=30.0, workers=[worker(cap=4)])
    made.offer(0.0, request(1))
    made.offer(1.0, request(2, 1.0))
    assert sent(made.schedule(1.0)) == []
    reported(made, 1.0, Order(mode="bins", bins=3, batch_wait_s=2.0))
    made.schedule(1.0)
    assert made.next_s(1.0) == 2.0
    assert sent(made.schedule(2.0)) == [1, 2]


def test_the_latest_timeout_and_queue_limit_apply():
    made = scheduler("fcfs", workers=[])
    made.update_workers(0.0, [worker(up=False)])
    made.offer(0.0, request(1))
    assert made.schedule(0.0).expire == ()
    reported(made, 1.0, Order(mode="fcfs"), Admission(no_engine_s=2.0, max_queued=1))
    assert made.offer(1.0, request(2, 1.0)).reason == "queue_full"
    assert made.schedule(1.0).expire == ()
    assert [one for one, _ in made.schedule(2.5).expire] == [1]


def test_caps_keep_what_they_found_within_new_bounds():
    made = scheduler("fcfs", workers=[WorkerState("w", ("m",), signals=Signals(waiting=0.0, at_s=0.0))])

    def cap():
        return made.statistics(0.0).workers[0].limit

    assert cap() == 8
    reported(made, 0.0, Order(mode="fcfs"), dispatch=Dispatch(start=3))
    assert cap() == 3, "nothing was found yet"
    for i in range(8):
        made.offer(0.0, request(i))
    assert len(sent(made.schedule(0.0))) == 3
    made.update_workers(2.0, [WorkerState("w", ("m",), signals=Signals(waiting=0.0, at_s=2.0))])
    assert cap() == 6
    reported(made, 2.0, Order(mode="fcfs"), dispatch=Dispatch(start=2, max_concurrency=5))
    assert cap() == 5
    reported(made, 2.0, Order(mode="fcfs"), dispatch=Dispatch(start=1, max_concurrency=1))
    made.remove(3.0, 0)
    assert sent(made.schedule(3.0)) == [], "two are there still"
    assert made.statistics(3.0).workers[0].in_flight > cap()


@pytest.mark.parametrize("other", [{"mode": "fcfs"}, {"rank": "hrrn"}, {"preemption": "nonsense"}])
def test_an_unchangeable_setting_is_reported_and_changes_nothing(other):
    made = filled("srtf", max_wait_s=10.0)
    before = [made.position(i) for i in (1, 2)]
    with pytest.raises(InputError, match=next(iter(other))):
        reported(made, 1.0, Order(**{"mode": "srtf", "max_wait_s": 0.5, **other}), Admission(max_queued=1))
    assert [made.position(i) for i in (1, 2)] == before
    assert made.offer(1.0, request(3, 1.0)) is None


def test_all_requests_finish_whatever_settings_change():
    """Bounds, preemptions, fairness and rates change at every fifth decision of a whole run."""
    jobs = [(request(i, 0.05 * i, predicted=1 + 37 * i % 300, tenant=i % 3), 1 + 53 * i % 200) for i in range(120)]
    made = scheduler("isrtf", workers=[worker(cap=4)])
    world, schedule, count = World(made, jobs, [worker(cap=4)]), made.schedule, 0

    def changing(now_s):
        nonlocal count
        count += 1
        if count % 5 == 0:
            order = Order(mode="isrtf", preemption="by_rank" if count % 2 else "never", max_wait_s=count % 7,
                          fairness="vtc" if count % 3 else "none", preemptions_per_s=float(count % 4))  # fmt: skip
            reported(made, now_s, order)
        return schedule(now_s)

    made.schedule = changing
    world.run()
    assert count > 100
    assert all(not math.isnan(job.finished_s) for job in world.jobs.values())
