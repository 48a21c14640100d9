"""The gate reserves memory by predicted length: few preemptions, whatever is predicted, and no request lost."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from plugin_world import Clock, PagedScheduler, Request, request

from lengthwise.gateway.plugin.length_scheduler import OrderedScheduler, QueueOrder
from lengthwise.gateway.plugin.settings import settings_of
from lengthwise.policy.reservation import GAIN, OWN_RULE, STEP

BLOCKS, BLOCK, SEQS, LIMIT = 33, 4, 6, 100


class Ordered(OrderedScheduler, PagedScheduler):
    """The mixin in front of vLLM's class in the order of bases. A step takes 1 s and 0.01 s for each token."""

    clock: Clock

    def schedule(self, *args, **keywords):
        output = super().schedule(*args, **keywords)
        self.clock.now_s += 1.0 + 0.01 * sum(output.num_scheduled_tokens.values())
        return output


def engine(*, reserve: bool, share: float = 0.2, prompt_budget: int = 1 << 20, budget: float = math.inf) -> Ordered:
    made = Ordered(SEQS, BLOCKS, BLOCK, prompt_budget)
    own = {"reserve": True, "max_recompute_share": share, "max_preemptions_per_request": budget} if reserve else {}
    made.clock = Clock()
    settings = settings_of({"lengthwise": {"rank": "fcfs", "preemption": "never", **own}})
    made.lengthwise = QueueOrder(settings, made.clock)
    return made


# (predicted tokens, output tokens, prompt tokens): one request alone always fits in the cache.
REQUESTS = st.lists(st.tuples(st.integers(0, 120), st.integers(1, LIMIT), st.integers(1, 20)), min_size=1, max_size=60)
BUDGETS = st.integers(1, 30)
"""Prompt tokens of a step: where prompts take many steps, sequences that are admitted together end far apart."""


def submit(made: Ordered, requests: list[tuple[int, int, int]], *, exact_limits: bool = False) -> list[Request]:
    sent = [
        request(f"r{k}", predicted, length=length, prompt=prompt, max_tokens=length if exact_limits else LIMIT)
        for k, (predicted, length, prompt) in enumerate(requests)
    ]
    for one in sent:
        made.add_request(one)
    return sent


def run(made: Ordered, requests: list[tuple[int, int, int]], *, exact_limits: bool = False) -> Ordered:
    submit(made, requests, exact_limits=exact_limits)
    made.run(100_000)
    return made


@given(REQUESTS, st.sampled_from([0.0, 0.2, math.inf]), BUDGETS, st.booleans())
def test_every_request_ends_and_at_a_share_of_zero_is_preempted_at_most_twice(requests, share, budget, exact_limits):
    made = engine(reserve=True, share=share, prompt_budget=budget)
    sent = submit(made, requests, exact_limits=exact_limits)
    made.run(100_000)
    assert sorted(made.finished) == sorted(one.request_id for one in sent)
    assert share > 0 or all(one.num_preemptions <= 2 for one in sent)


@given(REQUESTS, BUDGETS)
def test_where_recomputation_costs_nothing_the_rule_is_the_engines_own(requests, prompt_budget):
    runs = [run(engine(reserve=on, share=math.inf, prompt_budget=prompt_budget), requests) for on in (True, False)]
    assert runs[0].finished == runs[1].finished
    assert runs[0].preemptions == runs[1].preemptions


@given(REQUESTS, BUDGETS, st.sampled_from([0.0, 0.25]))
@example([(1, 90, 8)] * 200, 30, 0.0)  # without a budget, 881 preemptions
@example([(1, 90, 8)] * 200, 30, 0.25)
def test_preemptions_stay_within_their_budget_whatever_is_predicted(requests, prompt_budget, budget):
    made = run(engine(reserve=True, share=math.inf, prompt_budget=prompt_budget, budget=budget), requests)
    assert made.preemptions <= budget * len(requests) + (1 - OWN_RULE) / STEP + 2 * SEQS


@given(REQUESTS)
def test_exact_predictions_cause_no_preemption_at_a_share_of_zero_where_sequences_decode_in_step(requests):
    exact = [(length, length, prompt) for _, length, prompt in requests]
    assert run(engine(reserve=True, share=0.0), exact).preemptions == 0


@given(REQUESTS, BUDGETS, st.booleans())
@example([(0, 76, 12), (0, 44, 14)], 1, True)  # by the peak, one is preempted
def test_at_a_margin_of_one_limits_are_reserved_and_nothing_is_preempted(requests, prompt_budget, exact_limits):
    made = engine(reserve=True, share=0.0, prompt_budget=prompt_budget)
    made.lengthwise.gate.margin = made.lengthwise.gate.by_cost = 1.0
    assert run(made, requests, exact_limits=exact_limits).preemptions == 0


def test_without_the_gate_the_same_requests_are_preempted_and_with_it_they_are_not():
    requests = [(60, 60, 8)] * 24
    assert run(engine(reserve=False), requests).preemptions > 10
    assert run(engine(reserve=True, share=0.0), requests).preemptions == 0


def test_as_many_requests_run_at_a_time_as_the_predicted_peak_allows():
    """Each needs 8 + 16 tokens and half a block of rounding: 132 // 27 = 4 of 6 fit beside each other."""
    made = engine(reserve=True)
    for k in range(12):
        made.add_request(request(f"r{k}", 16, length=16, prompt=8, max_tokens=LIMIT))
    assert len(made.schedule()) == 4
    assert len(made.waiting) == 8


def test_a_request_whose_limit_exceeds_the_cache_runs_alone():
    made = engine(reserve=True)
    for k in range(3):
        made.add_request(request(f"r{k}", 5000, length=20, prompt=8, max_tokens=10_000))
    assert made.schedule() == ["r0"]
    assert sorted(made.run()) == ["r0", "r1", "r2"]


def test_preemptions_raise_the_margin_and_idle_memory_lowers_it():
    made = engine(reserve=True)
    submit(made, [(1, 90, 8)] * 30)
    margins, preempted = [made.lengthwise.gate.margin], []
    while made.requests:
        before = made.preemptions
        made.run(1)
        margins.append(made.lengthwise.gate.margin)
        preempted.append(made.preemptions > before)
    changes = [after - before for before, after in pairwise(margins)]
    assert any(preempted)
    assert all(change <= 0 for change, raised in zip(changes, preempted, strict=True) if not raised)
    assert max(margins) > 0 > min(changes)
    assert min(margins) >= OWN_RULE


def test_a_preemption_costs_the_time_that_computing_its_tokens_takes():
    made = engine(reserve=True)
    made.kv_used = 1.0  # no memory is idle
    submit(made, [(0, 60, 20)] * 4)
    made.run(1)
    price_s = (made.clock.now_s - Clock().now_s) / (4 * 20)
    steps = 0
    while not made.preemptions:
        made.run(1)
        steps += 1
    lost = made.waiting[0].num_prompt_tokens + made.waiting[0].num_output_tokens
    tokens_per_s = (4 * 20 + 4 * steps - 1) / (made.clock.now_s - Clock().now_s)
    expected = GAIN * tokens_per_s / ((BLOCKS - 1) * BLOCK) * lost * price_s / 0.2
    assert made.lengthwise.gate.margin == pytest.approx(expected)
