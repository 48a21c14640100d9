"""What is learned from the lengths that finish: scale, coverage, drift; and from what nothing is learned."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from prediction_worlds import finished, predicted
from scipy import stats

from lengthwise.gateway.config import PredictionConfig
from lengthwise.gateway.length_prediction import LengthPredictor
from lengthwise.gateway.length_prediction.learning import (
    MAX_MODELS,
    WINDOW,
    Drift,
    Learner,
    ModelCorrection,
    Ring,
    cumulative_share,
    differ,
    kolmogorov_smirnov,
    log_rank,
    quantiles,
)
from lengthwise.gateway.request import Outcome
from lengthwise.predict import LEVELS, LengthDistribution
from lengthwise.statistics import kaplan_meier

NORMAL = np.array([stats.norm.ppf(min(max(p, 0.001), 0.999)) for p in LEVELS])


class LogNormal:
    """Says what it thinks of the number that a prompt begins with: a median so long, and a spread."""

    def __init__(self, spread: float = 0.5) -> None:
        self.spread = spread

    def predict(self, prompts, tokens_so_far=0):
        medians = np.array([float(text.split()[0]) for text in prompts.text])
        return LengthDistribution.of(medians[:, None] * np.exp(self.spread * NORMAL)).given(tokens_so_far)


def learning(spread: float = 0.5, **config) -> LengthPredictor:
    return LengthPredictor(PredictionConfig(**config), predictor=LogNormal(spread), place="inline")


def lengths(n: int, *, times: float, spread: float, seed: int = 0) -> list[tuple[float, int]]:
    """What the predictor thinks, and a length ``times`` as long by a spread of its own."""
    rng = np.random.default_rng(seed)
    pairs = zip(rng.uniform(50, 500, n), rng.normal(size=n), strict=True)
    return [(m, max(1, round(m * times * np.exp(spread * z)))) for m, z in pairs]


async def traffic(f: LengthPredictor, n: int, *, times: float, spread: float, seed: int = 0, **given) -> list:
    """Such outputs, one after another."""
    drawn = lengths(n, times=times, spread=spread, seed=seed)
    return [await finished(f, tokens, f"{median} words", **given) for median, tokens in drawn]


@pytest.mark.parametrize(("times", "spread", "most"), [(2.5, 0.9, 100_000), (0.4, 0.2, 100_000), (2.0, 0.6, 600)])
def test_a_model_with_other_lengths_is_learned_and_its_quantiles_hold(times, spread, most) -> None:
    """Coverage over 600 outputs after learning, within four standard errors of both samples."""

    async def main() -> None:
        async with learning() as f:
            await traffic(f, 600, times=times, spread=spread, seed=1, max_tokens=most)
            made = await traffic(f, 600, times=times, spread=spread, seed=2, max_tokens=most)
            meant = np.array([tokens for _, tokens in lengths(600, times=times, spread=spread, seed=2)])
            for level in (0.1, 0.5, 0.8, 0.9) if most > 600 else (0.1, 0.3):  # most of what is longer was cut
                at = int(np.searchsorted(LEVELS, level))
                below = float((meant <= [one.length_prediction.unbounded[at] for one in made]).mean())
                error = 4 * np.sqrt(level * (1 - level) * (1 / 600 + 1 / 300))
                assert below == pytest.approx(level, abs=error)
            model = f.state()["models"]["vicuna-13b"]
            assert model["scale"] == pytest.approx(times, rel=0.2)
            assert model["coverage"]["0.5"] == pytest.approx(0.5, abs=0.12)
            assert model["calibrated_share"] == 1.0

    asyncio.run(main())


def test_without_learning_the_predictor_has_the_last_word() -> None:
    async def main() -> None:
        async with learning(learn=False) as f:
            await traffic(f, 100, times=3, spread=0.3)
            made = await predicted(f, "100 words", max_tokens=100_000)
            assert made.length_prediction.quantiles[12] == pytest.approx(100)
            assert f.state()["finished"] == 0

    asyncio.run(main())


def test_a_new_model_starts_with_the_predictors_estimate_and_is_learned_soon() -> None:
    async def main() -> None:
        async with learning() as f:
            await traffic(f, 200, times=4, spread=0.3, model="talks")
            new = await predicted(f, "100 words", model="new", max_tokens=100_000)
            assert new.length_prediction.quantiles[12] == pytest.approx(100)
            await traffic(f, 16, times=0.25, spread=0.1, model="new")
            soon = await predicted(f, "100 words", model="new", max_tokens=100_000)
            assert 25 < soon.length_prediction.quantiles[12] < 60
            talks = await predicted(f, "100 words", model="talks", max_tokens=100_000)
            assert talks.length_prediction.quantiles[12] == pytest.approx(400, rel=0.15)

    asyncio.run(main())


def test_nothing_is_learned_from_unfinished_or_multiple_outputs() -> None:
    async def main() -> None:
        async with learning() as f:
            for outcome in Outcome:
                made = await predicted(f, "100 words")
                made.generated_tokens = 5
                if outcome is not Outcome.FINISHED:
                    f.on_end(made, outcome, 0.0)
            await finished(f, 5, "100 words", choices=2)
            await finished(f, 0, "100 words")
            assert f.state()["finished"] == 0
            assert f.state()["models"] == {}
            await finished(f, 5, "100 words")
            assert f.state()["finished"] == 1

    asyncio.run(main())


def test_the_same_events_give_the_same_predictions() -> None:
    async def run() -> bytes:
        async with learning() as f:
            await traffic(f, 300, times=1.7, spread=0.4, max_tokens=700)
            return (await predicted(f, "123 words")).length_prediction.quantiles.tobytes()

    assert asyncio.run(run()) == asyncio.run(run())


def test_drift_is_reported_and_soon_corrected() -> None:
    async def main() -> None:
        async with learning() as f:
            await traffic(f, 1000, times=1, spread=0.5)
            assert f.state()["drifts"] == 0
            await traffic(f, 256, times=3, spread=0.5, seed=5)
            state = f.state()
            assert state["drifts"] == 1
            assert state["models"]["vicuna-13b"]["drift"]["ended_since"] <= 256
            made = await predicted(f, "100 words", max_tokens=100_000)
            assert made.length_prediction.quantiles[12] == pytest.approx(300, rel=0.2)

    asyncio.run(main())


@pytest.mark.parametrize("cut", [0.0, 0.3])
def test_drift_alarms_are_as_rare_as_stated(cut: float) -> None:
    """At alpha = 0.05, over 600 independent pairs of samples: within four standard errors."""
    rng, alarms = np.random.default_rng(3), 0
    for _ in range(600):
        x, y = rng.normal(size=512), rng.normal(size=128)
        limit = np.inf if cut == 0 else stats.norm.ppf(1 - cut)
        alarms += differ(np.minimum(x, limit), x >= limit, np.minimum(y, limit), y >= limit, 0.05)
    assert alarms / 600 <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / 600)
    assert alarms > 0


@pytest.mark.parametrize("cut", [False, True])
def test_drift_of_half_a_standard_deviation_is_seen_within_three_windows(cut: bool) -> None:
    rng, drift = np.random.default_rng(4), Drift()
    for miss in rng.normal(size=1500):
        assert not drift.add(min(miss, 1.0) if cut else miss, censored=cut and miss > 1)
    misses = rng.normal(0.5, size=384)
    found = [drift.add(min(miss, 1.0) if cut else miss, censored=cut and miss > 1) for miss in misses]
    assert any(found)


def test_the_tests_of_drift_are_those_of_the_books() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.exponential(1, 80), rng.exponential(1.4, 50)
    assert kolmogorov_smirnov(x, y) == pytest.approx(stats.ks_2samp(x, y).statistic)
    x_cut, y_cut = x > 1.5, y > 1.2
    x, y = np.minimum(x, 1.5).round(1), np.minimum(y, 1.2).round(1)
    book = stats.logrank(stats.CensoredData(x[~x_cut], right=x[x_cut]), stats.CensoredData(y[~y_cut], right=y[y_cut]))
    assert abs(log_rank(x, x_cut, y, y_cut)) == pytest.approx(abs(book.statistic), rel=1e-9)


def test_quantiles_of_what_was_cut_are_kaplan_and_meiers() -> None:
    rng = np.random.default_rng(6)
    values = rng.normal(size=200).round(1)
    cut = rng.random(200) < 0.3
    seen, cdf = kaplan_meier(values, cut)
    found = quantiles(np.repeat(values[:, None], 9, 1), cut, np.ones(200), np.linspace(0.1, 0.9, 9), 1.0)
    known = [seen[np.searchsorted(cdf, p - 1e-12)] for p in np.linspace(0.1, 0.9, 9) if p <= cdf[-1]]
    np.testing.assert_allclose(found[: len(known)], known)
    np.testing.assert_allclose(cumulative_share(values, cut, seen), cdf, atol=1e-12)
    assert quantiles(values[:, None], np.ones(200, bool), np.ones(200), np.array([0.5]), 1.0)[0] > values.max()


def test_rank_correlation_is_kendalls() -> None:
    async def main() -> None:
        async with learning() as f:
            made = await traffic(f, 120, times=1, spread=0.5)
            message = [one.length_prediction.initial_total_tokens for one in made]
            came = [one.generated_tokens for one in made]
            assert f.state()["tau"] == pytest.approx(stats.kendalltau(message, came).statistic)

    asyncio.run(main())


def test_memory_is_bounded_whatever_models_come_and_however_many_finish() -> None:
    async def main() -> None:
        async with learning() as f:
            for _ in range(8):
                await finished(f, 1000, "100 words", model="m0")
            for i in range(1, MAX_MODELS):
                await finished(f, 50, "100 words", model=f"m{i}")
            assert (f.learner.prior("m0") != f.learner.prior("new")).any(), "it is one of the last MAX_MODELS"
            await finished(f, 50, "100 words", model=f"m{MAX_MODELS}")
            np.testing.assert_array_equal(f.learner.prior("m0"), f.learner.prior("new"))
            assert next(iter(f.state()["models"])) == f"m{MAX_MODELS}"

    asyncio.run(main())
    ring = Ring(3)
    for i in range(5 * WINDOW):
        ring.add((i, i, i))
    assert ring.rows[:, 0].tolist() == list(range(4 * WINDOW, 5 * WINDOW))
    assert ring.rows.base.nbytes < 3 * 8 * 2 * WINDOW + 1000


def test_corrected_quantiles_stay_a_distribution_after_any_lengths() -> None:
    rng, learned = np.random.default_rng(7), ModelCorrection(16)
    raw = 100 * np.exp(0.5 * NORMAL)
    for tokens in rng.choice([1, 2, 1 << 20, 100], 400):
        learned.observe(raw, learned.corrected(raw), int(tokens), censored=bool(tokens == 2))
        row = learned.corrected(raw)
        assert np.isfinite(row).all()
        assert row[0] >= 1
        assert (np.diff(row) >= 0).all()


def test_before_anything_has_finished_a_wide_guess_stands_in() -> None:
    learner = Learner(8)
    row = learner.prior("x")
    assert row[12] == pytest.approx(200)
    assert row[20] > 10 * row[4]
