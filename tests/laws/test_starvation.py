"""Laws 19 to 27: who may pass whom, whatever is predicted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from admissions import PREEMPTION_MODES, RANKS, Doorkeeper, misled, observe, served
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from observers import EXAMPLES, INFINITY, LAW, entries, run
from test_kernel_agrees import assert_same, outcome
from worlds import sglang_worlds, trtllm_worlds

from lengthwise.policy import known, named, resolve
from lengthwise.schema.deployment import TrtllmSettings
from lengthwise.schema.records import Status

HALF = settings(LAW, max_examples=max(1, EXAMPLES // 2))
BATCHINGS = [name for name in known("batching") if not name.startswith("vidur")]
BOUNDED = {"rank": RANKS, "preemption": PREEMPTION_MODES, "batching": BATCHINGS, "max_wait_s": [0.0, 0.01, 0.05, 0.3]}
UNBOUNDED = {"max_wait_s": INFINITY, "preemption": PREEMPTION_MODES}


class Bounded(Doorkeeper):
    def passes(self, q, w):
        if w.wait.overdue_at_s(self.s.params.max_wait_s) <= self.now_s:
            assert q.wait.key == -INFINITY, "no request that is not overdue passes one that is"
            assert q.index < w.index, "overdue requests go in the order of arrival"


@LAW
@given(misled(), served(**BOUNDED))
def test_no_request_passes_an_overdue_request(workload, deployment):
    keeper = observe(Bounded, workload, deployment)
    for own in keeper.admitted:
        came_before = {other.index for other in own.passed_by}
        assert all(index < own.index for index in came_before)
        preemptions = sum(index in came_before and now_s >= own.since_s for now_s, index in keeper.preempted)
        assert len(own.passed_by) <= len(came_before) + preemptions


@LAW
@given(misled(), served(**BOUNDED), st.sampled_from(["kernel", "reference"]))
def test_an_overdue_wait_ends_when_earlier_requests_have_finished(workload, deployment, engine):
    """After ``max_wait_s`` only those who ran or had come before keep a request waiting."""
    assume(deployment.limits.timeout_s == INFINITY)
    records = run(workload, deployment, engine=engine)
    r = records.requests
    overdue_s = np.maximum(r.arrival_s + deployment.scheduler.max_wait_s, entries(deployment, records))
    central = deployment.scheduler.router == "central"
    for i in np.flatnonzero(r.scheduled_s > overdue_s):
        own = (r.replica >= 0) if central else (r.replica == r.replica[i])
        came_before = np.arange(len(r.arrival_s)) < i
        between = own & (r.scheduled_s > overdue_s[i]) & (r.scheduled_s < r.scheduled_s[i])
        assert came_before[between].all()
        ran = (r.scheduled_s <= overdue_s[i]) | came_before
        ends_s = r.finished_s[own & ran & (r.finished_s > overdue_s[i])]
        assert r.scheduled_s[i] <= max(ends_s)


def near(a, b):
    """``b`` with room for rounding at the size of both."""
    return b + 1e-9 * (1 + abs(a) + abs(b))


class Aged(Doorkeeper):
    weight = 30.0

    def size(self, q):
        return self.remaining(q)

    def passes(self, q, w):
        later_s = q.arrival_s - w.arrival_s
        most = (self.size(w) - self.size(q)) / self.weight
        slack = 1e-9 * (1 + self.size(w) + self.size(q))
        assert later_s <= most + slack
        if q.index > w.index:
            assert self.size(q) <= self.size(w) + self.weight * slack


class AgedGittins(Aged):
    weight = 5.0

    def size(self, q):
        return self.index_of(q)


@HALF
@given(misled(), served(rank="aged(weight=30)", **UNBOUNDED))
def test_aged_is_passed_only_by_requests_that_arrive_soon_after(workload, deployment):
    observe(Aged, workload, deployment)


@HALF
@given(misled(), served(rank="aged_gittins(weight=5)", **UNBOUNDED))
def test_aged_gittins_is_passed_only_by_requests_that_arrive_soon_after(workload, deployment):
    observe(AgedGittins, workload, deployment)


class ResponseRatio(Doorkeeper):
    def passes(self, q, w):
        queued_for_s = w.wait.total_s(self.now_s)
        needed_s = queued_for_s * self.remaining(q) / self.remaining(w)
        assert needed_s <= near(needed_s, q.wait.before_s)
        if (
            q.wait.last_preemption == w.wait.last_preemption == 0
            and q.index > w.index
            and self.remaining(q) > self.remaining(w)
        ):
            assert queued_for_s <= near(0, q.wait.before_s)


@HALF
@given(misled(), served(rank="hrrn", **UNBOUNDED))
def test_response_ratio_is_passed_only_by_requests_that_have_waited_too(workload, deployment):
    observe(ResponseRatio, workload, deployment)


class Levels(Doorkeeper):
    def level(self, q):
        joined = sum(0.05 * q.prompt > 4 * 2**level for level in range(2))
        had = sum(q.generated >= 4 * (2 ** (level + 1) - 1) for level in range(2))
        return max(joined, had)

    def passes(self, q, w):
        assert self.level(q) <= self.level(w)
        if self.level(q) == self.level(w):
            assert q.arrival_s <= w.arrival_s


@HALF
@given(misled(), served(rank="mlfq(quantum=4, levels=3)", **UNBOUNDED))
def test_levels_go_in_turn_and_in_order_of_arrival(workload, deployment):
    observe(Levels, workload, deployment)


class Arrival(Doorkeeper):
    def passes(self, q, w):
        assert q.index < w.index


class ArrivalInClass(Doorkeeper):
    def passes(self, q, w):
        own, other = (self.s.columns.priority[one.index] for one in (q, w))
        assert own <= other
        assert own < other or q.arrival_s <= near(1e6, w.arrival_s)


class PreemptedFirst(Doorkeeper):
    def passes(self, q, w):
        assert q.wait.last_preemption > 0 or w.wait.last_preemption == 0
        assert q.wait.last_preemption > 0 or q.index < w.index


class Batches(Doorkeeper):
    def passes(self, q, w):
        assert (q.wait.bin_batch, q.index) < (w.wait.bin_batch, w.index)


@pytest.mark.slow
@HALF
@given(
    misled(),
    served(**UNBOUNDED),
    st.sampled_from(
        [
            ("fcfs", Arrival),
            ("queue_order", Arrival),
            ("priority", ArrivalInClass),
            ("fcfs_preempted_first", PreemptedFirst),
            ("completed_batches", Batches),
        ]
    ),
)
def test_arrival_orders_let_no_request_overtake(workload, deployment, chosen):
    rank, kind = chosen
    scheduler = dataclasses.replace(deployment.scheduler, rank=rank)
    observe(kind, workload, dataclasses.replace(deployment, scheduler=scheduler))


class FairShare(Doorkeeper):
    """Tenants with requests in one queue that were never admitted: what they are charged, and how far apart."""

    def __init__(self, setup):
        super().__init__(setup)
        self.difference = 0.0
        self.running = set()
        self.max_running = 0

    def _place(self, rep, step, q, chunk):
        super()._place(rep, step, q, chunk)
        self.running.add(q.index)
        self.max_running = max(self.max_running, len(self.running))
        self.poll(rep.queue)

    def _end_request(self, rep, q, status, now):
        super()._end_request(rep, q, status, now)
        self.running.discard(q.index)
        self.poll(rep.queue)

    def poll(self, queue):
        charged = [self.service[self.s.tenant(q.index)] for q in queue.waiting if q.admission.number < 0]
        if charged:
            self.difference = max(self.difference, max(charged) - min(charged))


@HALF
@given(misled(), served(rank="vtc", router="central", binning=None, **UNBOUNDED))
def test_tenants_that_wait_are_charged_alike(workload, deployment):
    charged_alike(workload, deployment)


def charged_alike(workload, deployment):
    workload = dataclasses.replace(workload, tenant=np.arange(len(workload)) % 3)
    keeper = observe(FairShare, workload, deployment)
    prompt, predicted = workload.prompt_tokens, workload.predicted_tokens
    produced = keeper.results["output_tokens"]
    came = keeper.results["status"] != Status.REJECTED
    largest = (prompt + 2 * np.maximum(predicted, produced))[came].max(initial=0)
    wrong_by = np.abs(predicted - produced)[came].max(initial=0)
    most = largest + 4 * wrong_by * keeper.max_running
    assert keeper.difference <= most * (1 + 1e-9)


class Binned(Doorkeeper):
    def __init__(self, setup):
        super().__init__(setup)
        self.entered_s = {}

    def _add_to_bin_or_queue(self, queue, q, now):
        self.entered_s[q.index] = now
        super()._add_to_bin_or_queue(queue, q, now)

    def _complete_bin(self, queue, number, now):
        for q in queue.bins[number]:
            deadline_s = max(q.arrival_s + self.s.params.bin_wait_s, self.entered_s[q.index])
            assert now <= deadline_s, "no bin keeps a request longer than batch_wait_s"
        assert len(queue.bins[number]) <= self.s.params.max_num_seqs
        super()._complete_bin(queue, number, now)


@HALF
@given(misled(), served(binning=["one", "bins(boundaries=[5.0, 50.0])"], batch_wait_s=[0.0, 0.01, 0.1, INFINITY]))
def test_no_bin_delays_a_request_too_long(workload, deployment):
    keeper = observe(Binned, workload, deployment)
    assert not any(waiting for queue in keeper.queues for waiting in queue.bins)


class BinnedBatches(Binned, Batches):
    """Both bounds of Multi-Bin."""


class Entered(Doorkeeper):
    """By SGLang's rules a request enters the queue when it arrives, and at its end when it was retracted."""

    def __init__(self, setup):
        super().__init__(setup)
        self.entries = {}

    def _enqueue(self, queue, q, now):
        self.entries.pop(q.index, None)
        self.entries[q.index] = None
        super()._enqueue(queue, q, now)

    def passes(self, q, w):
        assert q is not w
        assert next(i for i in self.entries if i in (q.index, w.index)) == q.index


