"""Who may wait, and who has waited in vain."""

from __future__ import annotations

import itertools
import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_worlds import request, scheduler, sent, worker

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core.dispatch import drain_times_s
from lengthwise.gateway.scheduling import WorkerState


def full(admission, **metadata):
    """One runs, two wait; the worker makes 50 tokens a second."""
    made = scheduler("fcfs", admission=admission, workers=[WorkerState("w", ("m",), concurrency=1, tokens_per_s=50.0)])
    for i in range(3):
        assert made.offer(0.0, request(i, predicted=1000, **metadata)) is None
        made.schedule(0.0)
    return made


@pytest.mark.parametrize(
    ("admission", "reason"),
    [
        (Admission(max_queued=2), "queue_full"),
        (Admission(max_queued_bytes=250), "queue_bytes"),
        (Admission(max_predicted_wait_s=45.0), "predicted_wait"),
    ],
)
def test_excess_requests_are_refused_with_a_retry_time(admission, reason):
    made = full(admission, body_bytes=100)
    refusal = made.offer(1.0, request(9, 1.0, body_bytes=100))
    assert (refusal.status, refusal.reason) == (429, reason)
    assert refusal.retry_after_s == 60.0, "2000 tokens wait and 1000 run at 50 a second"
    made.remove(2.0, 0)
    made.schedule(2.0)
    assert made.offer(2.0, request(10, 2.0, body_bytes=50)) is None


@pytest.mark.parametrize("mode", ["fcfs", "bins"])
def test_a_tenant_may_fill_a_quarter_of_the_queue(mode):
    """Whatever one tenant sends, others still get in; clients without keys are all one tenant, and have no share."""
    made = scheduler(mode, admission=Admission(max_queued=8), workers=[worker(up=False)])
    sent_by = {
        tenant: [made.offer(0.0, request(10 * tenant + i, tenant=tenant)) for i in range(3)] for tenant in (1, 2)
    }
    for first, second, third in sent_by.values():
        assert (first, second) == (None, None)
        assert (third.status, third.reason) == (429, "tenant_queue_full")
    assert [made.offer(0.0, request(30 + i)) for i in range(4)] == [None] * 4
    made.remove(1.0, 10)
    assert made.offer(1.0, request(19, 1.0, tenant=1)) is None
    more = scheduler(mode, admission=Admission(max_queued=8, max_queued_per_tenant=3), workers=[worker(up=False)])
    assert [more.offer(0.0, request(i, tenant=1)) is None for i in range(4)] == [True, True, True, False]


def test_a_refused_one_leaves_no_trace():
    made = full(Admission(max_queued=2))
    before = made.statistics(1.0)
    made.offer(1.0, request(9, 1.0))
    assert made.statistics(1.0) == before
    assert made.position(9) is None


def test_no_request_is_refused_for_its_wait_while_there_is_room():
    slow = WorkerState("w", ("m",), concurrency=2, tokens_per_s=0.001)
    made = scheduler("fcfs", admission=Admission(max_predicted_wait_s=1.0), workers=[slow])
    for i in range(2):
        assert made.offer(0.0, request(i)) is None
        made.schedule(0.0)
    assert made.offer(0.0, request(3)).reason == "predicted_wait"


def test_a_model_that_no_worker_serves_is_unknown():
    made = scheduler("fcfs")
    refusal = made.offer(0.0, request(1, model="nonsense"))
    assert (refusal.status, refusal.reason) == (404, "model_not_found")
    assert "nonsense" in refusal.message


def test_before_engines_are_known_any_model_may_wait():
    made = scheduler("fcfs", workers=[])
    assert made.offer(0.0, request(1, model="after")) is None
    made.update_workers(5.0, [worker(models=("after",))])
    assert sent(made.schedule(5.0)) == [1]


def test_a_worker_that_has_not_reported_its_models_may_serve_any():
    made = scheduler("fcfs", workers=[worker(models=())])
    assert made.offer(0.0, request(1)) is None


@pytest.mark.parametrize("mode", ["fcfs", "bins"])
def test_a_request_that_waits_for_an_engine_in_vain_is_refused(mode):
    made = scheduler(mode, admission=Admission(no_engine_s=30.0), batch_wait_s=5.0)
    made.update_workers(10.0, [])
    made.offer(20.0, request(1, 20.0))
    made.offer(25.0, request(2, 25.0))
    times, expired = [], []
    now_s = 25.0
    while math.isfinite(now_s):
        decisions = made.schedule(now_s)
        for one, refusal in decisions.expire:
            assert (refusal.status, refusal.reason) == (503, "no_engine")
            assert refusal.retry_after_s
            times.append(now_s)
            expired.append(one)
        now_s = made.next_s(now_s)
    assert expired == [1, 2]
    assert times == pytest.approx([50.0, 55.0], abs=0.2)
    assert made.statistics(60.0).waiting == 0


