from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lengthwise.metrics import QUANTILES
from lengthwise.metrics.distribution import column_distribution, gap_distribution, histogram_error, weighted_quantiles
from lengthwise.schema.records import TokenGaps

values = hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(1e-3, 1e3))
Q = np.array(list(QUANTILES.values()))


@given(values, st.integers(0, 5))
def test_statistics_are_numpys(column, missing) -> None:
    made = column_distribution(np.concatenate([column, np.full(missing, np.nan)]), 0.95)
    assert made.count == len(column)
    assert made.mean.value == pytest.approx(column.mean())
    assert made.sd.value == pytest.approx(column.std(), abs=1e-9)
    assert (made.min.value, made.max.value) == (column.min(), column.max())
    for name, q in QUANTILES.items():
        assert getattr(made, name).value == pytest.approx(np.quantile(column, q))


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 9)), min_size=1, unique_by=lambda p: p[0]))
def test_weighted_quantiles_are_those_of_the_values_spelt_out(pairs) -> None:
    value, count = (np.array(x) for x in zip(*sorted(pairs), strict=True))
    assert weighted_quantiles(value, count, Q) == pytest.approx(np.quantile(np.repeat(value, count), Q))


@given(values)
def test_the_histograms_quantiles_keep_their_stated_error(column) -> None:
    edges = np.concatenate([[0.0], 2.0 ** (np.arange(-14 * 8, 12 * 8) / 8)])
    gaps = TokenGaps(np.histogram(column, edges)[0], edges, len(column), column.sum(), column.max(), None, None)
    made = gap_distribution(gaps, np.nan)
    assert made.relative_error == pytest.approx((2 ** (1 / 8) - 1) / 2)
    assert made.mean.value == pytest.approx(column.mean())
    for name, q in QUANTILES.items():
        assert getattr(made, name).value == pytest.approx(np.quantile(column, q), rel=made.relative_error + 1e-9)


def test_the_engines_bins_are_within_half_a_percent(toy) -> None:
    assert histogram_error(toy.edges_s()) == pytest.approx(1 / 256)


def test_stored_gaps_are_exact_and_the_histogram_agrees(toy) -> None:
    gaps = toy.records(150).gaps
    spelt = np.repeat(gaps.gap_s, gaps.count)
    exact = gap_distribution(gaps, np.nan)
    read = gap_distribution(
        TokenGaps(gaps.histogram, gaps.edges_s, gaps.total, gaps.sum_s, gaps.max_s, None, None), 0.5
    )
    assert exact.p99.value == pytest.approx(np.quantile(spelt, 0.99))
    assert exact.sd.value == pytest.approx(spelt.std())
    assert exact.relative_error == 0
    assert read.p99.value == pytest.approx(exact.p99.value, rel=1 / 256)
    assert read.mean.half_width == 0.5


def test_nothing_measured_is_unknown() -> None:
    made = column_distribution(np.full(3, np.nan), 0.95)
    assert made.count == 0
    assert np.isnan(made.p99.value)
    empty = TokenGaps(np.zeros(3, np.int64), np.arange(4.0), 0, 0.0, 0.0, None, None)
    assert gap_distribution(empty, np.nan).count == 0


@pytest.mark.parametrize(("n", "known"), [(399, set()), (400, {"mean", "sd", "p50", "p75"}), (5000, {"p99"})])
def test_intervals_exist_only_where_the_data_support_them(n, known) -> None:
    made = column_distribution(np.random.default_rng(0).random(n), 0.95)
    assert {k for k in ("mean", "sd", "p50", "p75", "p99") if getattr(made, k).has_interval} >= known
    assert not made.max.has_interval
    assert made.mean.has_interval == (n >= 400)
    assert made.p99.has_interval == (n >= 5000)


def test_the_column_itself_is_left_in_its_order() -> None:
    column = np.random.default_rng(1).random(1000)
    before = column.copy()
    column_distribution(column, 0.95)
    assert np.array_equal(column, before)
