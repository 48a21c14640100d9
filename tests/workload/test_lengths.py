from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lengthwise.schema.errors import InputError
from lengthwise.workload import (
    Capped,
    Conditional,
    Empirical,
    Fixed,
    Joint,
    LogNormal,
    Quantiles,
    Samples,
    SkewNormal,
    TruncatedNormal,
    Uniform,
    Zipf,
)

LEVELS = (np.arange(20_000) + 0.5) / 20_000

marginals = st.one_of(
    st.builds(Fixed, st.integers(1, 5000)),
    st.builds(lambda low, span: Uniform(low, low + span), st.integers(1, 100), st.integers(0, 5000)),
    st.builds(
        lambda low, span, theta: Zipf(low, low + span, theta), st.integers(1, 100), st.integers(0, 500), st.floats(0, 3)
    ),
    st.builds(LogNormal, st.floats(0.5, 2000), st.floats(0, 2)),
    st.builds(
        lambda mean, sd, span: TruncatedNormal(mean, sd, 1, 1 + span),
        st.floats(-200, 1000),
        st.floats(30, 500),
        st.floats(50, 5000),
    ),
    st.builds(
        lambda mean, sd, skew: SkewNormal(mean, sd, skew, 1, 9000),
        st.floats(1, 2000),
        st.floats(1, 500),
        st.floats(-0.99, 0.99),
    ),
    st.builds(Empirical, st.lists(st.integers(1, 500), min_size=1, max_size=20)),
)


@given(marginals)
def test_quantile_functions_do_not_decrease_and_are_finite(marginal):
    tokens = marginal.quantile(np.array([2.0**-54, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6, 1 - 2.0**-53]))
    assert np.isfinite(tokens).all()
    assert (np.diff(tokens) >= -1e-9 * tokens[1:]).all()


@given(marginals, marginals, st.floats(-1, 1), st.integers(1, 300))
def test_pairs_are_positive_integers_and_repeat_with_the_seed(prompt, output, correlation, n):
    model = Joint(prompt, output, correlation)
    first, again = (model.sample(n, np.random.default_rng(7)) for _ in range(2))
    for side, same in zip(first, again, strict=True):
        assert side.shape == (n,)
        assert side.dtype == np.int64
        assert side.min() >= 1
        assert side.tobytes() == same.tobytes()


@pytest.mark.parametrize("model", [Joint(LogNormal(300, 1), Uniform(1, 900), 0.5), Samples([1, 2, 3], [4, 5, 6])])
def test_the_first_requests_do_not_depend_on_how_many_follow(model):
    few, many = (model.sample(n, np.random.default_rng(0)) for n in (100, 300_000))
    assert few[0].tolist() == many[0][:100].tolist()
    assert few[1].tolist() == many[1][:100].tolist()


@pytest.mark.parametrize("requested", [-0.9, -0.3, 0.0, 0.5, 0.95])
def test_the_copula_gives_the_rank_correlation(requested):
    model = Joint(LogNormal(400, 1.0), TruncatedNormal(200, 80, 1, 800), requested)
    prompt, output = model.sample(20_000, np.random.default_rng(1))
    assert stats.spearmanr(prompt, output).statistic == pytest.approx(requested, abs=0.03)


@pytest.mark.parametrize("requested", [-1.0, 1.0])
def test_full_correlation_is_a_function(requested):
    prompt, output = Joint(Uniform(1, 10**6), Uniform(1, 10**6), requested).sample(500, np.random.default_rng(1))
    ranks = np.argsort(np.argsort(prompt)), np.argsort(np.argsort(output))
    assert np.array_equal(ranks[0], ranks[1] if requested > 0 else 499 - ranks[1])


def test_correlation_leaves_prompts_as_they_are():
    model = [Joint(LogNormal(300, 1), LogNormal(100, 1), c).sample(50, np.random.default_rng(0)) for c in (0, 0.8)]
    assert model[0][0].tolist() == model[1][0].tolist()
    assert model[0][1].tolist() != model[1][1].tolist()


@given(st.lists(st.integers(1, 9999), min_size=3, max_size=9), st.lists(st.floats(0.01, 1), min_size=2, max_size=8))
def test_a_quantile_table_reproduces_its_quantiles(tokens, steps):
    levels = np.concatenate(([0.0], np.cumsum(steps) / np.sum(steps)))
    levels[-1] = 1.0
    tokens = np.sort(np.resize(tokens, len(levels)))
    table = Quantiles(levels, tokens)
    np.testing.assert_allclose(table.quantile(levels), tokens)
    sampled = Joint(table, Fixed(1)).sample(4000, np.random.default_rng(0))[0]
    for level, at in zip(levels[1:-1], tokens[1:-1], strict=True):
        assert np.mean(sampled < at - 1) <= level + 0.05
        assert np.mean(sampled <= at + 1) >= level - 0.05


