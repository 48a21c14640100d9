"""Curves and surfaces that never fall."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.cost.regression import fit_curve, fit_surface

POINTS = st.lists(st.tuples(st.integers(1, 60), st.floats(0.001, 10, allow_nan=False)), min_size=1, max_size=40)
PLACES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.floats(0.001, 10)), min_size=1, max_size=30)


@given(POINTS)
def test_a_curve_never_falls_and_stays_within_the_measurements(points):
    x, y = np.array(points, dtype=float).T
    curve = fit_curve(x, y)
    inside = curve(np.linspace(0, x.max(), 200))
    assert (np.diff(curve(np.linspace(0, 200, 400))) >= -1e-12).all()
    assert y.min() - 1e-12 <= inside.min()
    assert inside.max() <= y.max() + 1e-12


def test_a_curve_takes_medians_and_goes_on_straight():
    curve = fit_curve(np.array([1, 1, 1, 2, 3, 4.0]), np.array([1, 9, 1, 2, 3, 4.0]))
    assert curve(np.array([0, 1, 2.5, 4, 10.0])).tolist() == [1, 1, 2.5, 4, 10]


def test_a_curve_is_the_least_squares_one():
    curve = fit_curve(np.arange(4.0), np.array([1.0, 3.0, 2.0, 4.0]))
    assert curve(np.arange(4.0)).tolist() == [1, 2.5, 2.5, 4]


@settings(deadline=None, max_examples=40)
@given(PLACES, st.booleans())
def test_a_surface_never_falls(places, quadratic):
    x, y, ms = np.array(places, dtype=float).T
    surface = fit_surface(np.stack([x, y], axis=1), ms, quadratic=quadratic)
    values = surface(np.arange(0.0, 40, 3)[:, None], np.arange(0.0, 40, 3)[None, :])
    assert np.isfinite(values).all()
    assert (values > 0).all()
    for axis in (0, 1):
        assert (np.diff(values, axis=axis) >= -1e-9 * values.max()).all()


def test_a_surface_without_noise_is_met_at_its_points_and_continues_attention():
    chunk, context = (a.ravel() for a in np.meshgrid(np.arange(64, 1025, 64.0), np.arange(0, 2049, 256.0)))
    pairs = chunk * (context + chunk / 2)
    surface = fit_surface(np.stack([chunk, context], axis=1), 1e-6 * pairs, quadratic=True)
    assert np.allclose(surface(chunk, context), 1e-6 * pairs)
    assert np.allclose(surface(np.array([4096.0]), np.array([512.0])), 1e-6 * 4096 * (512 + 2048))
    assert np.allclose(surface(np.array([512.0]), np.array([8192.0])), 1e-6 * 512 * (8192 + 256))


def test_a_row_with_one_column_learns_its_slope_from_the_others():
    rows = [(c, k, 0.01 * c * k + c) for c in (1.0, 2.0) for k in (0.0, 10.0, 20.0)] + [(4.0, 0.0, 4.0)]
    x = np.array(rows)
    surface = fit_surface(x[:, :2], x[:, 2], quadratic=True)
    assert np.allclose(surface(np.array([4.0]), np.array([20.0])), 0.01 * 80 + 4)
