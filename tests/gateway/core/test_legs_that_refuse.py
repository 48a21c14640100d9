"""Legs that cannot be cut: a cut that was asked for in vain is dropped, and holds up no other one."""

from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import World, request, scheduler, sent, worker
from test_waiting_bound import MAX_WAIT_S, Watched, floods


def two_long_and_a_short_one(**order):
    """One worker with two places, both taken by long ones; a short one waits, and one of them is to be cut."""
    made = scheduler("isrtf", **({"preemption": "by_rank"} | order), workers=[worker(cap=2)])
    for i in range(2):
        made.offer(0.0, request(i, predicted=1000 * (i + 1)))
    made.schedule(0.0)
    made.offer(1.0, request(7, 1.0, predicted=10))
    assert made.schedule(1.0).preempt == (1,)
    return made


def test_another_request_is_preempted_where_the_first_cannot_be():
    made = two_long_and_a_short_one()
    assert not made.schedule(1.5)
    made.mark_nonpreemptible(2.0, 1)
    assert made.next_s(2.0) == 2.0
    assert made.schedule(2.0).preempt == (0,)
    made.requeue(2.1, 0, 3)
    assert sent(made.schedule(2.1)) == [7]


def test_a_refused_preemption_is_not_counted_and_not_repeated_at_that_worker():
    made = two_long_and_a_short_one(max_preemptions=1)
    made.mark_nonpreemptible(2.0, 1)
    made.mark_nonpreemptible(2.0, 0)
    assert not made.schedule(2.0)
    assert made.statistics(2.0).preemptions == 0
    made.on_progress(3.0, 1, 60)
    assert not made.schedule(3.0)
    made.requeue(4.0, 1, 60)  # its engine failed
    assert sent(made.schedule(4.0)) == [7]
    made.remove(5.0, 7)
    assert sent(made.schedule(5.0)) == [1]
    made.offer(6.0, request(8, 6.0, predicted=10))
    made.on_progress(7.0, 1, 200)
    assert made.schedule(7.0).preempt == (1,), "elsewhere it can be cut"


def test_a_cut_in_vain_gives_its_share_of_the_cap_back():
    made = two_long_and_a_short_one(preemptions_per_s=1.0)
    made.mark_nonpreemptible(1.0, 1)
    assert made.schedule(1.02).preempt == (0,)


def test_nothing_happens_to_a_request_that_is_not_at_a_worker():
    made = two_long_and_a_short_one()
    made.mark_nonpreemptible(1.0, 7)
    made.mark_nonpreemptible(1.0, 99)
    made.requeue(1.0, 1, 3)
    made.mark_nonpreemptible(1.0, 1)
    assert sent(made.schedule(1.0)) == [7]


class Refusing(Watched):
    """Some legs cannot be cut. They say so at their start, or a while after they were asked; the others obey late."""

    def __init__(self, *args, seed, late_s, **named):
        super().__init__(*args, **named)
        self.draws, self.late_s = random.Random(seed), late_s
        self.refuses, self.refused, self.requested = {}, set(), {}
        self.finished_first = 0

    def send(self, job, name):
        super().send(job, name)
        self.refuses[job.request.id] = self.draws.random() < 0.5
        if self.refuses[job.request.id] and self.draws.random() < 0.5:
            self.tell(job)

    def tell(self, job):
        self.refused.add((job.request.id, job.visit))
        self.scheduler.mark_nonpreemptible(self.now_s, job.request.id)

    def cut(self, job):
        assert job.worker
        assert (job.request.id, job.visit) not in self.refused, "who cannot be cut there is not asked again"
        self.requested[job.request.id] = job.visit
        self.at(self.now_s + self.late_s * self.draws.random(), "answers", job, job.visit)

    def ends(self, job, visit):
        if job.visit == visit and job.worker and self.is_pending(job):
            self.finished_first += 1
        super().ends(job, visit)

    def answers(self, job, visit):
        if job.visit != visit or not job.worker:
            return
        if self.refuses[job.request.id]:
            self.tell(job)
        else:
            World.cut(self, job)

    def pending(self):
        """Preemptions that are neither done nor refused nor overtaken by the end of their requests."""
        return sum(self.is_pending(self.jobs[one]) for one in self.requested)

    def is_pending(self, job):
        visit = (job.request.id, job.visit)
        return bool(job.worker) and self.requested.get(job.request.id) == job.visit and visit not in self.refused

    def schedule(self):
        super().schedule()
        assert sum(one.num_preempting for one in self.scheduler.worker_pool) == self.pending()
        assert self.scheduler.statistics(self.now_s).preemptions >= sum(
            job.request.dispatch.preemptions for job in self.jobs.values()
        )


@settings(max_examples=30)
@given(
    floods(), st.sampled_from(["isrtf", "windowed"]), st.integers(1, 3), st.integers(0, 99), st.sampled_from([0.0, 0.3])
)
def test_pending_cuts_are_those_that_can_be_answered_and_the_bound_on_waiting_holds(jobs, mode, cap, seed, late_s):
    made = scheduler(
        mode, max_wait_s=MAX_WAIT_S, preemption="by_rank", preemptions_per_s=math.inf, max_preemptions=1000
    )
    world = Refusing(made, jobs, [worker(cap=cap)], seed=seed, late_s=late_s).run()
    assert all(not math.isnan(job.finished_s) for job in world.jobs.values())
    done = sum(job.request.dispatch.preemptions for job in world.jobs.values())
    assert made.statistics(world.now_s).preemptions == done + world.finished_first
