"""The gate reserves memory by predicted length: few preemptions, whatever is predicted, and no request lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from plugin_world import Clock, PagedScheduler, request

from lengthwise.gateway.plugin.length_scheduler import OrderedScheduler, QueueOrder
from lengthwise.gateway.plugin.settings import Settings
from lengthwise.policy.reservation import MARGIN_STEP

BLOCKS, BLOCK, SEQS, LIMIT = 33, 4, 6, 100


class Ordered(OrderedScheduler, PagedScheduler):
    """The mixin in front of vLLM's class in the order of bases."""


def engine(*, reserve: bool, rate: float = 0.01, prompt_budget: int = 1 << 20) -> Ordered:
    made = Ordered(SEQS, BLOCKS, BLOCK, prompt_budget)
    settings = Settings(rank="fcfs", preemption="never", reserve=reserve, max_preemption_rate=rate)
    made.lengthwise = QueueOrder(settings, Clock())
    return made


# (predicted tokens, output tokens, prompt tokens): one request alone always fits in the cache.
REQUESTS = st.lists(st.tuples(st.integers(0, 120), st.integers(1, LIMIT), st.integers(1, 20)), min_size=1, max_size=60)
BUDGETS = st.integers(1, 30)
"""Prompt tokens of a step: where prompts take many steps, sequences that are admitted together end far apart."""


def run(made: Ordered, requests: list[tuple[int, int, int]], *, exact_limits: bool = False) -> Ordered:
    for k, (predicted, length, prompt) in enumerate(requests):
        limit = length if exact_limits else LIMIT
        made.add_request(request(f"r{k}", predicted, length=length, prompt=prompt, max_tokens=limit))
    made.run(100_000)
    return made


@given(REQUESTS, st.sampled_from([0.0, 0.01, 0.3]), BUDGETS, st.booleans())
def test_preemptions_stay_within_the_bound_whatever_is_predicted(requests, rate, prompt_budget, exact_limits):
    made = run(engine(reserve=True, rate=rate, prompt_budget=prompt_budget), requests, exact_limits=exact_limits)
    assert sorted(made.finished) == sorted(f"r{k}" for k in range(len(requests)))
    assert made.preemptions <= rate * made.admissions + 1 / MARGIN_STEP + SEQS


@given(REQUESTS)
def test_exact_predictions_cause_no_preemption_where_sequences_decode_in_step(requests):
    assert run(engine(reserve=True), [(length, length, prompt) for _, length, prompt in requests]).preemptions == 0


@given(REQUESTS, BUDGETS, st.booleans())
@example([(0, 76, 12), (0, 44, 14)], 1, True)  # by the peak, one is preempted
def test_at_a_margin_of_one_limits_are_reserved_and_nothing_is_preempted(requests, prompt_budget, exact_limits):
    made = engine(reserve=True, rate=0.0, prompt_budget=prompt_budget)
    made.lengthwise.gate.margin = 1.0
    assert run(made, requests, exact_limits=exact_limits).preemptions == 0


def test_without_the_gate_the_same_requests_are_preempted_and_with_it_they_are_not():
    requests = [(60, 60, 8)] * 24
    assert run(engine(reserve=False), requests).preemptions > 10
    assert run(engine(reserve=True), requests).preemptions == 0


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


def test_preemptions_raise_the_margin_and_admissions_lower_it():
    made = run(engine(reserve=True, rate=0.5), [(1, 90, 8)] * 30)
    assert made.preemptions > 0
    margin = made.lengthwise.gate.margin
    made.lengthwise.gate.on_admitted(4)
    assert made.lengthwise.gate.margin == pytest.approx(max(0.0, margin - 4 * 0.5 * MARGIN_STEP))
    made.lengthwise.gate.on_preempted()
    assert made.lengthwise.gate.margin == pytest.approx(max(0.0, margin - 4 * 0.5 * MARGIN_STEP) + MARGIN_STEP)
