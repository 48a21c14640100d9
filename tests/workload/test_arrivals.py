from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.schema.errors import InputError
from lengthwise.workload import (
    AllAtOnce,
    ClosedLoop,
    Constant,
    Gamma,
    Poisson,
    RateProfile,
    Replay,
    Weibull,
    elis_gamma,
)
from lengthwise.workload.arrivals import weibull_shape

rates = st.floats(0.01, 1000)
cvs = st.floats(0.05, 6)
models = st.one_of(
    st.just(AllAtOnce()),
    st.builds(ClosedLoop, st.integers(1, 99)),
    st.builds(Constant, rates),
    st.builds(Poisson, rates),
    st.builds(Gamma, rates, cvs),
    st.builds(Weibull, rates, cvs),
    st.builds(
        lambda gaps, first, linear, repeats: RateProfile(
            np.cumsum([0.0, *gaps]), [*([first] * len(gaps)), 1.0], linear, sum(gaps) if repeats else None
        ),
        st.lists(st.floats(0.1, 50), min_size=1, max_size=4),
        st.floats(0, 50).filter(lambda rate: rate == 0 or rate > 0.01),
        st.just(True),
        st.booleans(),
    ),
)


@given(models, st.integers(1, 300), st.integers(0, 9))
def test_times_are_sorted_from_zero_and_repeat_with_the_seed(model, n, seed):
    times = model.sample(n, np.random.default_rng(seed))
    assert times.shape == (n,)
    assert times.dtype == np.float64
    assert times[0] >= 0
    assert (np.diff(times) >= 0).all()
    assert times.tobytes() == model.sample(n, np.random.default_rng(seed)).tobytes()


@pytest.mark.parametrize("build", [Poisson, lambda r: Gamma(r, 2.0), lambda r: Weibull(r, 2.0), Constant])
def test_a_rate_only_stretches_time(build):
    slow, fast = (build(rate).sample(500, np.random.default_rng(3)) for rate in (1.0, 8.0))
    np.testing.assert_allclose(slow, 8 * fast, rtol=1e-12)


@pytest.mark.parametrize(
    ("model", "cv"),
    [
        (Poisson(4.0), 1.0),
        (Gamma(4.0, 0.5), 0.5),
        (Gamma(4.0, 2.0), 2.0),
        (Weibull(4.0, 0.5), 0.5),
        (Weibull(4.0, 2.0), 2.0),
        (elis_gamma(4.0), 0.73**-0.5),
    ],
)
def test_rate_and_cv_are_as_requested(model, cv):
    n = 200_000
    gaps = np.diff(model.sample(n, np.random.default_rng(1)), prepend=0)
    # Five standard errors of the mean gap; the cv's own error grows with its tail.
    assert gaps.mean() == pytest.approx(0.25, abs=5 * cv * 0.25 / n**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_elis_default_is_the_measured_gamma():
    model = elis_gamma()
    assert 1 / model.cv**2 == pytest.approx(0.73)
    assert 1 / (model.rate_rps * 0.73) == pytest.approx(10.41)


@given(st.floats(0.002, 1000))
def test_weibull_shape_solves_for_cv(cv):
    from scipy.special import gammaln

    k = weibull_shape(cv)
    assert np.expm1(gammaln(1 + 2 / k) - 2 * gammaln(1 + 1 / k)) == pytest.approx(cv**2, rel=1e-6)


def test_weibull_of_cv_one_is_exponential():
    assert weibull_shape(1.0) == pytest.approx(1.0)


def test_constant_starts_at_zero():
    assert Constant(4.0).sample(3, np.random.default_rng()).tolist() == [0, 0.25, 0.5]


def test_steps_hold_their_rates():
    profile = RateProfile([0, 100, 200], [50.0, 0.0, 10.0])
    times = profile.sample(20_000, np.random.default_rng(0))
    assert np.count_nonzero(times < 100) == pytest.approx(5000, abs=5 * 5000**0.5)
    assert np.count_nonzero((times > 100) & (times < 200)) == 0
    after = times[times > 200]
    assert len(after) / (after[-1] - 200) == pytest.approx(10, rel=0.05)


def test_lines_ramp_and_rounds_repeat():
    ramp = RateProfile([0, 100], [0.0, 100.0], linear=True, period_s=100.0)
    times = ramp.sample(20_000, np.random.default_rng(0))
    assert times[-1] == pytest.approx(400, abs=15)  # 5,000 a round
    phase = times % 100
    # Arrivals grow with the square of the time: a quarter of them in the first half.
    assert np.mean(phase < 50) == pytest.approx(0.25, abs=0.02)
    assert np.mean(phase < 90) == pytest.approx(0.81, abs=0.02)


def test_a_flat_profile_is_poisson():
    flat = RateProfile([0, 7], [3.0, 3.0], linear=True).sample(1000, np.random.default_rng(5))
    np.testing.assert_allclose(flat, Poisson(3.0).sample(1000, np.random.default_rng(5)), rtol=1e-9)


def test_replay_moves_to_zero_and_scales():
    replay = Replay([5.0, 6.0, 9.0], time_scale=0.5)
    assert replay.sample(2, np.random.default_rng()).tolist() == [0, 0.5]
    with pytest.raises(InputError, match="4 requests need as many times to replay; there are 3"):
        replay.sample(4, np.random.default_rng())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Poisson(0), "rate_rps must be a finite number above 0; it is 0"),
        (lambda: Gamma(1, float("nan")), "cv must be a finite number"),
        (lambda: Weibull(1, 1e9), "cv between 0.0013 and 1e5"),
        (lambda: Constant(float("inf")), "rate_rps must be"),
        (lambda: ClosedLoop(0), "concurrency of at least 1"),
        (lambda: RateProfile([0, 1], [1]), "2 times and 1 rates"),
        (lambda: RateProfile([1, 2], [1, 1]), "start at 0"),
        (lambda: RateProfile([0, 0], [1, 1]), "increase"),
        (lambda: RateProfile([0], [-1]), "not negative"),
        (lambda: RateProfile([0, 5], [1, 0]), "ends at 0 forever"),
        (lambda: RateProfile([0, 5], [0, 0], period_s=9), "ends at 0 forever"),
        (lambda: RateProfile([0, 5], [1, 1], period_s=4), "at least the last time"),
        (lambda: Replay([2, 1]), "must not decrease"),
        (lambda: Replay([1], time_scale=-1), "time_scale"),
    ],
)
def test_impossible_arrivals_are_reported(build, message):
    with pytest.raises(InputError, match=message):
        build()