class OverdueEntered(Entered):
    """By SGLang's rules overdue requests go in the order of entry: a retracted one is behind those that came later."""

    def passes(self, q, w):
        if w.wait.overdue_at_s(self.s.params.max_wait_s) <= self.now_s:
            assert q.wait.key == -INFINITY, "no request that is not overdue passes one that is"
            super().passes(q, w)


@HALF
@given(sglang_worlds(), st.sampled_from(RANKS), st.sampled_from([0.001, 0.01, 0.05, INFINITY]))
def test_by_sglangs_rules_no_request_passes_an_overdue_one_or_without_a_rank_an_earlier_one(world, rank, max_wait_s):
    workload, deployment = world[0].without_dependencies(), world[1]
    by_entry = dataclasses.replace(deployment.scheduler.sglang, schedule_policy="fcfs")
    for kind, by in ((OverdueEntered, rank), (Entered, "queue_order")):
        scheduler = dataclasses.replace(deployment.scheduler, rank=by, max_wait_s=max_wait_s, sglang=by_entry)
        if kind is OverdueEntered or max_wait_s == INFINITY:
            observe(kind, workload, dataclasses.replace(deployment, scheduler=scheduler))


@HALF
@given(trtllm_worlds(), st.sampled_from(RANKS), st.sampled_from([0.001, 0.01, 0.05, INFINITY]))
def test_by_trtllms_rules_no_complete_prompt_passes_an_overdue_one_or_by_fcfs_an_earlier_one(world, rank, max_wait_s):
    workload, deployment = world[0].without_dependencies(), world[1]
    complete = TrtllmSettings(deployment.scheduler.trtllm.capacity_scheduler_policy)
    for kind, by in ((Bounded, rank), (Arrival, "fcfs")):
        scheduler = dataclasses.replace(deployment.scheduler, rank=by, max_wait_s=max_wait_s, trtllm=complete)
        if kind is Bounded or max_wait_s == INFINITY:
            observe(kind, workload, dataclasses.replace(deployment, scheduler=scheduler))


