"""A product of a vector and a matrix is a kernel of its own: one token keeps its measured time."""

from dataclasses import replace

import numpy as np
import pytest
from made_profiles import GPU, LIMITS, LONGEST, MODEL, NODE, profile

from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.profile import PRODUCTS

QUICKER = 0.6


def quick_vectors(times=QUICKER):
    """A profile in which products of one token take so many times what the curve through the others predicts."""
    rows = profile(noise=0.01)
    single = (rows["tokens"] == 1) & np.isin(rows["operator"], PRODUCTS)
    return rows, replace(rows, columns={**rows.columns, "seconds": rows["seconds"] * np.where(single, times, 1.0)})


def tables(rows, tp=1, estimator="auto"):
    return fit_profile(rows, Target(MODEL, GPU, NODE, Parallelism(tp), LIMITS, LONGEST), estimator=estimator)


def measured_s(rows, part=("qkv projection", "output projection", "mlp up", "mlp down")):
    taken = (rows["tokens"] == 1) & np.isin(rows["operator"], part)
    return rows["seconds"][taken].sum()


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["auto", "physics", "linear", "monotone", "tables"])
def test_one_token_takes_its_measured_time_and_more_tokens_the_fit(estimator):
    plain, quick = quick_vectors()
    (reported, _), (usual, _) = tables(quick, estimator=estimator), tables(plain, estimator=estimator)
    less = measured_s(plain) - measured_s(quick)
    assert usual.layer_s[1] - reported.layer_s[1] == pytest.approx(less, rel=0.05)  # noise
    assert usual.head_s[1] - reported.head_s[1] == pytest.approx(
        measured_s(plain, ["lm head"]) - measured_s(quick, ["lm head"]), rel=0.05
    )
    assert reported.layer_s[2:] == pytest.approx(usual.layer_s[2:])
    assert reported.head_s[2:] == pytest.approx(usual.head_s[2:])


def test_one_token_never_takes_longer_than_more():
    _, slow = quick_vectors(times=3.0)
    reported, _ = tables(slow)
    assert reported.layer_s[1] <= reported.layer_s[2] * 1.001


def test_errors_cover_only_what_is_fitted():
    """One token is measured, not predicted by a curve: it neither blurs the curve nor counts among its errors."""
    plain, quick = quick_vectors()
    (_, report), (_, usual) = tables(quick), tables(plain)
    assert report.operators == usual.operators


def test_another_degree_is_predicted_by_the_physics_of_all_tokens():
    plain, quick = quick_vectors()
    (reported, _), (usual, _) = tables(quick, tp=2), tables(plain, tp=2)
    assert reported.layer_s[1] == pytest.approx(usual.layer_s[1], rel=0.1)
