"""Mean sojourn times against textbooks and against simulated queues."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import theory
from lengthwise.schema.errors import InputError
from lengthwise.statistics import mean_estimate

EXPONENTIAL = theory.ExponentialTimes(1.0)
ALWAYS = theory.SampledTimes([2.0])

samples = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(theory.SampledTimes)
loads = st.floats(0.05, 0.97)


def simulated_sojourn_s(sizes, predicted, rate, *, preempt, seed=0):
    """Mean sojourn of one server that goes by predicted (remaining) sizes."""
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(sizes)))
    left, rank = sizes.copy(), predicted.copy()
    waiting, running, now, total, came = [], None, 0.0, 0.0, 0
    while came < len(sizes) or running is not None:
        next_s = arrival[came] if came < len(sizes) else math.inf
        end_s = math.inf if running is None else now + left[running]
        if end_s < next_s:
            total, now = total + end_s - arrival[running], end_s
            running = heapq.heappop(waiting)[1] if waiting else None
            continue
        if running is not None:
            left[running] -= next_s - now
            rank[running] = max(rank[running] - (next_s - now), 0.0)
        now = next_s
        if running is None:
            running = came
        elif preempt and rank[came] < rank[running]:
            heapq.heappush(waiting, (rank[running], running))
            running = came
        else:
            heapq.heappush(waiting, (rank[came], came))
        came += 1
    return total / len(sizes)


def test_pollaczek_khinchine():
    assert theory.fcfs(EXPONENTIAL, 0.8).mean_s == pytest.approx(1 / (1 - 0.8))  # M/M/1
    assert theory.fcfs(ALWAYS, 0.4).wait_s == pytest.approx(0.8 * 2 / (2 * (1 - 0.8)))  # M/D/1
    assert theory.processor_sharing(EXPONENTIAL, 0.8).mean_s == pytest.approx(5.0)


def test_erlang_c():
    assert theory.erlang_c(0.6, 1) == pytest.approx(0.6)
    offered, slots = 8.0, 10
    terms = [offered**i / math.factorial(i) for i in range(slots + 1)]
    last = terms[-1] / (1 - 0.8)
    assert theory.erlang_c(0.8, slots) == pytest.approx(last / (sum(terms[:-1]) + last))
    m_m_10 = 1 + theory.erlang_c(0.8, 10) / (10 - 8)
    assert theory.fcfs(EXPONENTIAL, 8.0, 10).mean_s == pytest.approx(m_m_10)


@pytest.mark.parametrize("times", [EXPONENTIAL, theory.UniformTimes(0.1, 1.9)], ids=repr)
def test_waits_in_slots_are_those_of_a_simulated_queue(times):
    """FCFS with slots is the batch server with batches of one."""
    rate = 0.85 * 8 / times.mean_s
    runs = theory.runs(times, [], 1, rate_rps=rate, servers=8, requests=40_000, seeds=range(3))
    seen = mean_estimate([run.latency_s for run in runs]).value
    assert theory.fcfs(times, rate, 8).mean_s == pytest.approx(seen, rel=0.03)


def test_equal_sizes_leave_nothing_to_order():
    blind = theory.fcfs(ALWAYS, 0.4)
    for order in (theory.sjf, theory.srpt):
        assert order(ALWAYS, 0.4).mean_s == pytest.approx(blind.mean_s)
    assert theory.spjf([2.0, 2.0], [1.0, 9.0], 0.4).mean_s > 0
    assert math.isnan(theory.share_retained(blind, blind, theory.srpt(ALWAYS, 0.4)))


@given(times=samples, load=loads, slots=st.integers(1, 16))
def test_knowing_more_is_never_worse(times, load, slots):
    rate = load * slots / times.mean_s
    blind, waiting, best = (order(times, rate, slots) for order in (theory.fcfs, theory.sjf, theory.srpt))
    assert best.mean_s <= waiting.mean_s * (1 + 1e-9)
    assert waiting.mean_s <= blind.mean_s * (1 + 1e-9)
    assert best.mean_s >= times.mean_s * (1 - 1e-9)
    assert best.slowdown >= 1 - 1e-9


@given(times=samples, load=loads)
def test_perfect_predictions_are_knowledge_and_constant_ones_are_none(times, load):
    rate, sizes = load / times.mean_s, np.asarray(times.values_s)
    assert theory.spjf(sizes, sizes, rate).mean_s == pytest.approx(theory.sjf(times, rate).mean_s)
    assert theory.sprpt(sizes, sizes, rate).mean_s == pytest.approx(theory.srpt(times, rate).mean_s)
    same = np.full(len(sizes), 7.0)
    blind = theory.fcfs(times, rate)
    assert theory.spjf(sizes, same, rate).mean_s == pytest.approx(blind.mean_s)
    assert theory.sprpt(sizes, same, rate).mean_s == pytest.approx(blind.mean_s)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("preempt", [False, True])
def test_simulated_queues_agree(sigma, preempt):
    rng = np.random.default_rng(3)
    sizes = rng.exponential(1.0, 60_000)
    predicted = sizes * np.exp(sigma * rng.standard_normal(60_000))
    order = theory.sprpt if preempt else theory.spjf
    seen = simulated_sojourn_s(sizes, predicted, 0.7, preempt=preempt)
    assert order(*theory.with_error(EXPONENTIAL, sigma, rng), 0.7).mean_s == pytest.approx(seen, rel=0.04)
    assert order(sizes, predicted, 0.7).mean_s == pytest.approx(seen, rel=0.04)


def test_a_reversed_order_is_worse_than_none():
    sizes = theory.with_error(EXPONENTIAL, 0.0, np.random.default_rng(0))[0]
    blind, wrong = theory.fcfs(EXPONENTIAL, 0.8), theory.spjf(sizes, 1 / sizes, 0.8)
    assert wrong.mean_s > blind.mean_s
    assert theory.share_retained(blind, wrong, theory.srpt(EXPONENTIAL, 0.8)) < 0


def test_errors_cost_and_are_reproducible():
    saved = theory.queue_study(EXPONENTIAL, [0.9]).retained[0.9]
    assert saved[0] == pytest.approx(1, abs=1e-3)
    assert (np.diff(saved) < 0).all()
    first, second = (theory.with_error(EXPONENTIAL, 1.0, np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first[0].mean() == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "states"),
    [
        (lambda: theory.fcfs(EXPONENTIAL, 1.0), "between 0 and 1"),
        (lambda: theory.srpt(EXPONENTIAL, -1.0), "between 0 and 1"),
        (lambda: theory.sjf(EXPONENTIAL, math.nan), "between 0 and 1"),
        (lambda: theory.fcfs(EXPONENTIAL, 0.5, 0), "at least 1"),
        (lambda: theory.spjf([1, 2], [1], 0.1), "one length"),
        (lambda: theory.spjf([1, 0], [1, 1], 0.1), "above 0"),
        (lambda: theory.sprpt([1, 2], [1, math.nan], 0.1), "predicted"),
        (lambda: theory.sprpt([1, 2], [1, -1], 0.1), "predicted"),
        (lambda: theory.with_error(EXPONENTIAL, -1, np.random.default_rng()), "sigma"),
    ],
)
def test_bad_input_is_named(call, states):
    with pytest.raises(InputError, match=states):
        call()
