"""Predictions after some tokens: survival alone without the text so far, and never worse than survival with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.predict import (
    BucketEcdf,
    Conditional,
    Conformal,
    Constant,
    Ecdf,
    Ensemble,
    Guarded,
    Lexical,
    LogNormalError,
    Oracle,
    Prompts,
    Quantised,
    Same,
    Samples,
    default,
    load,
    save,
    split,
)
from lengthwise.predict.contract import with_output
from lengthwise.predict.evaluation import evaluate, pinball_losses, scored_lengths
from lengthwise.predict.lexical_model import BandLosses, compared_bands, reading_range

REQUESTS = {"Name the capital of": 8, "Explain the history of": 160, "Write an essay about": 420}


def logged(seed=0, places=40, *, hint=False, text=True) -> Samples:
    """Return the log of the guide; with a ``hint`` the text so far tells the length."""
    rng = np.random.default_rng(seed)
    rows = [
        (f"{ask} country {i}", int(n * rng.lognormal(0, 0.3)) + 1) for i in range(places) for ask, n in REQUESTS.items()
    ]
    tokens = np.array([n for _, n in rows])
    lists = ["".join(f"{i}. x\n" for i in range(1, 1 + n // 60)) if hint else "" for n in tokens]
    output = [begin + "word " * n for begin, n in zip(lists, tokens, strict=True)]
    prompts = Prompts(len(rows), text=[ask for ask, _ in rows], model=["mine"] * len(rows))
    return Samples(prompts, tokens, np.zeros(len(rows), bool), output if text else None)


LOG = logged()
MEMBERS = {
    "constant": Constant,
    "ecdf": Ecdf,
    "buckets": lambda: BucketEcdf(by=("model", "prompt_chars")),
    "lexical": Lexical,
    "conditional": lambda: Conditional(Ecdf()),
    "conformal": lambda: Conformal(Lexical(max_windows=400)),
    "ensemble": lambda: Ensemble([Ecdf(), BucketEcdf(by=("prompt_chars",)), Constant()]),
    "guarded": lambda: Guarded(Ecdf()),
}


@pytest.fixture(scope="module")
def fitted():
    return {name: make().fit(LOG) for name, make in MEMBERS.items()} | {"default": default()}


@pytest.mark.parametrize("name", [*MEMBERS, "default"])
@settings(max_examples=25)
@given(st.lists(st.integers(0, 3000), min_size=6, max_size=6))
def test_tokens_so_far_change_a_prediction_only_as_survival_does(fitted, name, so_far):
    predictor, prompts, t = fitted[name], LOG.prompts.take(np.arange(6)), np.array(so_far)
    first, later = predictor.predict(prompts), predictor.predict(prompts, t)
    np.testing.assert_allclose(later.mean, first.given(t).mean, rtol=1e-9)
    for level in (0.05, 0.5, 0.95):
        np.testing.assert_allclose(later.quantile(level), first.given(t).quantile(level), rtol=1e-9)
    np.testing.assert_allclose(later.mean - t, first.remaining(t), rtol=0.1, atol=2)
    before = t < first.tokens[:, 0]
    np.testing.assert_allclose(later.mean[before], first.mean[before], rtol=1e-9)


@pytest.mark.parametrize(
    "predictor", [Oracle(), Same(300), LogNormalError(0.5), Quantised([1, 100, 1000])], ids=lambda p: type(p).__name__
)
@given(st.integers(0, 900))
def test_the_error_of_an_oracle_does_not_change_with_tokens(predictor, so_far):
    true, uniform = np.array([950, 1000]), np.array([0.3, 0.8])
    first, later = (predictor.peek(true, t, uniform) for t in (0, so_far))
    np.testing.assert_allclose(later.given(so_far).mean, first.given(so_far).mean, rtol=1e-9)


def test_a_few_rows_of_a_log_do_not_make_a_prediction_jump():
    predictor = Lexical().fit(logged(1, text=False))
    essay = Prompts(1, text=["Write an essay about country 7"], model=["mine"])
    first = predictor.predict(essay)
    means = [float(predictor.predict(essay, t).mean[0]) for t in (0, 50, 100)]
    assert max(means) - min(means) < 0.02 * means[0]
    np.testing.assert_allclose(predictor.predict(essay, 400).mean, first.given(400).mean)
    assert predictor.reads_output is None


def losses(predictor, fresh, so_far):
    """Return the pinball loss of reading the text so far, and of the first prediction given the tokens."""
    rows = fresh.take(np.flatnonzero(fresh.output_tokens > so_far))
    t = np.full(len(rows), so_far)
    read = predictor.predict(with_output(rows.prompts, rows.output, rows.output_tokens, t), t)
    known = scored_lengths(rows.output_tokens, rows.censored)[1]
    return [float(pinball_losses(one, known).mean()) for one in (read, predictor.predict(rows.prompts).given(t))]


@cache
def fitted_to(places, *, hint):
    return Lexical(max_windows=2000).fit(logged(2, places, hint=hint))


@pytest.mark.slow
@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("places", [40, 150])
def test_reading_the_text_is_no_worse_than_survival_on_unseen_requests(hint, places):
    predictor, fresh = fitted_to(places, hint=hint), logged(3, 300, hint=hint)
    for so_far in (50, 100, 200, 300, 400):
        read, conditioned = losses(predictor, fresh, so_far)
        assert read <= 1.03 * conditioned, so_far


@pytest.mark.slow
def test_an_informative_text_is_read_and_the_choice_is_saved(tmp_path):
    predictor, fresh = fitted_to(150, hint=True), logged(3, 200, hint=True)
    low, high = predictor.reads_output
    assert low == 50
    read, conditioned = losses(predictor, fresh, 100)
    assert read < 0.8 * conditioned
    assert all(band.repredicted < band.conditioned for band in predictor.held_out_ if band.last <= high)
    save(predictor, tmp_path / "x.lwp")
    loaded = load(tmp_path / "x.lwp")
    assert (loaded.reads_output, loaded.held_out_) == (predictor.reads_output, predictor.held_out_)
    rows = fresh.take(np.flatnonzero(fresh.output_tokens > high + 60))
    beyond = replace(rows.prompts, output_so_far=rows.output)
    np.testing.assert_allclose(
        predictor.predict(beyond, high + 60).mean, predictor.predict(beyond).given(high + 60).mean
    )


@pytest.mark.slow
def test_an_uninformative_text_is_not_read():
    predictor = fitted_to(150, hint=False)
    noted = evaluate(predictor, logged(5, 60), draws=0, clock=None, windows=(0, 100))
    assert noted.windows[1].mae.value <= 1.03 * noted.windows[1].mae_conditioned


def test_bands_are_read_by_their_evidence():
    good, bad = BandLosses(50, 100, 900, 190, 10.0, 12.0, 0.5), BandLosses(101, 200, 900, 190, 12.1, 12.0, 0.5)
    assert good.is_better
    assert not bad.is_better
    assert not replace(good, windows=30).is_better
    assert not replace(good, prompts=30).is_better
    assert not replace(good, half_width=1.3).is_better  # better by more than one standard error, and less than two
    assert reading_range([good, replace(good, first=101, last=200), replace(bad, first=201, last=400)]) == (50, 200)
    assert reading_range([bad, replace(good, first=201, last=400)]) is None  # the first band that fails ends the test
    assert reading_range([bad]) is None
    assert reading_range([]) is None


@pytest.mark.parametrize("prompts", [100, 300, 1000])
@pytest.mark.parametrize("tail", [1.0, 2.0])
def test_text_of_no_use_is_rarely_read_however_many_prompts_there_are(prompts, tail):
    """Losses of both ways are heavy-tailed and have the same mean; a prompt has windows in up to five bands."""
    rng, draws = np.random.default_rng([prompts, int(tail)]), 600
    so_far = np.repeat([50, 100, 150, 200, 300, 400, 600, 800, 1200, 1600], prompts)
    prompt = np.tile(np.arange(prompts), 10)
    read = 0
    for _ in range(draws):
        common = rng.lognormal(0, tail, (2, prompts))[:, prompt]
        losses = common * rng.lognormal(0, 0.3, common.shape)
        read += reading_range(compared_bands(so_far, prompt, np.ones(len(prompt)), losses, 50)) is not None
    assert read <= 0.05 * draws + 3 * (0.05 * 0.95 * draws) ** 0.5


def test_text_that_helps_every_request_a_little_is_read():
    rng, prompts = np.random.default_rng(0), 300
    so_far, prompt = np.repeat([50, 100, 150, 200], prompts), np.tile(np.arange(prompts), 4)
    conditioned = rng.lognormal(3, 1, len(prompt))
    losses = np.stack([0.9 * conditioned, conditioned])
    assert reading_range(compared_bands(so_far, prompt, np.ones(len(prompt)), losses, 50)) == (50, 200)


@pytest.fixture(scope="module")
def recorded(shared):
    text = shared("data/text")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        import _texts

        return split(_texts.wide(text), 0.2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("requests", [300, 600])
def test_reading_is_no_worse_than_survival_on_recorded_requests(recorded, requests):
    """Mathematics, code and chats, whose few very long outputs mislead a model that learns from so few requests."""
    learned, fresh = (
        part.take(np.sort(np.random.default_rng(0).permutation(np.flatnonzero(~part.censored))[:n]))
        for part, n in ((recorded.train, requests), (recorded.test, 400))
    )
    for window in evaluate(Lexical().fit(learned), fresh, draws=0, clock=None, windows=(50, 100, 200)).windows:
        assert window.mae.value <= 1.03 * window.mae_conditioned, window.tokens
