"""What each predictor learns, and what it makes of cut outputs, one length and strangers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_lengths import Misled, covered, world

from lengthwise.predict import (
    LEVELS,
    BucketEcdf,
    Conditional,
    Conformal,
    Constant,
    Ecdf,
    Ensemble,
    Guarded,
    LengthDistribution,
    Predictor,
    Prompts,
    Samples,
    load,
    save,
)
from lengthwise.predict.contract import split_rows as holdout
from lengthwise.predict.contract import with_output
from lengthwise.predict.distribution import length_quantiles, mean_length
from lengthwise.predict.features import text_so_far
from lengthwise.predict.sample_files import split as read_split
from lengthwise.predict.wrappers import pinball
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.statistics import kaplan_meier

TRAIN, TEST = world(3000, 1), world(3000, 2)
MEMBERS = {
    "constant": Constant,
    "ecdf": Ecdf,
    "buckets": BucketEcdf,
    "conditional": lambda: Conditional(BucketEcdf()),
    "conformal": lambda: Conformal(BucketEcdf()),
    "ensemble": lambda: Ensemble([Constant(), Ecdf(), BucketEcdf()]),
    "guarded": lambda: Guarded(BucketEcdf()),
}


def lengths(values, censored=None):
    n = len(values)
    return Samples(Prompts(n), np.asarray(values), np.zeros(n, bool) if censored is None else np.asarray(censored))


@pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS)
def test_is_a_predictor_that_must_learn_first(make):
    predictor = make()
    assert isinstance(predictor, Predictor)
    with pytest.raises(InputError, match="fit"):
        predictor.predict(Prompts(1))
    assert predictor.fit(TRAIN) is predictor


@pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS)
def test_one_constant_length_is_learned(make):
    message = make().fit(lengths([70] * 50)).predict(Prompts(2))
    np.testing.assert_allclose(message.mean, 70, rtol=0.02)


@pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS)
def test_lengths_that_were_all_truncated_are_predicted_to_be_longer(make):
    message = make().fit(lengths([100] * 60, [True] * 60)).predict(Prompts(1))
    assert message.mean[0] > 110


@pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS)
def test_strangers_and_the_empty_get_an_answer(make):
    predictor = make().fit(TRAIN)
    strange = Prompts(3, ["", "\u6f22\u5b57 \U0001f600", "x" * 100_000], np.array([1, 5, 10**9]), ["", "b", "new"])
    for prompts in (strange, Prompts(3)):
        message = predictor.predict(prompts, np.array([0, 10, 10**6]))
        assert len(message) == 3
        assert (message.tokens[:, 0] >= [1, 11, 10**6 + 1]).all()
    assert len(predictor.predict(Prompts(0))) == 0


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=40))
def test_kaplan_meier_against_its_definition(rows):
    x, cut = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    seen, cdf = kaplan_meier(x, cut)
    alive = 1.0
    for value, reached in zip(sorted({r[0] for r in rows if not r[1]}), cdf, strict=True):
        alive *= 1 - ((x == value) & ~cut).sum() / (x >= value).sum()
        assert reached == pytest.approx(1 - alive)
    assert (np.diff(seen) > 0).all()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_without_cuts_it_is_the_empirical_distribution(values):
    x = np.array(values)
    got = length_quantiles(x, np.zeros(len(x), bool), LEVELS)
    np.testing.assert_allclose(got, np.quantile(x, LEVELS, method="inverted_cdf"))
    assert mean_length(x, np.zeros(len(x), bool)) == pytest.approx(x.mean())


def test_the_tail_beyond_the_last_cut_is_not_pretended_away():
    """A quarter was cut at 100: a quarter of the distribution lies above 100, and some of it far."""
    tokens = length_quantiles([50] * 75 + [100] * 25, [False] * 75 + [True] * 25, LEVELS)
    assert (tokens[LEVELS <= 0.75] == 50).all()
    assert (tokens[LEVELS > 0.76] > 100).all()
    assert tokens[-1] > 400
    assert mean_length([50] * 75 + [100] * 25, [False] * 75 + [True] * 25) == pytest.approx(75)


def test_cut_samples_do_not_shorten_what_was_seen_to_its_end():
    full, cut = world(8000, 3), world(8000, 3, cap=200)
    honest, naive = Ecdf().fit(cut), Ecdf().fit(Samples(cut.prompts, cut.output_tokens, np.zeros(8000, bool)))
    truth = Ecdf().fit(full)
    anyone = Prompts(1)
    assert naive.predict(anyone).mean[0] < 0.85 * truth.predict(anyone).mean[0]
    assert honest.predict(anyone).mean[0] == pytest.approx(truth.predict(anyone).mean[0], rel=0.1)


def test_constant_predicts_the_mean_or_its_given_value():
    assert Constant().fit(TRAIN).predict(Prompts(1)).mean[0] == pytest.approx(TRAIN.output_tokens.mean())
    assert Constant(12).predict(Prompts(1)).mean[0] == 12
    with pytest.raises(InputError, match="at least 1"):
        Constant(0)


def test_ecdf_knows_its_models():
    message = Ecdf().fit(TRAIN).predict(Prompts(3, model=["a", "b", "?"])).median
    assert message[1] / message[0] == pytest.approx(2, rel=0.1)
    assert message[0] < message[2] < message[1]


def test_buckets_know_more_than_models_and_shrink_where_few_are_known():
    ecdf, buckets = Ecdf().fit(TRAIN), BucketEcdf().fit(TRAIN)
    loss = {type(p): pinball(p.predict(TEST.prompts).at(LEVELS).tokens, TEST) for p in (ecdf, buckets)}
    assert loss[BucketEcdf] < 0.85 * loss[Ecdf]
    few = Samples(Prompts(101, model=["a"] * 100 + ["b"]), np.array([100] * 100 + [1000]), np.zeros(101, bool))
    assert BucketEcdf(by=("model",)).fit(few).predict(Prompts(1, model=["b"])).median[0] < 200
    bold = BucketEcdf(by=("model",), shrink=0).fit(few)
    assert bold.predict(Prompts(1, model=["b"])).median[0] == 1000
    with pytest.raises(UnknownNameError, match="prompt_tokens"):
        BucketEcdf(by=("prompt_token",))


def test_conditional_predicts_once_and_then_uses_survival():
    class First:
        requested: ClassVar[list[object]] = []

        def fit(self, samples):
            return self

        def predict(self, prompts, tokens_so_far=0):
            self.requested.append(tokens_so_far)
            return LengthDistribution.of(np.tile(np.linspace(1, 201, 25), (len(prompts), 1)), np.linspace(0, 1, 25))

    message = Conditional(First()).predict(Prompts(1), 101)
    assert First.requested == [0]
    assert message.mean[0] == pytest.approx(151, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [Misled, Constant, BucketEcdf, Ecdf])
@pytest.mark.parametrize("age", [0, 50, 100])
def test_conformal_intervals_have_the_stated_coverage(inner, age):
    predictor = Conformal(inner(), share=0.6, window=20_000).fit(world(30_000, 4))
    assert 0.88 <= covered(predictor, world(20_000, 5), age) <= 0.92


@pytest.mark.parametrize("inner", [Misled, BucketEcdf, Ecdf])
def test_between_two_ages_they_nearly_do(inner):
    predictor = Conformal(inner(), share=0.5).fit(world(8000, 4))
    assert 0.85 <= covered(predictor, world(8000, 5), 130) <= 0.95


def test_without_it_the_misled_one_does_not():
    assert covered(Misled(), TEST) < 0.2


def test_every_level_becomes_honest():
    predictor, fresh = Conformal(Misled()).fit(world(8000, 6)), world(8000, 7)
    message = predictor.predict(fresh.prompts)
    for level in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99):
        below = (fresh.output_tokens <= message.quantile(level)).mean()
        assert below == pytest.approx(level, abs=0.03), level


def test_conformal_takes_cut_outputs_for_what_they_are():
    honest = Conformal(Misled(), prefit=True).fit(world(6000, 8, cap=200))
    assert 0.87 <= covered(honest, TEST) <= 0.95


def test_observing_follows_a_change_of_the_world():
    predictor = Conformal(BucketEcdf(), window=1000).fit(TRAIN)
    longer = Samples(TEST.prompts, TEST.output_tokens * 3, TEST.censored)
    assert covered(predictor, longer) < 0.75
    for start in range(0, 3000, 50):
        part = longer.take(np.arange(start, start + 50))
        predictor.observe(part.prompts, part.output_tokens)
    assert 0.87 <= covered(predictor, longer) <= 0.93
    assert len(predictor.scores_) == 1000


def test_the_ensemble_finds_the_best_member():
    known = Ensemble([Constant(), Ecdf(), BucketEcdf()]).fit(TRAIN)
    assert known.weights_.argmax() == 2
    assert known.weights_.sum() == pytest.approx(1)
    message = pinball(known.predict(TEST.prompts).tokens, TEST)
    alone = min(pinball(m.predict(TEST.prompts).at(LEVELS).tokens, TEST) for m in known.members)
    assert message < alone * 1.01
    even = Ensemble([Constant(10), Constant(30)], weights=[1, 1]).fit(TRAIN)
    assert even.predict(Prompts(1)).mean[0] == pytest.approx(20)
    for wrong in ([1], [-1, 2], [0, 0], [np.nan, 1]):
        with pytest.raises(InputError, match="weights"):
            Ensemble([Constant(), Ecdf()], weights=wrong)


class Sick:
    """Answers whatever it was given."""

    def __init__(self, answer):
        self.answer = answer

    def fit(self, samples):
        return self

    def predict(self, prompts, tokens_so_far=0):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "fault", "rows"),
    [
        (ValueError("out of memory"), "raised", 3),
        (np.array([np.nan, 50.0, 60.0]), "not_a_number", 1),
        (np.array([-5.0, 0.0, 60.0]), "not_positive", 2),
        (np.array([1e30, np.inf, 60.0]), "absurd", 2),
        (np.array([5.0, 50.0, 60.0]), "already_passed", 1),
        (np.array([50.0, 60.0]), "shape", 3),
        (np.zeros((3, 2, 2)), "shape", 3),
        (None, "shape", 3),
        ("sixty", "raised", 3),
        (np.array(60.0), "shape", 3),
    ],
    ids=str,
)
def test_guarded_falls_back_row_by_row_and_counts(answer, fault, rows):
    guarded = Guarded(Sick(answer), Constant(300)).fit(TRAIN)
    message = guarded.predict(Prompts(3), 10)
    assert message.mean[2] == pytest.approx(300 if rows == 3 else 60)
    assert (np.isclose(message.mean, 300)).sum() == rows
    assert {name: count for name, count in guarded.faults_.items() if count} == {fault: rows}


def test_guarded_looks_at_quantiles_too():
    class Loose:
        tokens, levels = np.array([[50.0, 40.0], [50.0, 70.0]]), np.array([0.0, 1.0])

    guarded = Guarded(Sick(Loose()), Constant(300)).fit(TRAIN)
    assert guarded.predict(Prompts(2)).mean == pytest.approx([300, 60])
    assert guarded.faults_["disordered"] == 1


def test_guarded_survives_one_that_cannot_be_fitted():
    class Unfit(Sick):
        def fit(self, samples):
            raise RuntimeError("no")

    guarded = Guarded(Unfit(None)).fit(TRAIN)
    assert guarded.predict(Prompts(4)).mean[0] > 50
    assert guarded.faults_["raised"] == 4
    assert "no" in guarded.last_error_


@pytest.mark.parametrize("bad", [[0], [-1], [1.5], [np.nan]])
def test_samples_without_a_length_are_refused(bad):
    with pytest.raises(InputError, match=r"output_tokens must be"):
        lengths(bad)


def test_an_unnamed_model_is_unknown():
    samples = Samples(Prompts(4, model=["a", None, "a", None]), np.array([5, 50, 5, 50]), np.zeros(4, bool))
    found = Ecdf().fit(samples)
    assert list(samples.prompts.model) == ["a", "unknown", "a", "unknown"]
    assert found.predict(Prompts(2, model=["a", None])).median.tolist() == [5, 50]


def test_lengths_are_numbers():
    with pytest.raises(InputError, match="output_tokens must be whole numbers; among them is 'many'"):
        Samples(Prompts(2), ["3", "many"], np.zeros(2, bool))


class Wavers(Misled):
    """Is uncertain about prompts of odd length alone."""

    def predict(self, prompts, tokens_so_far=0):
        wide = np.where(prompts.prompt_tokens % 2, 1.5, 0.05)[:, None]
        message = LengthDistribution.of(np.exp(4 + wide * (2 * LEVELS - 1)))
        return message.given(tokens_so_far)


def test_the_uncertainty_of_a_conformal_is_that_of_its_window_and_is_saved(tmp_path):
    known = world(300, cap=60)
    fitted = Conformal(BucketEcdf()).fit(known)
    save(fitted, tmp_path / "x.lwp")
    loaded = load(tmp_path / "x.lwp")
    short = Samples(Prompts(41, prompt_tokens=np.full(41, 9)), np.full(41, 20), np.zeros(41, bool))
    for one in (fitted, loaded):
        one.observe(short.prompts, short.output_tokens)
    for age in (0, 50):
        pair = [one.predict(known.prompts, age).tokens for one in (fitted, loaded)]
        np.testing.assert_allclose(pair[0], pair[1], rtol=1e-4)
    wavers = Conformal(Wavers(), prefit=True).fit(known)
    top = wavers.predict(known.prompts).tokens[:, -1]
    narrow = Prompts(41, prompt_tokens=np.full(41, 1000))
    wavers.observe(narrow, np.full(41, 55))
    np.testing.assert_allclose(wavers.predict(known.prompts).tokens[:, -1], top, rtol=0.2)


def test_equal_prompts_stand_on_one_side_however_they_are_written():
    n = 60
    texts = [f" Prompt {row // 3} " if row % 3 else f"PROMPT {row // 3}" for row in range(n)]
    samples = Samples(Prompts(n, texts), np.full(n, 5), np.zeros(n, bool))
    parts = read_split(samples, 0.3)
    assert parts.prompts == n // 3
    for own, out in (holdout(samples, 0.3, 0), (parts.train.prompts.text, parts.test.prompts.text)):
        sides = [
            {texts[x].strip().lower() if isinstance(x, np.integer) else x.strip().lower() for x in side}
            for side in (own, out)
        ]
        assert not sides[0] & sides[1]


@given(st.text(max_size=40), st.integers(1, 30), st.integers(0, 40))
def test_partial_output_is_cut_in_one_place(text, tokens, so_far):
    known = with_output(Prompts(1), [text], np.array([tokens]), np.array([so_far]))
    assert list(known.output_so_far) == [text_so_far(text, tokens, so_far)]
