"""Who may wait, and who has waited in vain."""

from __future__ import annotations

import math

import pytest
from scheduler_worlds import request, scheduler, sent, worker

from lengthwise.gateway.config import Admission
from lengthwise.gateway.decisions import WorkerState


def full(admission, **facts):
    """One runs, two wait; the worker makes 50 tokens a second."""
    made = scheduler(
        "fcfs", admission=admission, workers=[WorkerState("w", ("m",), in_flight=1, tokens_per_s=50.0)]
    )
    for i in range(3):
        assert made.offer(0.0, request(i, predicted=1000, **facts)) is None
        made.decide(0.0)
    return made


@pytest.mark.parametrize(
    ("admission", "reason"),
    [
        (Admission(max_queued=2), "queue_full"),
        (Admission(max_queued_bytes=250), "queue_bytes"),
        (Admission(max_predicted_wait_s=45.0), "predicted_wait"),
    ],
)
def test_what_is_too_much_is_refused_and_told_when_to_come_again(admission, reason):
    made = full(admission, body_bytes=100)
    refusal = made.offer(1.0, request(9, 1.0, body_bytes=100))
    assert (refusal.status, refusal.reason) == (429, reason)
    assert refusal.retry_after_s == 60.0, "2000 tokens wait and 1000 run at 50 a second"
    made.left(2.0, 0)
    made.decide(2.0)
    assert made.offer(2.0, request(10, 2.0, body_bytes=50)) is None


def test_a_refused_one_leaves_no_trace():
    made = full(Admission(max_queued=2))
    before = made.statistics(1.0)
    made.offer(1.0, request(9, 1.0))
    assert made.statistics(1.0) == before
    assert made.position(9) is None


def test_nobody_is_refused_for_a_wait_while_there_is_room():
    slow = WorkerState("w", ("m",), in_flight=2, tokens_per_s=0.001)
    made = scheduler("fcfs", admission=Admission(max_predicted_wait_s=1.0), workers=[slow])
    for i in range(2):
        assert made.offer(0.0, request(i)) is None
        made.decide(0.0)
    assert made.offer(0.0, request(3)).reason == "predicted_wait"


def test_a_model_that_nobody_serves_is_unknown():
    made = scheduler("fcfs")
    refusal = made.offer(0.0, request(1, model="nonsense"))
    assert (refusal.status, refusal.reason) == (404, "model_not_found")
    assert "nonsense" in refusal.message


def test_before_engines_are_known_any_model_may_wait():
    made = scheduler("fcfs", workers=[])
    assert made.offer(0.0, request(1, model="later")) is None
    made.workers(5.0, [worker(models=("later",))])
    assert sent(made.decide(5.0)) == [1]


def test_a_worker_that_has_not_told_its_models_may_serve_any():
    made = scheduler("fcfs", workers=[worker(models=())])
    assert made.offer(0.0, request(1)) is None


@pytest.mark.parametrize("mode", ["fcfs", "bins"])
def test_who_waits_for_an_engine_in_vain_is_told_so(mode):
    made = scheduler(mode, admission=Admission(no_engine_s=30.0), batch_wait_s=5.0)
    made.workers(10.0, [])
    made.offer(20.0, request(1, 20.0))
    made.offer(25.0, request(2, 25.0))
    times, expired = [], []
    now_s = 25.0
    while math.isfinite(now_s):
        decisions = made.decide(now_s)
        for one, refusal in decisions.expire:
            assert (refusal.status, refusal.reason) == (503, "no_engine")
            assert refusal.retry_after_s
            times.append(now_s)
            expired.append(one)
        now_s = made.next_s(now_s)
    assert expired == [1, 2]
    assert times == pytest.approx([50.0, 55.0], abs=0.2)
    assert made.statistics(60.0).waiting == 0


def test_engines_that_come_back_in_time_serve_who_waited():
    made = scheduler("fcfs", admission=Admission(no_engine_s=30.0))
    made.offer(0.0, request(1))
    made.decide(0.0)
    made.offer(0.0, request(2))
    assert made.workers(100.0, [worker(up=False)]) == ()
    assert not made.decide(129.0).expire
    made.left(129.0, 1)
    made.workers(129.0, [worker()])
    assert sent(made.decide(129.0)) == [2]


def test_only_the_model_without_an_engine_expires():
    made = scheduler("fcfs", workers=[worker("a"), worker("b", models=("x",))])
    made.workers(0.0, [worker("a")])
    for i in range(3):
        made.offer(0.0, request(i))
    made.offer(0.0, request(7, model="x"))
    made.decide(0.0)
    assert [one for one, _ in made.decide(31.0).expire] == [7]


def test_who_waits_beyond_its_own_deadline_expires():
    made = scheduler("fcfs")
    for i in range(3):
        made.offer(0.0, request(i, deadline_s=4.0))
        made.decide(0.0)
    assert made.next_s(0.0) == 4.0
    expired = made.decide(4.0).expire
    assert [one for one, _ in expired] == [1, 2], "who runs is not cut off"
    assert {refusal.reason for _, refusal in expired} == {"deadline"}


def test_a_draining_scheduler_lets_nobody_in_and_serves_who_is():
    made = scheduler("fcfs")
    made.offer(0.0, request(1))
    made.drain()
    refusal = made.offer(0.0, request(2))
    assert (refusal.status, refusal.reason) == (503, "draining")
    assert refusal.retry_after_s > 0
    assert sent(made.decide(0.0)) == [1]


def test_who_gathers_in_bins_counts_for_the_wait_that_is_predicted():
    def refused(models):
        """A newcomer where two gather, 1,000 tokens each, at 50 a second."""
        made = scheduler(
            "bins",
            admission=Admission(max_predicted_wait_s=30.0),
            workers=[WorkerState("w", ("m", "other"), in_flight=4, tokens_per_s=50.0)],
        )
        for i, model in enumerate(models):
            assert made.offer(0.0, request(i, predicted=1000, model=model)) is None
            assert not made.decide(0.0)
        assert made.statistics(0.0).backlog_tokens == 1000 * len(models)
        return made.offer(1.0, request(9, 1.0))

    assert refused(["m", "m"]).retry_after_s == 40.0
    assert refused(["m", "other"]) is None
