"""The hard bound on waiting, in virtual time, against floods of short requests and any predictions."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import World, request, scheduler, sent, worker

from lengthwise.gateway.core.ranking import State

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
            preemptible=draws.random() < 0.5,
        )
        jobs.append((q, draws.choice([1, 20, 300])))
    return jobs


class Bounded(World):
    """Knows which requests wait, and which are overdue."""

    def waits(self, job):
        q = job.request
        has_arrived = q.arrival_s <= self.now_s and not math.isnan(q.dispatch.enqueued_at_s)
        return has_arrived and not job.worker and math.isnan(job.finished_s)

    def overdue(self, q):
        return q.dispatch.enqueued_at_s + (MAX_WAIT_S - q.dispatch.queued_for_s) <= self.now_s


class Watched(Bounded):
    """Checks which requests are overdue whenever requests are sent."""

    def schedule(self):
        waiting = [j for j in self.jobs.values() if self.waits(j)]
        overdue = {j.request.id for j in waiting if self.overdue(j.request)}
        decided = len(self.log)
        super().schedule()
        for _, decisions in self.log[decided:]:
            order = [one for one in sent(decisions) if one in {j.request.id for j in waiting}]
            late = [one for one in order if one in overdue]
            assert order[: len(late)] == late, "no request that is not overdue passes one that is"
            assert late == sorted(late), "overdue requests go in the order of arrival"
            if set(order) - overdue:
                assert overdue <= set(late), "no other request is sent while an overdue one waits"
            assert not set(decisions.preempt) & {
                j.request.id for j in self.jobs.values() if j.request.dispatch.queued_for_s >= MAX_WAIT_S
            }


class Fair(Bounded):
    """Sees what each tenant has been served when one of its requests is sent."""

    def __init__(self, scheduler, *arguments, **options):
        self.passed, service = set(), scheduler.service
        charge = service.set_charge

        def watched_charge(entry, *tokens):
            if entry.state is State.WAITING:
                self.check(entry.request, service)
            charge(entry, *tokens)

        service.set_charge = watched_charge
        super().__init__(scheduler, *arguments, **options)

    def schedule(self):
        self.passed.clear()
        super().schedule()

    def check(self, q, service):
        late = [one.request for one in self.jobs.values() if self.waits(one) and self.overdue(one.request)]
        late = [one for one in late if one.id not in self.passed]
        own = [one.id for one in late if one.client.tenant == q.client.tenant]
        assert not own or q.id == min(own), "of one tenant overdue requests come first, in order of arrival"
        least = min((service.of(one.client.tenant) for one in late), default=math.inf)
        assert service.of(q.client.tenant) <= least, "only a tenant with less service passes an overdue request"
        self.passed.add(q.id)


@settings(max_examples=30)
@given(floods(), MODES, st.integers(1, 3), st.sampled_from(["none", "vtc"]))
def test_an_overdue_request_is_passed_only_by_overdue_ones(jobs, mode, cap, fairness):
    made = scheduler(mode, max_wait_s=MAX_WAIT_S, fairness=fairness, preemption="by_rank", batch_wait_s=1.0)
    world = (Fair if fairness == "vtc" else Watched)(made, jobs, [worker(cap=cap)]).run()
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
            max_s = MAX_WAIT_S + longest_s * (1 + math.ceil(before / cap))
            assert job.sent_s[0] - q.arrival_s <= max_s + 1e-9


LENGTHS = st.sampled_from([1, 20, 300])
COST_S = 0.01 / 2  # of one unit of service, an output token being two


@settings(max_examples=30)
@given(
    st.lists(LENGTHS, min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from([1, 2]), LENGTHS), min_size=20, max_size=60),
    st.floats(0.0, 5.0),
    st.sampled_from(["srtf", "isrtf", "fcfs"]),
)
def test_with_fairness_a_wait_is_bounded_by_the_tokens_that_the_tenant_requested(own, flood, from_s, mode):
    """Not by what others have queued: each gets as much as the tenant itself, and a request more."""
    jobs = [(request(i, 0.0, predicted=tokens, tenant=tenant), tokens) for i, (tenant, tokens) in enumerate(flood)]
    jobs += [(request(100 + i, from_s, predicted=tokens, tenant=3), tokens) for i, tokens in enumerate(own)]
    made = scheduler(mode, max_wait_s=MAX_WAIT_S, fairness="vtc", preemption="never")
    world = World(made, jobs, [worker()], token_s=0.01).run()
    most = 10 + 2 * 300
    for job in world.jobs.values():
        if job.request.client.tenant == 3:
            before = sum(10 + 2 * tokens for tokens in own)
            served = before + 2 * (before + 2 * most)  # by itself, and by each of two others
            assert job.sent_s[0] - from_s <= MAX_WAIT_S + most * COST_S + served * COST_S + 1e-9


@pytest.mark.parametrize("priorities", [(0, 0), (1, 0), (0, 1)])
def test_a_flood_of_one_tenant_does_not_delay_another(priorities):
    """Its queue is far older than max_wait_s, and of any class."""
    of_flood, of_other = priorities
    jobs = [(request(i, 0.0, predicted=10, tenant=1, priority=of_flood), 10) for i in range(300)]
    jobs.append((request(300, 10.0, predicted=10, tenant=2, priority=of_other), 10))
    made = scheduler("srtf", max_wait_s=MAX_WAIT_S, fairness="vtc")
    other = World(made, jobs, [worker()]).run().jobs[300]
    assert other.started_s - 10.0 <= 0.2 + 1e-9, "after the running one, and one of equal service"


@pytest.mark.parametrize(
    ("rate", "choices", "after_s", "unseen"),
    [
        (None, 1, 9.0, 50),
        (None, 2, 9.0, 100),
        (60.0, 1, 1.0, 50),
        (60.0, 1, 4.0, 80),
        (60.0, 2, 4.0, 120),
        (60.0, 1, 1e6, 400),
    ],
)
@pytest.mark.parametrize("client_gone", [True, False])
def test_a_tenant_whose_client_leaves_pays_for_the_unseen_output(client_gone, rate, choices, after_s, unseen):
    """By the prediction, or by its time at the engine, where two others run, if that is more."""
    made = scheduler("srtf", fairness="vtc", workers=[worker(cap=3, tokens_per_s=rate)])
    made.offer(0.0, one := request(1, predicted=50, tenant=1, choices=choices, max_tokens=400))
    for number in (2, 3):
        made.offer(0.0, request(number, predicted=50, tenant=2))
    assert sorted(sent(made.schedule(0.0))) == [1, 2, 3]
    made.remove(after_s, 1, client_gone=client_gone)
    assert made.service.of(1) == one.prompt_tokens + 2 * unseen * client_gone


def test_a_tenant_whose_client_leaves_pays_for_the_output_that_was_seen_and_none_while_it_waits():
    made = scheduler("srtf", fairness="vtc", workers=[worker(tokens_per_s=60.0)])
    for number in (1, 2):
        made.offer(0.0, request(number, predicted=50 * number, tenant=number))
    assert sent(made.schedule(0.0)) == [1]
    made.on_progress(1.0, 1, 7)
    for number in (1, 2):
        made.remove(9.0, number, client_gone=True)
    assert (made.service.of(1), made.service.of(2)) == (10 + 2 * 7, 0)


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
    made.requeue(8.0, 1, 3)
    made.offer(8.0, request(2, 8.0, predicted=5))
    assert sent(made.schedule(8.0)) == [2]
    made.offer(9.0, request(3, 9.0, predicted=5))
    assert made.next_s(9.0) == 9.0
    made.schedule(9.0)
    assert made.next_s(9.0) == 12.0
    made.remove(12.0, 2)
    assert sent(made.schedule(12.0)) == [1]
    assert long.dispatch.queued_for_s == 10.0


def test_a_request_that_fits_nowhere_yet_reserves_its_worker():
    """Small ones cannot slip past a large one that waits for the cache of a worker, overdue or not."""
    made = scheduler("srtf", max_wait_s=2.0, workers=[worker(cap=4, kv_tokens=1000)])
    made.offer(0.0, request(1, predicted=700))
    assert sent(made.schedule(0.0)) == [1]
    made.offer(0.0, request(2, predicted=600))
    made.schedule(2.0)
    for i in range(3, 9):
        made.offer(2.5, request(i, 2.5, predicted=1, priority=-1))
    assert sent(made.schedule(2.5)) == []
    made.remove(3.0, 1)
    assert sent(made.schedule(3.0))[0] == 2
