"""Errors are of points that were not learnt from, and larger where nothing was measured around them."""

import numpy as np
import pytest
from made_profiles import planted

from lengthwise.cost.estimators._folds import held_out, interior
from lengthwise.cost.estimators._judge import judge
from lengthwise.cost.estimators._learners import LEARNERS
from lengthwise.schema.errors import ProfileError


class Spy:
    """Learns nothing; notes of every question whether its point was among those shown."""

    def __init__(self):
        self.asked = 0

    def __call__(self, points):
        shown = {tuple(place) for place in np.concatenate([points.shape, points.axes], axis=1)}

        def told(at):
            self.asked += len(at)
            assert not shown & {tuple(place) for place in np.concatenate([at.shape, at.axes], axis=1)}
            return np.ones(len(at))

        return told


@pytest.mark.parametrize("operator", ["mlp up", "prefill attention", "decode attention"])
def test_no_held_out_point_is_ever_shown(operator):
    points, spy = planted(operator), Spy()
    held = held_out("spy", spy, points)
    assert spy.asked >= interior(points).sum()
    assert len(held.inside) == interior(points).sum()


def test_the_outermost_points_are_only_told_as_beyond():
    points = planted("decode attention")
    inner = points.take(interior(points))
    assert inner.axes.max(axis=0).tolist() == [64, 4096]
    assert inner.axes.min(axis=0).tolist() == [4, 256]


@pytest.mark.parametrize("name", ["monotone", "tables", "linear"])
def test_errors_beyond_the_points_are_larger_than_between_them(name):
    points = planted("mlp up", noise=0.01)
    bent = type(points)(**{**vars(points), "seconds": points.seconds * (1 + (points.axes[:, 0] / 500) ** 2)})
    held = held_out(name, LEARNERS[name], bent)
    assert np.median(np.abs(held.beyond)) > 2 * np.median(np.abs(held.inside))


def test_auto_takes_the_smallest_error_on_unseen_points():
    points = planted("mlp up", noise=0.02)
    judged = judge(points, "auto", beyond=False, elsewhere=False)
    sds = {
        n: np.sqrt(np.mean(held_out(n, LEARNERS[n], points).inside ** 2))
        for n in ("physics", "tables", "linear")
    }
    assert judged.estimator == min(sds, key=sds.get) == "physics"
    assert judged.log_sd == pytest.approx(sds["physics"])


def test_only_physics_speaks_of_other_shapes_and_with_twice_its_error():
    points = planted("mlp up", noise=0.02)
    here, far = (judge(points, "physics", beyond=True, elsewhere=away) for away in (False, True))
    assert far.log_sd == pytest.approx(2 * here.log_sd)
    with pytest.raises(ProfileError, match="only the estimator physics"):
        judge(points, "monotone", beyond=False, elsewhere=True)
