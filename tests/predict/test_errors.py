"""Oracles, and errors that have a name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_lengths import world

from lengthwise.predict import BinNeighbour, Confusion, LogNormalError, Oracle, Quantised, Reversed, Same, Truthful
from lengthwise.predict.oracle import uniform_draws
from lengthwise.schema.errors import InputError

EDGES = [0, 100, 200, 300, 400]
TRUE = np.repeat([50, 150, 250, 350], 5000)
UNIFORM = uniform_draws(0, len(TRUE))
MODELS = {
    "oracle": Oracle(),
    "lognormal": LogNormalError(0.5),
    "lognormal_fading": LogNormalError(0.5, 0.2, half_life_tokens=100),
    "neighbour": BinNeighbour(EDGES, 0.2),
    "confusion": Confusion(EDGES, np.full((4, 4), 0.25)),
    "quantised": Quantised(EDGES),
    "same": Same(),
    "reversed": Reversed(),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_is_truthful_and_its_error_is_drawn_once(model):
    assert isinstance(model, Truthful)
    complete = model.peek(TRUE, 10, UNIFORM)
    assert len(complete) == len(TRUE)
    some = np.array([3, 7000, 19_999])
    np.testing.assert_array_equal(model.peek(TRUE[some], 10, UNIFORM[some]).tokens, complete.tokens[some])


def test_luck_is_the_same_for_the_first_whatever_the_number():
    np.testing.assert_array_equal(uniform_draws(3, 10), uniform_draws(3, 1000)[:10])
    assert not (uniform_draws(3, 10) == uniform_draws(4, 10)).any()


def test_the_oracle_knows():
    np.testing.assert_array_equal(Oracle().peek(TRUE, 0, UNIFORM).mean, TRUE)


def test_lognormal_is_wrong_by_the_stated_factor():
    message = LogNormalError(0.5, bias=0.3, exact_lengths=True).peek(TRUE, 0, UNIFORM).mean
    wrong = np.log(message / TRUE)
    assert wrong.mean() == pytest.approx(0.3, abs=0.02)
    assert wrong.std() == pytest.approx(0.5, rel=0.03)
    warning = LogNormalError(0.5).peek(TRUE, 0, UNIFORM)
    inside = (warning.quantile(0.05) <= TRUE) & (warning.quantile(0.95) >= TRUE)
    assert inside.mean() == pytest.approx(0.9, abs=0.01)


def test_errors_fade_with_their_half_life():
    fading = LogNormalError(0.5, half_life_tokens=50, exact_lengths=True)
    now, later = (np.abs(np.log(fading.peek(TRUE, a, UNIFORM).mean / TRUE)) for a in (0, 50))
    np.testing.assert_allclose(later, now / 2, atol=1e-9)
    neighbour = BinNeighbour(EDGES, 0.4, half_life_tokens=10)
    true = neighbour.class_of(TRUE)
    wrong = [(neighbour.predicted_class(true, a, UNIFORM) != true).mean() for a in (0, 10, 20)]
    np.testing.assert_allclose(wrong, [0.6, 0.3, 0.15], atol=0.02)


@given(st.floats(0, 0.5), st.floats(0, 1))
def test_neighbours_occur_as_often_as_in_the_paper(p, split):
    model = BinNeighbour(EDGES, p, split)
    true = np.repeat(np.arange(4), 5000)
    step = model.predicted_class(true, 0, UNIFORM) - true
    for inner in (1, 2):
        assert (step[true == inner] == -1).mean() == pytest.approx(2 * p * split, abs=0.03)
        assert (step[true == inner] == 1).mean() == pytest.approx(2 * p * (1 - split), abs=0.03)
    assert (step[true == 0] == 1).mean() == pytest.approx(p, abs=0.03)
    assert (step[true == 3] == -1).mean() == pytest.approx(p, abs=0.03)
    assert set(np.unique(step)) <= {-1, 0, 1}


def test_neighbour_is_certain_of_the_class_it_predicts():
    message = BinNeighbour(EDGES, 0.3).peek(TRUE, 0, UNIFORM)
    np.testing.assert_allclose(np.unique(message.mean.round()), [50, 150, 250, 350], atol=1)


def test_confusion_follows_its_matrix():
    matrix = np.array([[0.9, 0.1, 0, 0], [0.2, 0.5, 0.3, 0], [0, 0, 1, 0], [0.25, 0.25, 0.25, 0.25]])
    model = Confusion(EDGES, matrix.tolist())
    true = model.class_of(TRUE)
    message = model.predicted_class(true, 0, UNIFORM)
    shares = [[((message == j) & (true == i)).sum() / 5000 for j in range(4)] for i in range(4)]
    np.testing.assert_allclose(shares, matrix, atol=0.02)


def test_classes_are_closed_above_and_take_what_lies_outside():
    np.testing.assert_array_equal(Quantised(EDGES).class_of([1, 100, 101, 400, 9999]), [0, 0, 1, 3, 3])


def test_fitted_classes_are_equally_full_and_know_what_is_in_them():
    samples = world(4000)
    model = Quantised(4).fit(samples)
    counts = np.bincount(model.class_of(samples.output_tokens))
    np.testing.assert_allclose(counts, 1000, rtol=0.05)
    message = model.peek(samples.output_tokens, 0, uniform_draws(0, 4000))
    for i in range(4):
        rows = model.class_of(samples.output_tokens) == i
        assert message.mean[rows][0] == pytest.approx(samples.output_tokens[rows].mean(), rel=0.12)
    with pytest.raises(InputError, match="fit"):
        Quantised(4).peek(TRUE, 0, UNIFORM)


def test_adversaries():
    assert (Same(99).peek(TRUE, 0, UNIFORM).mean == 99).all()
    message = Reversed().peek(np.array([1, 10, 100, 1000]), 0, UNIFORM[:4]).mean
    assert (np.diff(message) < 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogNormalError(-1),
        lambda: LogNormalError(1, half_life_tokens=0),
        lambda: BinNeighbour(EDGES, 0.6),
        lambda: BinNeighbour([5], 0.1),
        lambda: BinNeighbour([5, 5, 6], 0.1),
        lambda: Confusion(EDGES, [[1, 0], [0, 1]]),
        lambda: Confusion(2, [[1, 0], [0.5, 0.4]]),
        lambda: Confusion(2, [[1, 0], [1]]),
        lambda: Quantised(0),
        lambda: Same(0),
        lambda: Reversed(0),
    ],
)
def test_what_makes_no_error_model_is_refused(make):
    with pytest.raises(InputError):
        make()
