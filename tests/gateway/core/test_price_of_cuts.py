"""What a cut costs is learned from the worker itself, and a cut that does not pay is not made."""

from __future__ import annotations

import math

import pytest
from engine_worlds import Costs, mean_s
from scheduler_worlds import request, scheduler, sent, worker

from lengthwise.gateway.core.ranking import PREFILL_WEIGHT
from lengthwise.gateway.core.worker import PreemptionCost
from lengthwise.gateway.request import LengthPrediction

STEP_S = 0.01


def learned(way_s=0.0, prompt_s=0.0, back_s=0.0):
    """Of a worker whose step takes 10 ms: a start its way, its prompt and a step."""
    price = PreemptionCost()
    for context in range(10, 210, 10):
        price.add_start(context, way_s + prompt_s * context + STEP_S)
    for _ in range(200):
        price.add_stream(1, STEP_S)
    if back_s:
        price.add_idle_slot(back_s)
    return price


def test_until_enough_was_seen_a_prompt_token_counts_a_tenth_of_an_output_token():
    price = PreemptionCost()
    assert price.recompute_steps(200, 4) == 200 * PREFILL_WEIGHT / 4
    price.add_start(100, 5.0)
    price.add_stream(1, 0.001)
    assert price.recompute_steps(200, 4) == 200 * PREFILL_WEIGHT / 4


def test_recomputation_is_charged_to_the_batch_and_the_delay_to_one_slot():
    price = learned(way_s=0.03, prompt_s=0.0005, back_s=0.02)
    assert price.recompute_steps(100, 1) == pytest.approx((0.03 + 0.02 + 100 * 0.0005) / STEP_S)
    assert price.recompute_steps(100, 5) == pytest.approx(((0.03 + 0.02) / 5 + 100 * 0.0005) / STEP_S)
    assert learned().recompute_steps(100, 1) == pytest.approx(0.0, abs=1e-9)


def test_a_client_that_takes_its_stream_slowly_makes_no_cut_cheap():
    price = learned(way_s=0.05)
    before = price.recompute_steps(10, 1)
    for _ in range(10):
        price.add_stream(1, 30.0)
    assert price.recompute_steps(10, 1) > 0.8 * before


def test_a_stream_whose_first_tokens_arrive_at_once_does_not_make_restarts_free():
    """Told in one tick of the loop, they are no time apart; what comes later is."""
    price = PreemptionCost()
    for context in range(10, 210, 10):
        price.add_start(context, 0.2)
    price.add_stream(100, 0.0)
    for _ in range(200):
        price.add_stream(1, STEP_S)
    assert price.recompute_steps(100, 1) == pytest.approx((0.2 - STEP_S) / STEP_S, rel=0.05)


def test_the_price_follows_an_engine_that_changes():
    price = learned(way_s=0.01)
    for context in [10, 60, 110, 160] * 100:
        price.add_start(context, 0.2 + STEP_S)
    assert price.recompute_steps(50, 1) == pytest.approx(0.2 / STEP_S, rel=0.05)


def far_engine(way_s):
    """A scheduler that has seen an engine that is so far away serve 30 requests, one after the other."""
    made = scheduler("isrtf", preemption="worth(factor=1)", workers=[worker()])
    for i in range(30):
        now_s = 10.0 * i
        made.offer(now_s, request(i, now_s, prompt_tokens=10 + i))
        assert sent(made.schedule(now_s)) == [i]
        for token in range(1, 11):
            made.on_progress(now_s + way_s + token * STEP_S, i, token)
        made.remove(now_s + way_s + 1.0, i)
    return made


@pytest.mark.parametrize(("way_s", "cut"), [(0.001, (100,)), (2.0, ())])
def test_a_preemption_is_made_where_it_pays_for_the_delay(way_s, cut):
    """300 tokens are saved: 3 s; both who wait are delayed by the way, and so is who was cut."""
    made = far_engine(way_s)
    made.offer(1000.0, request(100, 1000.0, predicted=400))
    made.schedule(1000.0)
    made.offer(1001.0, request(101, 1001.0, predicted=100))
    assert made.schedule(1001.0).preempt == cut


