"""The compiled batch server against its plain twin, and against the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import theory
from lengthwise.schema.errors import InputError
from lengthwise.statistics import mean_estimate

COLUMNS = ("formed_s", "start_s", "end_s")


@st.composite
def worlds(draw):
    n, bins = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    gaps = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    service = draw(st.lists(st.integers(0, 9).map(lambda x: x / 2), min_size=n, max_size=n))
    put = draw(st.lists(st.integers(0, bins - 1), min_size=n, max_size=n))
    options = {
        "batch": draw(st.integers(1, 5)),
        "num_bins": bins,
        "servers": draw(st.sampled_from([None, 1, 2, 3])),
        "max_wait_s": draw(st.sampled_from([math.inf, 0.0, 1.0, 2.5, 7.0])),
        "drain": draw(st.booleans()),
    }
    return (np.cumsum(gaps).astype(float), service, put), options


@given(world=worlds())
def test_both_engines_agree_to_the_last_bit(world):
    columns, options = world
    fast = theory.serve(*columns, **options)
    plain = theory.serve(*columns, **options, engine="reference")
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(fast, column), getattr(plain, column))
    assert fast.batches == plain.batches


@given(world=worlds())
def test_laws_of_the_batch_server(world):
    columns, options = world
    arrival, service, put = (np.asarray(column) for column in columns)
    served = theory.serve(*columns, **options)
    done = served.served
    assert (served.formed_s >= arrival).all()
    assert (served.start_s >= served.formed_s).all()
    assert (served.end_s[done] - served.start_s[done] >= service[done]).all()
    if options["max_wait_s"] < math.inf:
        assert done.all()
        assert (served.formed_s <= arrival + options["max_wait_s"]).all()
    elif options["drain"]:
        assert done.all()
    else:
        left = np.bincount(put[~done].astype(int), minlength=options["num_bins"])
        assert (left < options["batch"]).all()
        assert done.sum() == served.batches * options["batch"]
    order = np.lexsort((served.start_s[done], served.formed_s[done]))
    assert (np.diff(served.start_s[done][order]) >= 0).all(), "batches start in the order in which they formed"


def test_a_partial_batch_leaves_after_its_wait():
    served = theory.serve([0.0, 1.0, 10.0], [1.0, 2.0, 1.0], [0, 0, 0], batch=3, num_bins=1, max_wait_s=5.0)
    np.testing.assert_array_equal(served.formed_s, [5, 5, 15])
    np.testing.assert_array_equal(served.end_s, [7, 7, 16])


@pytest.mark.parametrize(("batch", "bins"), [(8, 1), (8, 16), (32, 4)])
def test_simulation_finds_the_theorems(batch, bins):
    times = theory.UniformTimes(1.0, 20.0)
    cuts = theory.uniform_optimal(times, bins)
    busy = theory.runs(times, cuts, batch, requests=20_000, seeds=range(4))
    rate = mean_estimate([run.throughput_rps for run in busy])
    assert rate.value == pytest.approx(theory.uniform_throughput_rps(times, batch, bins), rel=0.01)
    idle = theory.runs(times, cuts, batch, rate_rps=3.0, servers=None, requests=20_000, seeds=range(4))
    wait = mean_estimate([run.latency_s for run in idle])
    assert wait.value == pytest.approx(theory.latency_s(times, cuts, batch, 3.0), rel=0.02)
    assert wait.half_width < 0.1 * wait.value


def test_runs_share_their_requests():
    times = theory.ExponentialTimes(1.0)
    one, two = (theory.runs(times, cuts, 4, requests=100, seeds=[7])[0] for cuts in ([], [1.0]))
    np.testing.assert_array_equal(one.arrival_s, two.arrival_s)
    again = theory.runs(times, [], 4, requests=100, seeds=[7])[0]
    np.testing.assert_array_equal(one.end_s, again.end_s)


def test_one_run_has_no_interval():
    assert not mean_estimate([3.0]).has_interval
    assert mean_estimate([1.0, 3.0]).half_width == pytest.approx(12.706, rel=1e-3)


@pytest.mark.parametrize(
    ("columns", "options", "states"),
    [
        (([0, 1], [1], [0, 0]), {}, "one length"),
        (([1, 0], [1, 1], [0, 0]), {}, "must not decrease"),
        (([0, math.nan], [1, 1], [0, 0]), {}, "finite"),
        (([0, 1], [1, math.nan], [0, 0]), {}, "service_s"),
        (([0, 1], [1, -1], [0, 0]), {}, "service_s"),
        (([0, 1], [1, 1], [0, 1]), {}, "within 0 to 0"),
        (([0, 1], [1, 1], [0, 0]), {"batch": 0}, "batch must be"),
        (([0, 1], [1, 1], [0, 0]), {"num_bins": 0}, "bins must be"),
        (([0, 1], [1, 1], [0, 0]), {"servers": 0}, "at least 1"),
        (([0, 1], [1, 1], [0, 0]), {"max_wait_s": math.nan}, "max_wait_s"),
    ],
)
def test_bad_input_is_named(columns, options, states):
    with pytest.raises(InputError, match=states):
        theory.serve(*columns, **({"batch": 2, "num_bins": 1} | options))