def test_engines_that_return_in_time_serve_waiting_requests():
    made = scheduler("fcfs", admission=Admission(no_engine_s=30.0))
    made.offer(0.0, request(1))
    made.schedule(0.0)
    made.offer(0.0, request(2))
    assert made.update_workers(100.0, [worker(up=False)]) == ()
    assert not made.schedule(129.0).expire
    made.remove(129.0, 1)
    made.update_workers(129.0, [worker()])
    assert sent(made.schedule(129.0)) == [2]


def test_only_the_model_without_an_engine_expires():
    made = scheduler("fcfs", workers=[worker("a"), worker("b", models=("x",))])
    made.update_workers(0.0, [worker("a")])
    for i in range(3):
        made.offer(0.0, request(i))
    made.offer(0.0, request(7, model="x"))
    made.schedule(0.0)
    assert [one for one, _ in made.schedule(31.0).expire] == [7]


def test_a_request_that_waits_beyond_its_deadline_expires():
    made = scheduler("fcfs")
    for i in range(3):
        made.offer(0.0, request(i, deadline_s=4.0))
        made.schedule(0.0)
    assert made.next_s(0.0) == 4.0
    expired = made.schedule(4.0).expire
    assert [one for one, _ in expired] == [1, 2], "who runs is not cut off"
    assert {refusal.reason for _, refusal in expired} == {"deadline"}


def test_requests_that_gather_in_bins_count_toward_the_predicted_wait():
    def refused(models, workers):
        """A newcomer where two gather, 1,000 tokens each, at 50 a second."""
        made = scheduler("bins", admission=Admission(max_predicted_wait_s=30.0), workers=workers)
        for i, model in enumerate(models):
            assert made.offer(0.0, request(i, predicted=1000, model=model)) is None
            assert not made.schedule(0.0)
        assert made.statistics(0.0).backlog_tokens == 1000 * len(models)
        return made.offer(1.0, request(9, 1.0))

    shared = [serving("w", "m", "other", cap=4)]
    assert refused(["m", "m"], shared).retry_after_s == 40.0
    assert refused(["m", "other"], shared).retry_after_s == 40.0
    assert refused(["m", "other"], [serving("w", "m", cap=4), serving("v", "other", cap=4)]) is None


def serving(name, *models, cap=1):
    """A worker of these models at 50 tokens a second."""
    return WorkerState(name, models, concurrency=cap, tokens_per_s=50.0)


def predicted_wait_s(model, waiting, workers):
    """The wait reported to a newcomer under FCFS, behind (model, requests of 100 tokens) beyond the running ones.

    No engine makes a token: the 100 of a running request are still to come.
    """
    made = scheduler("fcfs", workers=workers)
    number = itertools.count()
    for one in workers:
        for _ in range(one.concurrency):
            made.offer(0.0, request(next(number), predicted=100, model=one.models[0], prompt_tokens=0))
            made.schedule(0.0)
    for other, count in waiting:
        for _ in range(count):
            made.offer(0.0, request(next(number), predicted=100, model=other, prompt_tokens=0))
    made.schedule(0.0)
    made.configure(0.0, Order(mode="fcfs"), Admission(max_predicted_wait_s=0.0), Dispatch())
    refused = made.offer(0.0, request(next(number), model=model))
    return 0.0 if refused is None else refused.retry_after_s


@pytest.mark.parametrize(
    ("models", "waiting", "wait_s"),
    [
        ([("m", "x")], [("x", 6)], 14.0),  # behind all of the other's, and the one who runs
        ([("m", "x")], [("m", 2), ("x", 4)], 14.0),
        ([("m",), ("x",)], [("x", 6)], 2.0),  # engines of their own: only who runs at its own
        ([("m",), ("x",)], [("x", 6), ("m", 1)], 4.0),
        ([("m", "x"), ("x",)], [("x", 6)], 8.0),  # half of them go to the engine that is theirs
        ([("m", "x"), ("m",)], [("x", 6)], 1.0),  # it goes around them
        ([("m", "x"), ("x",)], [("m", 2), ("x", 2)], 6.0),  # the other's go around its own
    ],
)
def test_requests_waiting_for_the_same_engines_count_ahead_whatever_their_model(models, waiting, wait_s):
    workers = [serving(f"w{at}", *of) for at, of in enumerate(models)]
    assert predicted_wait_s("m", waiting, workers) == wait_s


@given(
    st.dictionaries(st.sampled_from("abc"), st.floats(0.0, 1e4), min_size=1),
    st.lists(st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.floats(1.0, 1e3)), min_size=1, max_size=5),
)
def test_all_waiting_work_is_done_by_a_worker_that_serves_it(tokens, workers):
    numbers = {model: [at for at, (of, _) in enumerate(workers) if model in of] for model in tokens}
    served = {model: count for model, count in tokens.items() if numbers[model]}
    rates = [rate for _, rate in workers]
    levels_s = drain_times_s(served, numbers, rates)
    assert sum(map(operator.mul, levels_s, rates)) == pytest.approx(sum(served.values()))
    for model, count in served.items():
        isolated_s = count / sum(rates[at] for at in numbers[model])
        assert max(levels_s[at] for at in numbers[model]) >= isolated_s * (1 - 1e-9)
