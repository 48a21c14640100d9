"""The hard bound on waiting, in virtual time, against floods of short requests and any predictions."""

from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import World, request, scheduler, sent, worker

MAX_WAIT_S = 3.0
PREDICTIONS = [0.0, 1.0, 5.0, 100.0, 1e6, math.inf]
MODES = st.sampled_from(["srtf", "isrtf", "windowed", "bins", "fcfs"])


@st.composite
def floods(draw):
    """Jobs of several classes at far more than the workers can do, predicted anyhow."""
    draws = random.Random(draw(st.integers(0, 1 << 30)))
    gap_s = draw(st.sampled_from([0.0, 0.02, 0.2]))
    jobs, now_s = [], 0.0
    for number in range(draw(st.integers(10, 40))):
        now_s += gap_s * draws.randrange(3)
        q = request(
            number,
            now_s,
            predicted=draws.choice(PREDICTIONS),
            priority=draws.choice([0, 0, 0, 1, -1]),
            tenant=draws.randrange(3),
            resumable=draws.random() < 0.5,
        )
        jobs.append((q, draws.choice([1, 20, 300])))
    return jobs


class Watched(World):
    """Notes who was overdue when somebody was sent."""

    def schedule(self):
        waiting = [j for j in self.jobs.values() if self.waits(j)]
        overdue = {j.request.id for j in waiting if self.overdue(j.request)}
        decided = len(self.log)
        super().schedule()
        for _, decisions in self.log[decided:]:
            order = [one for one in sent(decisions) if one in {j.request.id for j in waiting}]
            late = [one for one in order if one in overdue]
            assert order[: len(late)] == late, "nobody who is not overdue passes somebody who is"
            assert late == sorted(late), "overdue requests go in the order of arrival"
            if set(order) - overdue:
                assert overdue <= set(late), "nobody is sent while somebody overdue waits"
            assert not set(decisions.preempt) & {
                j.request.id for j in self.jobs.values() if j.request.dispatch.queued_for_s >= MAX_WAIT_S
            }

    def waits(self, job):
        q = job.request
        has_arrived = q.arrival_s <= self.now_s and not math.isnan(q.dispatch.queued_s)
        return has_arrived and not job.worker and math.isnan(job.finished_s)

    def overdue(self, q):
        return q.dispatch.queued_s + (MAX_WAIT_S - q.dispatch.queued_for_s) <= self.now_s


@settings(max_examples=30)
@given(floods(), MODES, st.integers(1, 3), st.sampled_from(["none", "vtc"]))
def test_who_has_waited_too_long_is_passed_by_nobody_who_has_not(jobs, mode, cap, fairness):
    made = scheduler(mode, max_wait_s=MAX_WAIT_S, fairness=fairness, preemption="by_rank", batch_wait_s=1.0)
    world = Watched(made, jobs, [worker(cap=cap)]).run()
    assert all(not math.isnan(job.finished_s) for job in world.jobs.values()), "everybody ends"


@settings(max_examples=40)
@given(floods(), st.sampled_from(["srtf", "isrtf"]), st.integers(1, 2))
def test_a_wait_is_bounded_by_those_overdue_before(jobs, mode, cap):
    """max_wait_s, and the time in which the worker ends those in flight and those overdue before it."""
    made = scheduler(mode, max_wait_s=MAX_WAIT_S, preemption="by_rank")
    world = World(made, jobs, [worker(cap=cap)], token_s=0.01).run()
    for job in world.jobs.values():
        q = job.request
        if len(job.sent_s) == 1:
            before = sum(1 for other in world.jobs.values() if other.request.id < q.id)
            longest_s = 300 * 0.01
            most_s = MAX_WAIT_S + longest_s * (1 + math.ceil(before / cap))
            assert job.sent_s[0] - q.arrival_s <= most_s + 1e-9


def test_without_the_bound_a_long_one_would_starve():
    """The flood that the bound is for: short ones, each before the long one, for a minute."""

    def wait_s(max_wait_s):
        jobs = [(request(0, 0.0, predicted=10), 10), (request(1, 0.0, predicted=5000), 100)]
        jobs += [(request(i, 0.095 * (i - 1), predicted=10), 10) for i in range(2, 600)]
        made = scheduler("srtf", max_wait_s=max_wait_s)
        return World(made, jobs, [worker()]).run().jobs[1].started_s

    assert wait_s(math.inf) > 50
    assert wait_s(3.0) <= 3.0 + 0.1


def test_a_wait_is_summed_over_all_stays():
    made = scheduler("srtf", max_wait_s=10.0)
    made.offer(0.0, long := request(1, predicted=500))
    assert sent(made.schedule(6.0)) == [1]
    made.returned(8.0, 1, 3)
    made.offer(8.0, request(2, 8.0, predicted=5))
    assert sent(made.schedule(8.0)) == [2]
    made.offer(9.0, request(3, 9.0, predicted=5))
    assert made.next_s(9.0) == 9.0
    made.schedule(9.0)
    assert made.next_s(9.0) == 12.0
    made.left(12.0, 2)
    assert sent(made.schedule(12.0)) == [1]
    assert long.dispatch.queued_for_s == 10.0


def test_one_that_fits_nowhere_yet_keeps_its_worker_for_itself():
    """Small ones cannot slip past a large one that waits for the cache of a worker, overdue or not."""
    made = scheduler("srtf", max_wait_s=2.0, workers=[worker(cap=4, kv_tokens=1000)])
    made.offer(0.0, request(1, predicted=700))
    assert sent(made.schedule(0.0)) == [1]
    made.offer(0.0, request(2, predicted=600))
    made.schedule(2.0)
    for i in range(3, 9):
        made.offer(2.5, request(i, 2.5, predicted=1, priority=-1))
    assert sent(made.schedule(2.5)) == []
    made.left(3.0, 1)
    assert sent(made.schedule(3.0))[0] == 2
