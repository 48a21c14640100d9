"""Scores against the formulas they are, their intervals, and the share of the variance that can be known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from lengthwise.predict import LEVELS, Constant, LengthDistribution, Prompts, Samples
from lengthwise.predict.contract import groups_of
from lengthwise.predict.evaluation import evaluate, explainable_variance, kendall, latency_ms, resampled
from lengthwise.schema.errors import InputError


class States:
    """A predictor that returns what it was given, whatever its caller."""

    def __init__(self, tokens, spread=0.0) -> None:
        self.table, self.spread = dict(tokens), spread

    def fit(self, samples):
        return self

    def predict(self, prompts, tokens_so_far=0):
        middle = np.array([self.table[t] for t in prompts.text], float)
        levels = np.array([0, 0.05, 0.5, 0.95, 1])
        rows = [middle * f for f in (1 - 1.2 * self.spread, 1 - self.spread, 1, 1 + self.spread, 1 + 1.2 * self.spread)]
        return LengthDistribution.of(np.stack(rows, axis=1), levels).given(tokens_so_far)


def samples(tokens, model=None, cut=None) -> Samples:
    n = len(tokens)
    prompts = Prompts(n, text=[str(i) for i in range(n)], model=model)
    return Samples(prompts, np.array(tokens, np.int64), np.zeros(n, bool) if cut is None else cut)


def reported(predicted, true, spread=0.0, **options):
    predictor = States({str(i): t for i, t in enumerate(predicted)}, spread)
    return evaluate(predictor, samples(true), draws=0, clock=None, windows=(), **options)


def test_points_are_scored_by_their_formulas() -> None:
    message, true = np.array([10.0, 40, 30, 80]), np.array([20.0, 30, 40, 100])
    found = reported(message, true)
    value = {name: e.value for name, e in found.scores.items()}
    assert value["mae"] == pytest.approx(np.abs(message - true).mean())
    assert value["rmse"] == pytest.approx(np.sqrt(((message - true) ** 2).mean()))
    assert value["r2"] == pytest.approx(1 - ((message - true) ** 2).sum() / ((true - true.mean()) ** 2).sum())
    assert value["bias"] == pytest.approx((message - true).mean())
    assert value["tau"] == pytest.approx((5 - 1) / 6)
    assert value["coverage90"] == 0
    assert value["pinball"] == pytest.approx(0.5 * np.abs(message - true).mean())


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=12))
def test_kendall_counts_pairs(rows) -> None:
    x, y = (np.array(column, float) for column in zip(*rows, strict=True))
    pairs = list(itertools.combinations(range(len(x)), 2))
    signs = np.array([np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs])
    in_x, in_y = (sum(c[i] != c[j] for i, j in pairs) for c in (x, y))
    if in_x and in_y:
        assert kendall(x, y) == pytest.approx(signs.sum() / np.sqrt(in_x * in_y))
    else:
        assert np.isnan(kendall(x, y))


def test_intervals_and_bins() -> None:
    true = np.arange(1, 101)
    found = reported(true, true, spread=0.1)
    assert found.scores["coverage90"].value == 1
    assert found.scores["width90"].value == pytest.approx(0.2 * true.mean(), rel=1e-3)
    assert found.scores["accuracy_8"].value == 1
    level, share = found.calibration
    assert share[level < 0.4].max() < 0.02
    off = reported(true[::-1], true)
    assert off.scores["tau"].value == -1
    assert off.scores["accuracy_2"].value < 0.02
    assert off.scores["within_one_2"].value == 1


def test_order_within_a_model_is_not_order_between_models() -> None:
    true, message, model = [10, 20, 1000, 2000], [20, 10, 2000, 1000], ["a", "a", "b", "b"]
    predictor = States({str(i): t for i, t in enumerate(message)})
    found = evaluate(predictor, samples(true, model), draws=0, clock=None, windows=())
    assert found.scores["tau_within"].value == -1
    assert found.scores["tau"].value > 0
    assert found.by_model["a"]["tau"] == -1


def test_cut_outputs_are_counted_and_scored_up_to_the_horizon() -> None:
    cut = np.array([False, True, False])
    found = evaluate(Constant().fit(samples([5, 5, 5])), samples([5, 9, 7], cut=cut), draws=0, clock=None)
    assert (found.requests, found.censoring.samples, found.censoring.horizon_tokens) == (3, 1, 9)
    assert found.censoring.share == pytest.approx(1 / 3)
    assert found.scores["bias"].value == pytest.approx(5 - 7)
    with pytest.raises(InputError, match="every output was cut"):
        evaluate(Constant(), samples([5], cut=np.array([True])))


class Right:
    """Knows the log-normal law of each prompt, whose middle is its text."""

    def predict(self, prompts, tokens_so_far=0):
        z = norm.ppf(np.clip(LEVELS, 1e-4, 1 - 1e-4))
        middle = np.log([float(text) for text in prompts.text])
        return LengthDistribution.of(np.exp(middle[:, None] + 0.8 * z)).given(tokens_so_far)


@pytest.mark.parametrize("limits", ["one", "many", "late"])
@pytest.mark.parametrize("middles", [(150,), (30, 120, 480)])
def test_a_correct_predictor_scores_as_correct_where_outputs_were_truncated(limits, middles) -> None:
    rng = np.random.default_rng(3)
    n = 3000
    middle = rng.choice(middles, n)
    true = np.maximum(1, np.rint(middle * np.exp(0.8 * rng.normal(size=n))))
    at = {"one": np.full(n, 300), "many": rng.integers(50, 1200, n), "late": rng.integers(500, 9000, n)}[limits]
    prompts = Prompts(n, text=[str(m) for m in middle])
    given = Samples(prompts, np.minimum(true, at).astype(int), true > at)
    found = evaluate(Right(), given, draws=30, clock=None, windows=(0, 100))
    assert found.censoring.share > 0
    assert 0.88 < found.scores["coverage90"].value < 0.92
    spread = np.minimum(true, found.censoring.horizon_tokens).std() / np.sqrt(n)
    assert abs(found.scores["bias"].value) < 4 * spread
    assert found.scores["r2"].value > -0.01
    assert 0.87 < found.windows[1].coverage90.value < 0.93
    level, share = found.calibration
    assert np.abs(share - level).max() < 0.03


def test_overconfidence_is_detected_where_outputs_were_truncated() -> None:
    rng = np.random.default_rng(4)
    true = np.maximum(1, np.rint(100 * np.exp(0.8 * rng.normal(size=1000)))).astype(int)
    found = evaluate(
        States({str(i): 100 for i in range(1000)}, 0.3),
        samples(np.minimum(true, 300), cut=true > 300),
        draws=0,
        clock=None,
    )
    assert found.scores["coverage90"].value < 0.4
    assert found.scores["bias"].value < -10


def test_a_length_off_by_rounding_is_that_length() -> None:
    """exp(log 64) is 63.99999999999999."""
    true = np.full(40, 64)
    found = reported(np.exp(np.log(true.astype(float))), true)
    value = {name: e.value for name, e in found.scores.items()}
    assert (value["mae"], value["bias"], value["pinball"]) == (0, 0, 0)
    assert (value["coverage90"], value["accuracy_4"], value["accuracy_8"]) == (1, 1, 1)
    assert found.calibration[1].min() == 1


def test_one_constant_length_has_no_order_and_no_r2() -> None:
    found = evaluate(Constant().fit(samples([7] * 30)), samples([7] * 30), draws=5, clock=None)
    assert found.scores["mae"].value == 0
    assert np.isnan(found.scores["tau"].value)
    assert np.isnan(found.scores["r2"].value)


def test_running_requests_are_predicted_better_and_finished_ones_are_known() -> None:
    true = np.random.default_rng(0).integers(1, 400, 300)
    found = evaluate(Constant().fit(samples(true)), samples(true), draws=0, clock=None, windows=(0, 100, 200, 399))
    assert [w.tokens for w in found.windows] == [0, 100, 200]
    assert [w.running for w in found.windows] == [int((true > k).sum()) for k in (0, 100, 200)]
    all_known = [w.r2_all for w in found.windows]
    assert all_known == sorted(all_known)


def test_intervals_shrink_with_prompts_and_the_same_seed_gives_the_same() -> None:
    rng = np.random.default_rng(1)
    halves = []
    for n in (40, 640):
        true = rng.integers(1, 500, n)
        made = [evaluate(Constant().fit(samples(true)), samples(true), draws=60, clock=None, windows=()) for _ in "ab"]
        assert repr(made[0].scores) == repr(made[1].scores)
        halves.append(made[0].scores["mae"].half_width)
    assert 2 < halves[0] / halves[1] < 8


def test_few_or_equal_samples_do_not_look_exact() -> None:
    """Two prompts cannot tell an interval; 60 equal hits leave z^2 / (n + z^2) of a share open (Wilson)."""

    def scores(n: int):
        return evaluate(Constant().fit(samples([300] * 5)), samples([300] * n), clock=None, windows=()).scores

    assert not any(score.has_interval for score in scores(2).values())
    many = scores(60)
    assert many["accuracy_4"].value == 1
    assert many["accuracy_4"].half_width == pytest.approx(1.96**2 / (60 + 1.96**2), rel=1e-3)
    assert not many["mae"].has_interval  # equal errors do not tell how much others differ


def test_a_prompt_is_resampled_as_a_unit() -> None:
    prompts = Prompts(5, text=["a", "b ", "a", " b", "c"])
    group = groups_of(Samples(prompts, np.ones(5, int), np.zeros(5, bool)))
    assert len(set(group)) == 3
    for rows in resampled(group, 20, 0):
        counts = np.bincount(rows, minlength=5)
        assert counts[0] == counts[2]
        assert counts[1] == counts[3]


def test_latency_is_that_of_the_clock() -> None:
    ticks = iter(np.arange(0, 1000, 0.5))
    assert latency_ms(Constant().fit(samples([5])), samples([5] * 9).prompts, 4, lambda: next(ticks)) == 125


def test_a_correct_predictor_makes_no_error() -> None:
    true = np.array([5, 50, 500])
    found = reported(true, true)
    assert found.scores["mae"].value == 0
    assert found.scores["tau"].value == 1


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_knowable_share_is_found_again(share) -> None:
    rng = np.random.default_rng(2)
    prompts, repeats, runs = 400, 6, 4
    between = np.sqrt(share) * rng.normal(size=(runs, prompts, 1))
    log = between + np.sqrt(1 - share) * rng.normal(size=(runs, prompts, repeats))
    run, prompt, _ = np.indices(log.shape)
    found = explainable_variance(run.ravel(), prompt.ravel(), np.exp(log).ravel(), draws=40)
    assert found.log_share.value == pytest.approx(share, abs=0.06)
    assert found.log_share.half_width < 0.1
    assert len(found.runs) == runs


def test_the_knowable_share_needs_repeats() -> None:
    with pytest.raises(InputError, match="several samples"):
        explainable_variance(["a"] * 5, range(5), [1, 2, 3, 4, 5])
