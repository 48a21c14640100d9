"""Formulas of Multi-Bin Batching against closed forms, Monte Carlo, and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise import theory
from lengthwise.schema.errors import InputError

UNIFORM = theory.UniformTimes(1.0, 20.0)
EXPONENTIAL = theory.ExponentialTimes(0.5)

samples = st.lists(st.integers(1, 40), min_size=1, max_size=40).map(theory.SampledTimes)
batches = st.integers(1, 12)
counts = st.integers(1, 8)


def monte_carlo_batch_s(times, cuts, batch, confusion=None, n=400_000):
    """E[T_k] by drawing: mean of maxima, bin by bin."""
    rng = np.random.default_rng(0)
    drawn = times.quantile(rng.random(n))
    put = theory.bin_of(drawn, cuts)
    put = put if confusion is None else theory.confuse(put, confusion, rng.random(n))
    total = 0.0
    for b in range(len(cuts) + 1):
        members = drawn[put == b]
        complete = members[: len(members) // batch * batch].reshape(-1, batch)
        total += len(members) / n * (complete.max(axis=1).mean() if len(complete) else 0.0)
    return total


@pytest.mark.parametrize("bins", [1, 2, 5, 64])
@pytest.mark.parametrize("batch", [1, 8, 128])
def test_theorem_4_2_is_the_general_formula_at_the_best_boundaries(batch, bins):
    cuts = theory.uniform_optimal(UNIFORM, bins)
    exact = theory.uniform_batch_s(UNIFORM, batch, bins)
    assert theory.expected_batch_s(UNIFORM, cuts, batch) == pytest.approx(exact, rel=1e-12)
    assert exact == pytest.approx(10.5 + 19 / (2 * bins) * (batch - 1) / (batch + 1))
    assert theory.uniform_throughput_rps(UNIFORM, batch, bins) == pytest.approx(batch / exact)


@pytest.mark.parametrize("times", [UNIFORM, EXPONENTIAL, theory.SampledTimes([1, 2, 2, 3, 8, 9, 30])], ids=repr)
@pytest.mark.parametrize("wrong", [None, theory.neighbours(3, 0.2, 0.1)], ids=["right", "wrong"])
def test_expected_batch_times_are_those_that_are_drawn(times, wrong):
    cuts = times.quantile([0.3, 0.7])
    drawn = monte_carlo_batch_s(times, cuts, 6, wrong)
    assert theory.expected_batch_s(times, cuts, 6, wrong) == pytest.approx(drawn, rel=0.01)


def test_lemma_4_1_no_other_boundaries_are_better():
    best = theory.uniform_batch_s(UNIFORM, 8, 3)
    rng = np.random.default_rng(0)
    for cuts in np.sort(rng.uniform(1, 20, (50, 2))):
        assert theory.expected_batch_s(UNIFORM, cuts, 8) >= best - 1e-12


def test_throughput_grows_with_bins_towards_the_capacity():
    reached = [theory.uniform_throughput_rps(UNIFORM, 8, k) for k in (1, 2, 4, 64, 10**6)]
    assert reached == sorted(reached)
    assert theory.capacity_rps(UNIFORM, 8) == 8 / 10.5
    assert reached[-1] == pytest.approx(8 / 10.5, rel=1e-5)


@given(share=st.floats(0.3, 0.9999), batch=st.integers(2, 200))
def test_theorem_4_3_is_the_smallest_number_of_bins(share, batch):
    target = share * theory.capacity_rps(UNIFORM, batch)
    needed = theory.uniform_bins_for(UNIFORM, batch, target)
    assert theory.uniform_throughput_rps(UNIFORM, batch, needed) >= target * (1 - 1e-9)
    if needed > 1:
        assert theory.uniform_throughput_rps(UNIFORM, batch, needed - 1) < target * (1 + 1e-9)
    found = theory.bins_for(UNIFORM, batch, target, lambda k: theory.uniform_optimal(UNIFORM, k))
    assert found is None or found == needed


def test_lemma_5_1():
    cuts = theory.uniform_optimal(UNIFORM, 4)
    expected = 4 * 7 / (2 * 0.3) + theory.uniform_batch_s(UNIFORM, 8, 4)
    assert theory.latency_s(UNIFORM, cuts, 8, 0.3) == pytest.approx(expected)


@pytest.mark.parametrize("bins", [2, 5, 30])
@pytest.mark.parametrize("batch", [2, 8, 64])
def test_appendix_a_4(batch, bins):
    cuts = theory.exponential_recursion(EXPONENTIAL, batch, bins)
    bound = theory.exponential_bound_s(EXPONENTIAL, cuts, batch)
    assert bound == pytest.approx(theory.exponential_least_bound_s(EXPONENTIAL, batch, bins), rel=1e-12)
    assert theory.expected_batch_s(EXPONENTIAL, cuts, batch) <= bound
    rng = np.random.default_rng(1)
    for _ in range(30):
        other = np.sort(cuts * rng.uniform(0.7, 1.4, len(cuts)))
        assert theory.exponential_bound_s(EXPONENTIAL, other, batch) >= bound - 1e-12
    steps = theory.exponential_steps(batch, bins)
    harmonic = sum(1 / i for i in range(1, batch + 1))
    assert steps[-1] == pytest.approx(math.log(harmonic))
    np.testing.assert_allclose(steps[:-1], np.log1p(steps[1:]))


def test_the_exponential_case_in_one_bin_is_a_harmonic_number():
    assert theory.expected_batch_s(EXPONENTIAL, [], 4) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 0.5)
    assert theory.exponential_least_bound_s(EXPONENTIAL, 4, 1) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 0.5)


@given(batch=st.integers(1, 200), width=st.floats(1e-4, 60))
@example(batch=170, width=5.0)
@example(batch=5000, width=13.0)
def test_the_cut_off_exponential_lies_within_its_bin(batch, width):
    inside = EXPONENTIAL.expected_max_s([3.0, 3.0 + width], [0, 1, 0], batch)
    assert 3.0 < inside < 3.0 + width
    cells = 3 + np.linspace(0, width, 20_001)
    member = np.expm1(-0.5 * (cells - 3)) / np.expm1(-0.5 * width)
    assert inside == pytest.approx(3 + np.trapezoid(1 - member**batch, cells), rel=1e-4)


@given(times=samples, batch=batches, bins=counts)
def test_learned_boundaries_are_the_best_of_all(times, batch, bins):
    own = theory.expected_batch_s(times, theory.learned(times, batch, bins), batch)
    even = theory.expected_batch_s(times, theory.equal_mass(times, bins), batch)
    assert own <= even * (1 + 1e-12)
    values = np.unique(times.quantile(np.linspace(0.001, 1, 200)))
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = np.sort(rng.choice(values, bins - 1))
        assert own <= theory.expected_batch_s(times, other, batch) * (1 + 1e-9)


def test_learned_boundaries_find_the_proven_ones():
    np.testing.assert_allclose(theory.learned(UNIFORM, 8, 4), theory.uniform_optimal(UNIFORM, 4), atol=0.02)
    learned = theory.expected_batch_s(EXPONENTIAL, theory.learned(EXPONENTIAL, 8, 8), 8)
    recursion = theory.expected_batch_s(EXPONENTIAL, theory.exponential_recursion(EXPONENTIAL, 8, 8), 8)
    assert learned < recursion < theory.expected_batch_s(EXPONENTIAL, theory.equal_mass(EXPONENTIAL, 8), 8)


@given(times=samples, batch=batches, bins=counts, p=st.floats(0, 0.5))
def test_wrong_bins_cost_and_bins_never_hurt(times, batch, bins, p):
    cuts = theory.equal_mass(times, bins)
    right = theory.expected_batch_s(times, cuts, batch)
    wrong = theory.expected_batch_s(times, cuts, batch, theory.neighbours(bins, p))
    one = theory.expected_batch_s(times, [], batch)
    assert times.mean_s * (1 - 1e-9) <= right <= one * (1 + 1e-9)
    assert times.mean_s * (1 - 1e-9) <= wrong <= one * (1 + 1e-9)


def test_figure_1b():
    """Times 1, 5, 2, 6 and batches of two: 11 s as they come, 8 s with a bin for 1 to 3 s and one for 4 to 6."""
    times = [1.0, 5.0, 2.0, 6.0]
    together = theory.serve(np.zeros(4), times, [0] * 4, batch=2, num_bins=1)
    separate = theory.serve(np.zeros(4), times, theory.bin_of(times, [3.0]), batch=2, num_bins=2)
    assert together.end_s.max() == 11
    assert separate.end_s.max() == 8


@pytest.mark.parametrize(
    ("call", "states"),
    [
        (lambda: theory.UniformTimes(5, 5), "low < high"),
        (lambda: theory.UniformTimes(9, 5), "low < high"),
        (lambda: theory.UniformTimes(math.nan, 5), "low < high"),
        (lambda: theory.UniformTimes(-1, 5), "low < high"),
        (lambda: theory.ExponentialTimes(0), "above 0"),
        (lambda: theory.ExponentialTimes(math.nan), "above 0"),
        (lambda: theory.SampledTimes([]), "at least one"),
        (lambda: theory.SampledTimes([1, math.nan]), "finite"),
        (lambda: theory.SampledTimes([0, 1]), "above 0"),
        (lambda: theory.expected_batch_s(UNIFORM, [], 0), "batch must be"),
        (lambda: theory.uniform_optimal(UNIFORM, 0), "bins must be"),
        (lambda: theory.expected_batch_s(UNIFORM, [3, 2], 8), "do not decrease"),
        (lambda: theory.expected_batch_s(UNIFORM, [math.nan], 8), "numbers"),
        (lambda: theory.expected_batch_s(UNIFORM, [3], 8, np.eye(3)), r"shape \(2, 2\)"),
        (lambda: theory.expected_batch_s(UNIFORM, [3], 8, [[0.5, 0.4], [0, 1]]), "add up to 1"),
        (lambda: theory.latency_s(UNIFORM, [], 8, 0), "rate"),
        (lambda: theory.uniform_bins_for(UNIFORM, 8, 1.0), "capacity"),
        (lambda: theory.bins_for(UNIFORM, 8, 8 / 10.5, lambda k: theory.equal_mass(UNIFORM, k)), "capacity"),
        (lambda: theory.neighbours(4, 0.6), "together at most 1"),
        (lambda: theory.confusion_of_accuracy(4, 0.9, 0.8), "accuracy"),
        (lambda: theory.confusion_of_predictions([0, 4], [0, 1], 4), "within 0 to 3"),
        (lambda: theory.multibin_study(UNIFORM, 8, [2], rule="best"), "optimal, equal, learned"),
    ],
)
def test_bad_input_is_named(call, states):
    with pytest.raises(InputError, match=states):
        call()


def test_confusion_matrices():
    np.testing.assert_allclose(theory.neighbours(3, 0.1, 0.2), [[0.8, 0.2, 0], [0.1, 0.7, 0.2], [0, 0.1, 0.9]])
    for bins, accuracy in ((2, 0.8614), (4, 0.6297), (8, 0.4229)):
        matrix = theory.confusion_of_accuracy(bins, accuracy)
        np.testing.assert_allclose(matrix.sum(axis=1), 1)
        assert np.trace(matrix) / bins == pytest.approx(accuracy)
        assert np.trace(matrix[:, 1:]) + np.trace(matrix) + np.trace(matrix[1:]) == pytest.approx(bins)
    far = theory.confusion_of_accuracy(8, 0.4229, 0.85)
    assert np.trace(far) / 8 == pytest.approx(0.4229)
    np.testing.assert_allclose(far.sum(axis=1), 1)
    true = np.array([0, 0, 0, 1, 1, 3])
    matrix = theory.confusion_of_predictions(true, [0, 1, 0, 1, 1, 2], 4)
    np.testing.assert_allclose(matrix[0], [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(matrix[2], [0, 0, 1, 0])


def test_confusing_follows_the_matrix():
    rng = np.random.default_rng(0)
    true, wrong = rng.integers(0, 4, 40_000), theory.neighbours(4, 0.3, 0.1)
    put = theory.confuse(true, wrong, rng.random(40_000))
    np.testing.assert_allclose(theory.confusion_of_predictions(true, put, 4), wrong, atol=0.02)
    np.testing.assert_array_equal(theory.confuse(true, np.eye(4), rng.random(40_000)), true)


@given(tokens=st.lists(st.integers(1, 300), min_size=1, max_size=60), batch=batches, bins=counts)
@pytest.mark.parametrize("rule", theory.RULES)
def test_boundaries_in_tokens_rise_and_leave_no_bin_empty(rule, tokens, batch, bins):
    edges = theory.token_boundaries(tokens, batch, bins, rule)
    assert len(edges) < bins
    assert edges == sorted(set(edges))
    assert all(edge % 1 == 0.5 for edge in edges)
    assert (np.bincount(np.searchsorted(edges, tokens), minlength=len(edges) + 1) > 0).all()


def test_boundaries_in_tokens_are_those_of_an_engine():
    from lengthwise.policy.families import bins

    tokens = [3, 5, 5, 9, 20, 21, 22, 90]
    edges = theory.token_boundaries(tokens, 2, 3)
    policy = bins(edges)
    assert [policy.function(t) for t in tokens] == list(theory.bin_of(tokens, edges))
    with pytest.raises(InputError, match="whole numbers"):
        theory.token_boundaries([1.5], 2, 3)
