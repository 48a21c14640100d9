"""Of which starts and streams a worker's price is learned: those that show what the engine takes, no others."""

from __future__ import annotations

import pytest
from scheduler_worlds import request, scheduler, worker

from lengthwise.gateway.core.ranking import PREFILL_WEIGHT
from lengthwise.gateway.core.worker import PreemptionCost
from lengthwise.gateway.scheduling import Signals

STEP_S = 0.02


def one_by_one(made, numbers, *, at_once):
    """Requests run alone, one after the other: 1,000 tokens in 20 s, reported as they come or at the end."""
    for number in numbers:
        now_s = 100.0 * number
        one = request(number, now_s)
        one.dispatch.single_chunk = at_once
        made.offer(now_s, one)
        made.schedule(now_s)
        for token in [1000] if at_once else range(1, 1001):
            made.on_progress(now_s + STEP_S * token, number, token)
        made.remove(now_s + 21.0, number)


@pytest.mark.parametrize("complete", [0, 20])
def test_answers_that_come_at_once_make_no_cut_dear(complete):
    """Streams are preempted as if no client had requested a whole answer before them."""
    made = scheduler("isrtf", preemption="worth(factor=1)")
    one_by_one(made, range(complete), at_once=True)
    one_by_one(made, range(20, 30), at_once=False)
    made.offer(5000.0, request(100, 5000.0, predicted=800))
    made.schedule(5000.0)
    made.offer(5001.0, request(101, 5001.0, predicted=100))
    assert made.schedule(5001.0).preempt == (100,)


def test_a_price_is_learned_although_the_first_tokens_came_within_one_tick_of_the_clock():
    price = PreemptionCost()
    for context in range(10, 210, 10):
        price.add_start(context, 0.5)
    price.add_stream(100, 0.0)
    assert price.recompute_steps(200, 4) == 200 * PREFILL_WEIGHT / 4
    for _ in range(3000):
        price.add_stream(1, STEP_S)
    assert price.recompute_steps(200, 1) == pytest.approx((0.5 - STEP_S) / STEP_S, rel=0.05)


def engine_that_queues(mode, *, report):
    """Four at a time, sent at once; it serves one after the other, a prompt token takes 1 ms."""
    made = scheduler(mode, workers=[worker(cap=None)])
    for number in range(0, 80, 4):
        now_s = 10.0 * number
        states = [worker(cap=None, signals=Signals(at_s=now_s, waiting=waiting)) for waiting in report]
        made.update_workers(now_s, states[:1])
        for one in range(number, number + 4):
            made.offer(now_s, request(one, now_s, prompt_tokens=100 + 10 * number))
        made.schedule(now_s)
        made.update_workers(now_s + 0.01, states[1:])
        for one in range(number, number + 4):
            now_s += 0.001 * (100 + 10 * number)
            made.on_progress(now_s, one, 1)
            made.remove(now_s, one)
    (only,) = made.worker_pool
    return only.cost.prompt_token_s()


@pytest.mark.parametrize("mode", ["observe", "engine-priority"])
@pytest.mark.parametrize("report", [(0.0, 3.0), (None, None)])
def test_queueing_in_an_engine_with_its_own_order_does_not_reveal_the_prompt_cost(mode, report):
    """The queue is reported a moment later; or no engine reports it, and only requests that run alone count."""
    found_s = engine_that_queues(mode, report=report)
    assert found_s is None or found_s == pytest.approx(0.001, rel=0.05)


def test_starts_reveal_the_cost_where_no_queue_is_reported():
    assert engine_that_queues("observe", report=(0.0, 0.0)) == pytest.approx(0.0025, rel=0.05)
