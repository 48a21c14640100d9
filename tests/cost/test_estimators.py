"""Each estimator recovers a law that was planted; only physics goes beyond what was measured."""

import numpy as np
import pytest
from made_profiles import FACTORS, LAYER, NODE, TOKENS, planted

from lengthwise import catalog
from lengthwise.cost.estimators.fitters import FITTERS, fit_physics, fit_tables, interpolate_nested
from lengthwise.cost.estimators.points import PARTS, combined, concatenate, kernel_points, slopes
from lengthwise.cost.operator_work import kernels_of


@pytest.mark.parametrize("operator", [*LAYER, "lm head", "prefill attention", "decode attention"])
def test_physics_recovers_planted_constants_through_noise(operator):
    points = planted(operator, noise=0.01)
    error = np.abs(fit_physics(points)(points) / combined(points.parts, FACTORS) - 1)
    assert np.median(error) < 0.01
    assert error.max() < 0.05


def test_slopes_are_what_a_small_change_of_a_factor_adds():
    points = planted("decode attention")
    for i in range(len(PARTS)):
        more, less = (FACTORS * np.exp(sign * 1e-5 * (np.arange(len(PARTS)) == i)) for sign in (1, -1))
        change = (combined(points.parts, more) - combined(points.parts, less)) / 2e-5
        assert slopes(points.parts, FACTORS)[:, i] == pytest.approx(change, rel=1e-5, abs=1e-12)


def test_outliers_pull_the_physics_little():
    points = planted("mlp up", noise=0.01)
    seconds = points.seconds * np.where(np.arange(len(points)) % 9 == 4, 3.0, 1.0)
    off = fit_physics(type(points)(**{**vars(points), "seconds": seconds}))(points) / points.seconds - 1
    assert np.median(np.abs(off)) < 0.03


def test_physics_fitted_on_two_degrees_predicts_a_third():
    seen, unseen = concatenate([planted("mlp up", 1, 0.01), planted("mlp up", 2, 0.01)]), planted("mlp up", 4)
    assert np.abs(fit_physics(seen)(unseen) / unseen.seconds - 1).max() < 0.05


def test_physics_fitted_on_small_steps_predicts_large_ones():
    small = planted("mlp up", tokens=TOKENS[TOKENS <= 512], noise=0.01)
    large = planted("mlp up", tokens=np.array([1024, 2048, 8192]))
    assert np.abs(fit_physics(small)(large) / large.seconds - 1).max() < 0.1


def test_a_part_without_rows_has_the_rooflines_constant():
    factors = dict(zip(PARTS, fit_physics(planted("norms")).factors, strict=True))
    assert factors["network"] == 1.0
    assert factors["memory"] == pytest.approx(FACTORS[PARTS.index("memory")], rel=0.02)


@pytest.mark.parametrize("name", ["monotone", "tables"])
@pytest.mark.parametrize("operator", ["mlp up", "prefill attention", "decode attention"])
def test_interpolation_goes_through_its_points(name, operator):
    points = planted(operator)
    assert FITTERS[name](points)(points) == pytest.approx(points.seconds, rel=1e-3)


@pytest.mark.parametrize("name", ["monotone", "tables"])
def test_interpolation_predicts_points_between_its_own(name):
    between = planted("mlp up", tokens=np.array([3, 50, 300, 1500]))
    assert FITTERS[name](planted("mlp up"))(between) == pytest.approx(between.seconds, rel=0.05)


def test_linear_recovers_a_line_of_each_batch():
    points = planted("decode attention")
    a, b = 1e-6 * (1 + points.batch), 2e-10 * (1 + 1 / points.batch)
    line = type(points)(**{**vars(points), "seconds": a + b * points.total})
    assert FITTERS["linear"](line)(line) == pytest.approx(line.seconds, rel=1e-6)


@pytest.mark.slow
def test_forest_is_near_its_points_and_constant_beyond_them():
    pytest.importorskip("sklearn")
    points = planted("mlp up")
    forest = FITTERS["forest"](points)
    assert np.median(np.abs(forest(points) / points.seconds - 1)) < 0.05
    beyond = forest(planted("mlp up", tokens=np.array([4096, 8192])))
    assert beyond[0] == beyond[1]


def test_tables_of_a_model_independent_kernel_interpolate_shapes():
    kernels = kernels_of(catalog.gpu("H100"), "bfloat16")
    m, n, k = (x.ravel() for x in np.meshgrid([1, 16, 64, 256, 1024, 4096], [1024, 4096, 16384], [1024, 4096, 16384]))
    columns = {"tokens": m, "n": n, "k": k}
    bare = kernel_points("gemm", columns, kernels, NODE)
    seen = kernel_points("gemm", {**columns, "seconds": combined(bare.parts, FACTORS)}, kernels, NODE)
    other = kernel_points("gemm", {"tokens": np.array([100, 3000]), "n": 6144, "k": 8192}, kernels, NODE)
    assert fit_tables(seen)(other) == pytest.approx(combined(other.parts, FACTORS), rel=0.02)


def test_nested_interpolation_is_bilinear_on_a_grid_and_stops_at_its_edge():
    x, y = (v.ravel().astype(float) for v in np.meshgrid([0, 1, 2], [0, 10]))
    found = interpolate_nested(
        np.stack([x, y], axis=1), 3 * x + y + x * y, np.array([[0.5, 5.0], [1.5, 2.0], [9.0, 99.0]])
    )
    assert found == pytest.approx([1.5 + 5 + 2.5, 4.5 + 2 + 3, 6 + 10 + 20])
