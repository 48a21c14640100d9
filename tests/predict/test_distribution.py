"""Laws of a length as a distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import expon

from lengthwise.predict import LEVELS, LengthDistribution
from lengthwise.schema.errors import InputError

LENGTHS = st.floats(1, 1e5)
LEVEL = st.floats(0, 1)
AGES = st.one_of(st.just(0), st.integers(1, 200_000))


@st.composite
def distributions(draw, rows=1):
    """Any distribution: with atoms, at own levels or ours."""
    inner = draw(st.lists(st.floats(0.01, 0.99), max_size=6, unique=True))
    levels = draw(st.sampled_from([LEVELS, np.array([0.0, *sorted(inner), 1.0])]))
    raw = draw(hnp.arrays(float, (rows, len(levels)), elements=st.one_of(LENGTHS, st.sampled_from([1, 7, 500]))))
    return LengthDistribution.of(raw, levels)


def integral(d, a=0.0, points=200_001):
    """E[max(X, a)] of a single row by the midpoint rule."""
    p = (np.arange(points) + 0.5) / points
    return float(np.maximum(np.interp(p, d.levels, d.tokens[0]), a).mean())


@given(distributions(), LEVEL)
def test_cdf_and_quantile_are_inverse(d, level):
    x = d.quantile(level)
    assert d.cdf(x * (1 + 1e-9))[0] >= level - 1e-6
    assert d.quantile(d.cdf(x))[0] >= x[0] * (1 - 1e-9)


@given(distributions(), LENGTHS, LENGTHS)
def test_cdf_does_not_decrease_and_ends_at_one(d, x, y):
    low, high = sorted((x, y))
    assert 0 <= d.cdf(low)[0] <= d.cdf(high)[0] <= 1
    assert d.cdf(d.tokens[:, -1])[0] == 1
    assert d.cdf(d.tokens[:, 0] - 0.5)[0] == 0


@given(distributions())
def test_mean_is_the_integral_of_the_quantiles(d):
    assert d.mean[0] == pytest.approx(integral(d), rel=1e-3)


@given(distributions(), AGES)
def test_what_is_given_is_above_the_age_and_stays_finite(d, age):
    after = d.given(age)
    assert (after.tokens >= age + (age > 0)).all()
    assert np.isfinite(after.tokens).all()


@given(distributions(), AGES, st.integers(0, 1000))
def test_survival_is_stochastically_consistent(d, age, after):
    """Who is known to be older is not shorter; and asking twice is asking once."""
    first, second = d.at(LEVELS).given(age), d.at(LEVELS).given(age + after)
    if age + after < d.tokens[0, -1]:
        assert (second.tokens >= first.tokens * (1 - 1e-9) - 1).all()
    again = second.given(age + after)
    np.testing.assert_allclose(again.tokens, second.tokens, rtol=1e-6, atol=1)


@given(distributions(), AGES)
def test_remaining_is_at_least_one_and_the_mean_of_what_is_given(d, age):
    left = d.remaining(age)[0]
    assert left >= 1
    if age < d.tokens[0, -1]:
        assert left == pytest.approx(max(1, (integral(d, age) - age) / max(1e-12, 1 - d.cdf(age)[0])), rel=0.2) or (
            1 - d.cdf(age)[0] < 1e-3
        )


@given(distributions(), AGES)
def test_gittins_is_between_one_and_the_remaining_length(d, age):
    assert 1 <= d.gittins(age)[0] <= d.remaining(age)[0] * (1 + 1e-9)


@given(distributions(), st.integers(0, 500))
def test_gittins_is_the_least_ratio_of_all_that_could_be_tried(d, age):
    """Against the definition on a fine grid of quanta."""
    x = d.quantile(0)[0] if len(d) == 0 else np.interp((np.arange(4000) + 0.5) / 4000, d.levels, d.tokens[0])
    alive = x[x > age]
    if len(alive) < 400:
        return
    tries = np.quantile(alive, np.linspace(0.02, 1, 25))
    ratios = [np.minimum(alive - age, t - age).mean() / (alive <= t).mean() for t in tries if t > age]
    assert d.gittins(age)[0] <= max(1, min(ratios)) * 1.02


def test_gittins_of_an_exponential_is_its_mean_at_any_age():
    """No memory: waiting reveals nothing (up to the levels' grid)."""
    levels = np.concatenate([np.linspace(0, 0.999, 2000), [0.9999, 1.0]])
    d = LengthDistribution.of(1 + 300 * expon.ppf(np.minimum(levels, 0.99999))[None], levels)
    index = np.array([d.gittins(age)[0] for age in (1, 50, 100, 300, 600)])
    np.testing.assert_allclose(index, 300, rtol=0.05)
    coarse = LengthDistribution.of(1 + 300 * expon.ppf(np.minimum(LEVELS, 0.998))[None])
    np.testing.assert_allclose([coarse.gittins(age)[0] for age in (1, 100, 300)], 300, rtol=0.1)


@given(st.integers(1, 10_000), st.integers(0, 9_999))
def test_of_a_known_length_gittins_and_remaining_are_what_is_left(length, age):
    if age < length:
        d = LengthDistribution.point([length])
        assert d.gittins(age)[0] == d.remaining(age)[0] == length - age
        assert d.given(age).mean[0] == pytest.approx(length)


@given(distributions(), st.integers(2, 1_000_000))
def test_what_is_outlived_has_a_tail_of_half_as_much_again(d, age):
    if age >= d.tokens[0, -1]:
        assert d.remaining(age)[0] == max(1, age / 2)
        assert d.gittins(age)[0] == pytest.approx(max(1, age / 3))
        assert d.given(age).mean[0] == pytest.approx(1.5 * age, rel=0.05, abs=1)


def test_a_bimodal_length_is_worth_a_try_before_its_mean():
    """Half end at 10, half at 1,000: the Gittins rank is that of the short try, the mean is not."""
    d = LengthDistribution.of([[10, 10, 1000, 1000]], [0, 0.5, 0.5000001, 1])
    assert d.gittins(0)[0] == pytest.approx(20, rel=1e-3)
    assert d.remaining(0)[0] == pytest.approx(505, rel=1e-3)
    assert d.gittins(10)[0] == pytest.approx(990, rel=1e-3)


def test_samples_follow_the_quantiles():
    d = LengthDistribution.of(np.tile(np.exp(5 + 2 * LEVELS), (20_000, 1)))
    drawn = d.sample(np.random.default_rng(0))
    assert drawn.dtype == np.int64
    np.testing.assert_allclose(np.quantile(drawn, [0.1, 0.5, 0.9]), np.exp([5.2, 6, 6.8]), rtol=0.03)
    assert (drawn == d.sample(np.random.default_rng(0))).all()


@given(distributions(rows=3), AGES)
def test_rows_do_not_know_of_each_other(d, age):
    for ask in ("given", "remaining", "gittins", "cdf"):
        complete, alone = getattr(d, ask)(age), getattr(d.take([1]), ask)(age)
        if ask == "given":
            complete, alone = complete.tokens, alone.tokens
        np.testing.assert_array_equal(complete[[1]], alone)


@given(distributions(rows=2), AGES, LEVEL)
def test_one_quantile_of_what_is_given_is_that_of_all(d, age, level):
    levels = np.union1d(LEVELS, [level])
    np.testing.assert_allclose(
        d.quantile_given(level, age), d.at(np.union1d(levels, d.levels)).given(age).quantile(level), rtol=0.02, atol=1
    )


@given(distributions())
def test_other_levels_give_the_same_distribution(d):
    np.testing.assert_allclose(d.at(d.levels).tokens, d.tokens)
    fine = d.at(np.unique(np.concatenate([np.linspace(0, 1, 101), d.levels])))
    np.testing.assert_allclose(fine.mean, d.mean, rtol=1e-9)


@pytest.mark.parametrize("bad", [[[np.nan, 2]], [[0, 2]], [[3, 2]], [[1, np.inf]], [[1, 2, 3]], [1, 2], [[-1, 2]]])
def test_what_is_no_distribution_is_refused(bad):
    with pytest.raises(InputError, match=r"predicted lengths|tokens must have"):
        LengthDistribution(np.asarray(bad, float), np.array([0.0, 1.0]))


@pytest.mark.parametrize("levels", [[0, 0.5], [0.1, 1], [0, 0, 1], [1], [0, np.nan, 1]])
def test_levels_that_do_not_span_are_refused(levels):
    with pytest.raises(InputError, match="levels must increase"):
        LengthDistribution(np.ones((1, len(levels))), np.asarray(levels, float))