@given(st.floats(20, 2000), st.floats(1.2, 5), st.floats(0.2, 0.8))
def test_mean_median_and_p90_are_met(median, ratio, where):
    p90, high = median * ratio, median * ratio * 4
    reach = []
    for mean in (0.01, 1e9):
        with pytest.raises(InputError, match=r"the mean can be (\d+) to (\d+) tokens") as error:
            Quantiles.from_mean_median_p90(mean, median, p90, high=high)
        reach.append(str(error.value))
    assert reach[0].split("the mean can be ")[1].split(";")[0] in reach[1]
    low, up = (float(x) for x in reach[0].split("the mean can be ")[1].split(" tokens")[0].split(" to "))
    mean = low + 1 + where * (up - low - 2)
    table = Quantiles.from_mean_median_p90(mean, median, p90, high=high)
    got = table.quantile(np.array([0.5, 0.9]))
    assert np.trapezoid(table.tokens, table.levels) == pytest.approx(mean, rel=1e-9)
    assert got.tolist() == pytest.approx([median, p90])
    assert 1 <= table.tokens[0] <= table.tokens[-1] <= high


@given(st.floats(5, 2000), st.floats(0, 3))
def test_log_normal_by_mean_and_spread(mean, cv):
    by_cv, by_sd = LogNormal.from_mean_cv(mean, cv), LogNormal.from_mean_sd(mean, cv * mean)
    assert by_cv.median * np.exp(by_cv.sigma**2 / 2) == pytest.approx(mean)
    assert np.sqrt(np.expm1(by_cv.sigma**2)) == pytest.approx(cv, abs=1e-7)
    assert (by_sd.median, by_sd.sigma) == pytest.approx((by_cv.median, by_cv.sigma))


def test_log_normal_by_median_and_p90():
    got = LogNormal.from_median_p90(417, 1678).quantile(np.array([0.5, 0.9]))
    assert got.tolist() == pytest.approx([417, 1678])


@given(st.floats(-300, 900), st.floats(30, 400), st.floats(1, 100), st.floats(50, 900))
def test_truncated_normal_matches_scipy(mean, sd, low, span):
    own = TruncatedNormal(mean, sd, low, low + span).quantile(np.array([0.01, 0.5, 0.99]))
    other = stats.truncnorm((low - mean) / sd, (low + span - mean) / sd, mean, sd).ppf([0.01, 0.5, 0.99])
    assert own.tolist() == pytest.approx(other.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "sd", "high"), [(32, 13, 80), (128, 68, 320), (512, 252, 1024), (100, 90, np.inf), (20, 18.9, np.inf)]
)
def test_truncated_normal_from_its_moments(mean, sd, high):
    tokens = TruncatedNormal.from_moments(mean, sd, 1, high).quantile(LEVELS)
    assert tokens.mean() == pytest.approx(mean, rel=2e-3)
    assert tokens.std() == pytest.approx(sd, rel=5e-3)


@pytest.mark.parametrize("skewness", [-0.6, 0.0, 0.4])
def test_skew_normal_has_its_moments(skewness):
    tokens = SkewNormal(500, 80, skewness).quantile(LEVELS)
    assert tokens.mean() == pytest.approx(500, rel=1e-3)
    assert tokens.std() == pytest.approx(80, rel=5e-3)
    assert stats.skew(tokens) == pytest.approx(skewness, abs=0.01)


def test_zipf_has_its_probabilities():
    tokens = Zipf(10, 14, 0.6).quantile(LEVELS)
    share = np.bincount(tokens.astype(int), minlength=15)[10:] / len(LEVELS)
    mass = np.arange(1, 6) ** -0.6
    np.testing.assert_allclose(share, mass / mass.sum(), atol=2e-4)


def test_uniform_reaches_both_ends_equally():
    counts = np.bincount(Uniform(3, 5).quantile(LEVELS).astype(int))
    assert counts[3:] / len(LEVELS) == pytest.approx([1 / 3] * 3, abs=1e-3)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_weights_count_as_repeats(seen):
    values, counts = np.unique(seen, return_counts=True)
    levels = (np.arange(200) + 0.37) / 200.11
    plain, weighted = Empirical(seen).quantile(levels), Empirical(values, counts).quantile(levels)
    assert plain.tolist() == weighted.tolist()
    assert set(plain) <= set(seen)


