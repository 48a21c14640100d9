"""Latencies of 0, of answers that came in one piece, are not fitted to and break nothing."""

from __future__ import annotations

import numpy as np

from lengthwise.measure.calibration import solver


def test_a_latency_of_zero_is_left_out_without_a_warning() -> None:
    measured_s = np.array([0.0, 0.01, 0.02, 0.04, np.nan])
    rows = np.array([1, 2, 3])
    means, levels = solver.MeasuredTimes(measured_s, rows, rows.reshape(1, 3)).residuals(1.1 * measured_s)
    np.testing.assert_allclose(means, np.log(1.1))
    np.testing.assert_allclose(levels, np.log(1.1))