OWN_BOUND = {
    "fcfs": Arrival,
    "queue_order": Arrival,
    "fcfs_preempted_first": PreemptedFirst,
    "hrrn": ResponseRatio,
    "completed_batches": BinnedBatches,
}
SHORTER = 1 / 6000
"""The worlds here last for seconds: 300 s become 50 ms (time has no scale, law 15)."""
OWN = sorted(name for name, one in named().items() if not name.startswith("vidur") and not one.engine_rules)


@pytest.mark.parametrize("name", sorted(named()))
def test_every_named_scheduler_has_a_bound_out_of_the_box(name):
    chosen = named()[name]
    own = resolve("rank", chosen.rank).starvation
    assert chosen.max_wait_s == 300 or (own and chosen.rank in {*OWN_BOUND, "vtc"})
    assert chosen.binning is None or chosen.batch_wait_s == 30


@HALF
@given(misled(), served(router="central"), st.sampled_from(OWN))
def test_the_bound_of_every_named_scheduler_holds(workload, deployment, name):
    """Its longest wait where it brings one along, else that of its rank (vtc: for one queue of tenants)."""
    chosen = named()[name]
    waits = {"max_wait_s": chosen.max_wait_s * SHORTER, "batch_wait_s": chosen.batch_wait_s * SHORTER}
    scheduler = dataclasses.replace(chosen, router="central", **waits)
    deployment = dataclasses.replace(deployment, scheduler=scheduler)
    if chosen.max_wait_s < INFINITY:
        observe(Bounded, workload, deployment)
    elif chosen.rank == "vtc":
        charged_alike(workload, deployment)
    else:
        observe(OWN_BOUND[chosen.rank], workload, deployment)