def test_conditional_separates_the_classes():
    model = Conditional(Uniform(1, 1000), (Fixed(7), Uniform(100, 200), Fixed(9)))
    prompt, output = model.sample(5000, np.random.default_rng(0))
    assert set(output[prompt <= 333]) == {7}
    assert set(output[prompt >= 668]) == {9}
    middle = output[(prompt > 335) & (prompt < 665)]
    assert (middle.min(), middle.max()) == (100, 200)


def test_samples_keep_pairs_together():
    prompt, output = Samples([10, 20, 30], [1, 2, 3]).sample(300, np.random.default_rng(0))
    assert np.array_equal(prompt, 10 * output)
    assert set(output) == {1, 2, 3}


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=40),
    st.integers(2, 600),
    st.sampled_from(["output", "prompt", "proportional"]),
)
def test_no_cut_exceeds_a_limit_or_touches_what_fits(pairs, limit, cut):
    class Given:
        def sample(self, n, rng):
            return tuple(np.array(side) for side in zip(*pairs, strict=True))

    prompt, output = Capped(Given(), limit, max_prompt_tokens=400, cut=cut).sample(len(pairs), None)
    pairs = [(min(p, 400), o) for p, o in pairs]
    for (p, o), new_p, new_o in zip(pairs, prompt, output, strict=True):
        assert 1 <= new_p <= p
        assert 1 <= new_o <= o
        assert new_p + new_o <= limit
        if p + o <= limit:
            assert (new_p, new_o) == (p, o)
        else:
            assert new_p + new_o >= limit - 1
        if cut == "output" and p < limit:
            assert new_p == p
        if cut == "prompt" and o < limit:
            assert new_o == o


def test_a_proportional_cut_takes_rounded_up_shares():
    prompt, output = Capped(Samples([300], [100]), 350, cut="proportional").sample(1, np.random.default_rng())
    assert (prompt[0], output[0]) == (300 - 38, 100 - 13)  # 50 too many: 37.5 and 12.5 rounded up


def test_redraw_is_the_distribution_below_the_limit():
    model = Capped(Joint(Uniform(1, 100), Uniform(1, 100)), max_total_tokens=100, cut="redraw")
    prompt, output = model.sample(5000, np.random.default_rng(0))
    assert (prompt + output).max() == 100
    assert prompt.mean() == pytest.approx(100 / 3, rel=0.05)
    with pytest.raises(InputError, match="still above the limits"):
        Capped(Joint(Fixed(5), Fixed(5)), 9, cut="redraw").sample(3, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fixed(0), "at least 1 token"),
        (lambda: Uniform(5, 4), "range from 0 up; it is 5 to 4"),
        (lambda: Zipf(1, 5, -1), "theta"),
        (lambda: LogNormal(0, 1), "median"),
        (lambda: LogNormal(5, -1), "sigma"),
        (lambda: LogNormal.from_mean_sd(-1, 1), "mean must be above 0"),
        (lambda: LogNormal.from_median_p90(5, 4), "p90 must not be below"),
        (lambda: TruncatedNormal(805, 20, 1, 50), "almost nothing of the normal"),
        (lambda: TruncatedNormal(5, 0), "sd must be above 0"),
        (lambda: TruncatedNormal.from_moments(256, 252, 1, 512), "at most 147"),
        (lambda: TruncatedNormal.from_moments(600, 5, 1, 512), "low < mean < high"),
        (lambda: SkewNormal(5, 1, 1.0), "within 0.995"),
        (lambda: SkewNormal(5, 1, 0, 1000, 2000), "nothing of the distribution"),
        (lambda: Quantiles([0, 1], [1]), "a length for each level"),
        (lambda: Quantiles([0.1, 1], [1, 2]), "increase from 0 to 1"),
        (lambda: Quantiles([0, 1], [2, 1]), "must not decrease"),
        (lambda: Quantiles.from_mean_median_p90(5, 5, 4, high=9), "median < p90"),
        (lambda: Empirical([]), "at least one length"),
        (lambda: Empirical([1], [0]), "sum above 0"),
        (lambda: Joint(Fixed(1), Fixed(1), 1.1), "within -1 to 1"),
        (lambda: Conditional(Fixed(1), ()), "at least one distribution"),
        (lambda: Samples([1, 2], [1]), "must be pairs"),
        (lambda: Samples([0], [1]), "at least 1 token"),
        (lambda: Capped(Samples([1], [1]), 1), "max_total_tokens must be at least 2"),
        (lambda: Capped(Samples([1], [1]), 9, cut="half"), "cut must be"),
    ],
)
def test_impossible_lengths_are_reported(build, message):
    with pytest.raises(InputError, match=message):
        build()
