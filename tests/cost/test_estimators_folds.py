"""Errors are of points that were not fitted to, and larger where nothing was measured around them."""

import numpy as np
import pytest
from made_profiles import planted

from lengthwise.cost.estimators.cross_validation import (
    Validation,
    cross_validate,
    fit_validated,
    interior,
    nested_choice,
)
from lengthwise.cost.estimators.fitters import FITTERS
from lengthwise.schema.errors import ProfileError


class Spy:
    """Learns nothing; notes of every question whether its point was among those shown."""

    def __init__(self):
        self.requested = 0

    def __call__(self, points):
        shown = {tuple(place) for place in np.concatenate([points.shape, points.axes], axis=1)}

        def reported(at):
            self.requested += len(at)
            assert not shown & {tuple(place) for place in np.concatenate([at.shape, at.axes], axis=1)}
            return np.ones(len(at))

        return reported


@pytest.mark.parametrize("operator", ["mlp up", "prefill attention", "decode attention"])
def test_no_held_out_point_is_fitted(operator):
    points, spy = planted(operator), Spy()
    held_out = cross_validate("spy", spy, points)
    assert spy.requested >= interior(points).sum()
    assert len(held_out.inside) == interior(points).sum()


def test_the_outermost_points_are_not_interior():
    points = planted("decode attention")
    inner = points.take(interior(points))
    assert inner.axes.max(axis=0).tolist() == [64, 4096]
    assert inner.axes.min(axis=0).tolist() == [4, 256]


@pytest.mark.parametrize("name", ["monotone", "tables", "linear"])
def test_errors_beyond_the_points_are_larger_than_between_them(name):
    points = planted("mlp up", noise=0.01)
    bent = type(points)(**{**vars(points), "seconds": points.seconds * (1 + (points.axes[:, 0] / 500) ** 2)})
    held_out = cross_validate(name, FITTERS[name], bent)
    assert np.median(np.abs(held_out.out_of_range)) > 2 * np.median(np.abs(held_out.inside))


def test_auto_takes_the_smallest_error_on_unseen_points():
    points = planted("mlp up", noise=0.02)
    judged = fit_validated(points, "auto", out_of_range=False)
    sds = {
        n: np.sqrt(np.mean(cross_validate(n, FITTERS[n], points).inside ** 2)) for n in ("physics", "tables", "linear")
    }
    assert judged.estimator == min(sds, key=sds.get) == "physics"
    assert min(sds.values()) <= judged.log_sd <= max(sds.values())


def test_the_best_of_many_guesses_is_reported_as_a_guess():
    """Of 40 estimators that guess, one is lucky; judged on points that did not choose it, it is a guess again."""
    lucky, honest = [], []
    for seed in range(50):
        rng, half = np.random.default_rng(seed), np.arange(40) % 2
        inside = np.zeros(40, dtype=np.int64)
        guesses = {str(i): Validation(rng.standard_normal(40), inside, half) for i in range(40)}
        lucky.append(min(np.std(one.inside) for one in guesses.values()))
        honest.append(np.std(nested_choice(guesses, out_of_range=False).inside))
    assert np.mean(lucky) < 0.8
    assert np.mean(honest) == pytest.approx(1, abs=0.05)


def test_both_halves_of_a_place_agree_among_estimators():
    points = planted("prefill attention", noise=0.02)
    halves = [cross_validate(name, FITTERS[name], points).half for name in ("physics", "tables", "linear")]
    assert all(np.array_equal(halves[0], other) for other in halves[1:])
    assert 0 < halves[0].mean() < 1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_too_few_points_have_no_error(n):
    judged = fit_validated(planted("mlp up", tokens=2 ** np.arange(n)), "auto", out_of_range=True)
    assert judged.log_sd is None
    assert judged.summary() is None


@pytest.mark.parametrize(("carried", "factor"), [(["tp"], 1.6), (["gpu"], 2.3), (["tp", "model"], 2.4)])
def test_only_physics_predicts_other_shapes_and_with_a_larger_error(carried, factor):
    points = planted("mlp up", noise=0.02)
    near, far = (fit_validated(points, "physics", out_of_range=True, transfers=what) for what in ((), carried))
    assert far.log_sd == pytest.approx(factor * near.log_sd)
    assert near.summary() is not None
    assert far.summary() is None
    with pytest.raises(ProfileError, match="only the estimator physics"):
        fit_validated(points, "monotone", out_of_range=False, transfers=carried)