class Windows(Doorkeeper):
    def _launch(self, rep, step):
        assert rep.steps_since_admit < 50 + self.s.params.pp - 1
        super()._launch(rep, step)


@HALF
@given(misled(), served(**BOUNDED | {"batching": "windowed"}))
def test_a_window_ends_after_fifty_steps(workload, deployment):
    observe(Windows, workload, deployment)


class Slots(Doorkeeper):
    """By rank: no request with a token keeps a slot from one that ranks better, once preemptions were looked for."""

    def _preempt_for_waiting(self, rep, step):
        super()._preempt_for_waiting(rep, step)
        if not rep.queue.waiting or rep.check_preemption or rep.steps_since_check:
            return
        best = rep.queue.first
        worse = [q for q in rep.idle if q.generated > q.admission.generated and self._rank_key(q) > best.wait.key]
        max_num_seqs, free = self.s.params.max_num_seqs - len(rep.running), rep.pool.free
        if not self.enters(best, free, max_num_seqs):
            freed = sum(q.blocks - rep.pool.in_use(q.cached, 2) for q in worse)
            assert not self.enters(best, free + freed, max_num_seqs + len(worse))

    def enters(self, q, free, max_num_seqs):
        return max_num_seqs > 0 and self._blocks_if_free(q, free, max_num_seqs) >= 0


@HALF
@given(misled(), served(rank=RANKS, preemption="by_rank", max_wait_s=[INFINITY, 0.05]))
def test_by_rank_leaves_no_slot_to_a_worse_ranked_request(workload, deployment):
    observe(Slots, workload, deployment)


@HALF
@given(misled(), served())
def test_kernel_and_reference_agree_when_misled(workload, deployment):
    """Law 1, where predictions are huge, zero, reversed or constant."""
    assert_same(*(outcome(engine, workload, deployment) for engine in ("kernel", "reference")))