@pytest.mark.parametrize("preemption", ["by_rank", "is_improvement", "worth(factor=0)", "worth(factor=100)"])
def test_with_one_that_waits_and_equal_predictions_nothing_is_cut(preemption):
    """However far the running request is, and although its prediction is updated at every window."""
    made = scheduler("isrtf", preemption=preemption, preemptions_per_s=math.inf)
    made.offer(0.0, request(1, predicted=100))
    made.schedule(0.0)
    made.offer(0.1, request(2, 0.1, predicted=100))
    for token in range(1, 100):
        now_s = 0.1 + 0.1 * token
        made.on_progress(now_s, 1, token)
        if token % 10 == 0:
            made.repredict(now_s, 1, LengthPrediction(100.0, at_tokens=token))
        assert not made.schedule(now_s).preempt


@pytest.mark.parametrize("preemption", ["by_rank", "worth(factor=1)"])
@pytest.mark.parametrize(("max_num_seqs", "cut"), [(1, True), (4, False)])
def test_no_request_is_preempted_where_a_slot_becomes_free_sooner_by_itself(max_num_seqs, cut, preemption):
    """Of four that are to make 100 more one is done after about 25; the one that waits would take 40."""
    made = scheduler("isrtf", preemption=preemption, workers=[worker(cap=max_num_seqs)])
    for i in range(max_num_seqs):
        made.offer(0.0, request(i, predicted=100))
    made.schedule(0.0)
    made.offer(1.0, request(9, 1.0, predicted=40))
    assert bool(made.schedule(1.0).preempt) is cut


NEAR = (
    Costs(step_s=0.006, seq_s=0.001, prompt_s=0.0002, way_s=0.004),
    {"mean_tokens": 25.0, "prompt_tokens": 40, "window_tokens": 5},
)
FAR = (
    Costs(step_s=0.01, seq_s=0.001, prompt_s=0.002, way_s=0.02),
    {"mean_tokens": 60.0, "prompt_tokens": 200, "window_tokens": 20},
)
SEEDS = range(3)


def over_fcfs(engine, load, cap, **order):
    """Mean JCT over that of first come, first served, over some seeds; and all cuts."""
    costs, traffic = engine
    reported = {"costs": costs, "cap": cap, "count": 60, **traffic}
    bare = [mean_s("fcfs", seed, load, **reported)[0] for seed in SEEDS]
    runs = [mean_s("isrtf", seed, load, **reported, **order) for seed in SEEDS]
    return sum(one[0] for one in runs) / sum(bare), sum(one[2] for one in runs)


@pytest.mark.parametrize("load", [0.7, 1.0])
@pytest.mark.parametrize("engine", [NEAR, FAR], ids=["near", "far"])
def test_at_low_load_no_preemption_costs_more_than_first_come_first_served(engine, load):
    """Batches of 4: when every better key took a place, requests took 1.1 times as long near, 3 to 5 times far."""
    assert over_fcfs(engine, load, 4, preemption="by_rank")[0] <= 1.02


@pytest.mark.parametrize(("engine", "cap", "most"), [(NEAR, 4, 0.8), (NEAR, 1, 0.7)])
def test_the_gain_of_a_long_queue_stays(engine, cap, most):
    assert over_fcfs(engine, 3.0, cap)[0] <= most


def test_where_cuts_pay_they_are_made():
    """One slot, long outputs, an engine that computes prompts fast: preemption gains on ordering alone."""
    fast = (
        Costs(step_s=0.01, seq_s=0.0001, prompt_s=0.00001, way_s=0.003),
        {"mean_tokens": 120.0, "prompt_tokens": 100, "window_tokens": 50},
    )
    with_cuts, cuts = over_fcfs(fast, 0.9, 1, preemption="worth(factor=1)", preemptions_per_s=math.inf)
    ordered, none = over_fcfs(fast, 0.9, 1, preemption="never")
    assert cuts > 10 > none == 0
    assert with_cuts < 0.97 * ordered
