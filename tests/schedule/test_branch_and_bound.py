"""Branch and bound finds what looking at every point finds, whatever the functions are like."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_grids import SHAPES, Grid, min_tolerances, monotone, shaken, smooth

from lengthwise.schedule.optimizer import Perf, Tolerances, Variable, branch_and_bound, exhaustive
from lengthwise.schema.errors import InputError

EXACT = Tolerances(0, 0)
A_HAIR = 1e-12
KINDS = st.sampled_from(["smooth", "steps", "flat"])
SEEDS = st.integers(0, 2**32 - 1)
WAVES = st.sampled_from([1, 3, 8])
some = settings(max_examples=250)


def an_instance(seed, shape, kinds):
    rng = np.random.default_rng(seed)
    return rng, monotone(rng, shape, kinds[0]), monotone(rng, shape, kinds[1])


def a_bound(rng, latency):
    """Between values, at a value, below all, above all, none."""
    draws = [
        np.quantile(latency, rng.random()),
        rng.choice(latency.ravel()),
        latency.min() * 0.9,
        latency.max() * 1.1,
        math.inf,
    ]
    return float(rng.choice(draws, p=[0.4, 0.3, 0.1, 0.1, 0.1]))


@some
@given(seed=SEEDS, shape=st.sampled_from(SHAPES), kinds=st.tuples(KINDS, KINDS), batch_size=WAVES)
def test_monotone_functions_end_at_the_best_point_and_of_ties_at_the_fastest(seed, shape, kinds, batch_size):
    rng, latency, throughput = an_instance(seed, shape, kinds)
    grid, bound = Grid(latency, throughput), a_bound(rng, latency)
    found = branch_and_bound(grid.perf, grid.variables, bound, EXACT, batch_size=batch_size)
    assert len(set(grid.requested)) == len(grid.requested) == found.evaluated
    oracle = exhaustive(grid.perf, grid.variables, bound)
    assert found.best == oracle.best
    assert found.gap == 0
    assert found.fastest.latency_s == oracle.fastest.latency_s


@some
@given(
    seed=SEEDS,
    shape=st.sampled_from(SHAPES),
    kinds=st.tuples(KINDS, KINDS),
    shares=st.tuples(*[st.sampled_from([0.0, 0.01, 0.05, 0.3])] * 2),
    gap=st.sampled_from([None, 0.0, 0.02, 0.2]),
)
def test_shaken_functions_end_within_the_gap(seed, shape, kinds, shares, gap):
    rng, latency, throughput = an_instance(seed, shape, kinds)
    latency, throughput = shaken(rng, latency, shares[0]), shaken(rng, throughput, shares[1])
    grid, bound = Grid(latency, throughput), a_bound(rng, latency)
    tolerances = Tolerances(shares[1], shares[0], gap)
    found = branch_and_bound(grid.perf, grid.variables, bound, tolerances)
    within(found, exhaustive(grid.perf, grid.variables, bound), tolerances.accepted)


@some
@given(seed=SEEDS, shape=st.sampled_from(SHAPES), known=st.booleans())
def test_the_least_tolerances_of_any_functions_are_enough(seed, shape, known):
    """Values without any order, and points above a surface that cannot run."""
    rng = np.random.default_rng(seed)
    latency, throughput = 1 + rng.random(shape), 1 + rng.random(shape) ** 3
    room = monotone(rng, shape, "smooth")
    cannot = room > np.quantile(room, rng.uniform(0.2, 1.0))
    latency[cannot] = math.inf
    if not known:
        throughput[cannot] = rng.choice([0.0, math.nan])
    grid, bound = Grid(latency, throughput), float(rng.uniform(0.9, 2.2))
    bounding = Grid(np.ones(shape), throughput) if known else grid
    tolerances = Tolerances(
        min_tolerances(bounding.perf, grid.variables).throughput + A_HAIR,
        min_tolerances(grid.perf, grid.variables).latency + A_HAIR,
    )
    found = branch_and_bound(grid.perf, grid.variables, bound, tolerances)
    within(found, exhaustive(grid.perf, grid.variables, bound), tolerances.accepted)


@pytest.mark.slow
@pytest.mark.parametrize("lot", range(4))
def test_thousands_of_instances_keep_the_guarantee(lot):
    """Shaken by any share, with points that cannot run above some size; half of them exactly monotone."""
    for seed in range(2000 * lot, 2000 * (lot + 1)):
        rng = np.random.default_rng(seed)
        kinds = rng.choice(["smooth", "steps", "flat"], 2, p=[0.5, 0.4, 0.1])
        _, latency, throughput = an_instance(seed, SHAPES[seed % len(SHAPES)], kinds)
        shares = rng.uniform(0, 0.3, 2) * (seed % 2)
        latency, throughput = shaken(rng, latency, shares[0]), shaken(rng, throughput, shares[1])
        latency[monotone(rng, latency.shape, "smooth") > rng.uniform(1, 60)] = math.inf
        bound = a_bound(rng, latency[np.isfinite(latency)]) if np.isfinite(latency).any() else 1.0
        grid, tolerances = Grid(latency, throughput), Tolerances(shares[1], shares[0])
        found = branch_and_bound(grid.perf, grid.variables, bound, tolerances, batch_size=1 + seed % 9)
        oracle = exhaustive(grid.perf, grid.variables, bound)
        within(found, oracle, tolerances.accepted)
        if not shares.any():
            assert found.best == oracle.best


@some
@given(seed=SEEDS, shape=st.sampled_from([(4,), (5, 6), (4, 3, 5)]), kinds=st.tuples(KINDS, KINDS))
def test_of_a_variable_without_direction_nothing_is_assumed(seed, shape, kinds):
    rng, latency, throughput = an_instance(seed, shape, kinds)
    order = rng.permutation(shape[0])
    grid = Grid(latency[order], rng.permutation(throughput))
    grid.variables[0] = replace(grid.variables[0], rising=None)
    bound = a_bound(rng, latency)
    assert min_tolerances(grid.perf, grid.variables) == EXACT
    found = branch_and_bound(grid.perf, grid.variables, bound, EXACT)
    assert found.best == exhaustive(grid.perf, grid.variables, bound).best
    assert found.gap == 0


def within(found, oracle, gap):
    """The stated guarantee, and the gap that was proved."""
    assert (found.best is None) == (oracle.best is None)
    assert found.gap <= gap * (1 + 1e-9) + 1e-12
    if oracle.best:
        assert found.best.throughput_rps * (1 + found.gap) >= oracle.best.throughput_rps * (1 - 1e-12)


def test_the_tolerance_is_what_saves_the_best_of_shaken_functions():
    """Without it some of them are missed, so that the tests above can fail."""
    missed = 0
    for seed in range(200):
        rng, latency, throughput = an_instance(seed, (13, 4), ("smooth", "smooth"))
        latency, throughput = shaken(rng, latency, 0.3), shaken(rng, throughput, 0.3)
        grid, bound = Grid(latency, throughput), float(np.quantile(latency, 0.5))
        best = exhaustive(grid.perf, grid.variables, bound).best.throughput_rps
        got = branch_and_bound(grid.perf, grid.variables, bound, EXACT).best.throughput_rps
        sure = branch_and_bound(grid.perf, grid.variables, bound, Tolerances(0.3, 0.3, 0.0))
        assert sure.best.throughput_rps == best
        missed += got < best
    assert missed > 10


@pytest.mark.parametrize("seed", range(4))
def test_few_points_of_a_large_box_are_evaluated(seed):
    rng = np.random.default_rng(seed)
    latency, throughput = smooth(rng, (512, 64, 8))
    grid, bound = Grid(latency, throughput), float(np.quantile(latency, rng.uniform(0.1, 0.9)))
    found = branch_and_bound(grid.perf, grid.variables, bound, EXACT)
    assert found.best.throughput_rps == throughput[latency <= bound].max()
    assert found.evaluated < 0.01 * found.total


def test_a_throughput_for_points_that_cannot_run_saves_evaluations():
    latency, throughput = smooth(np.random.default_rng(5), (64, 32, 8))
    cannot = np.add.outer(np.add.outer(np.arange(64), np.arange(32)), np.arange(8)) > 60
    latency[cannot] = math.inf
    grid = Grid(latency, throughput)
    blind = Grid(latency, np.where(cannot, 0.0, throughput))
    knows = branch_and_bound(grid.perf, grid.variables, math.inf, EXACT)
    unknown = branch_and_bound(blind.perf, grid.variables, math.inf, EXACT)
    assert knows.best == unknown.best == exhaustive(grid.perf, grid.variables, math.inf).best
    assert knows.evaluated < unknown.evaluated / 2


def test_a_bound_that_nothing_meets_names_the_fastest_point():
    latency, throughput = smooth(np.random.default_rng(1), (30, 20))
    grid = Grid(latency, throughput)
    found = branch_and_bound(grid.perf, grid.variables, 0.001, Tolerances(0.05, 0.05))
    assert found.best is None
    assert found.gap == 0
    assert found.fastest.latency_s == latency.min()
    assert found.fastest.point == (3, 3 + 2 * 19)  # the second variable lowers both as it rises
    assert found.evaluated == 2


def test_nothing_that_can_run_is_nothing_found():
    grid = Grid(np.full((5, 4), math.inf), np.full((5, 4), math.nan))
    found = branch_and_bound(grid.perf, grid.variables, math.inf)
    assert found.best is None
    assert found.fastest.latency_s == math.inf


@pytest.mark.parametrize("most", [2, 3, 10, 40])
def test_an_early_stop_reports_what_may_be_missed(most):
    latency, throughput = smooth(np.random.default_rng(3), (60, 50, 5))
    grid, bound = Grid(latency, throughput), float(np.quantile(latency, 0.4))
    found = branch_and_bound(grid.perf, grid.variables, bound, EXACT, max_points=most)
    best = throughput[latency <= bound].max()
    assert found.evaluated <= most
    assert found.best.throughput_rps * (1 + found.gap) >= best
    assert found.gap > 0


@pytest.mark.parametrize(
    ("broken", "states"),
    [
        (lambda p: Perf(np.full(len(p), math.nan), np.ones(len(p))), "latency and a throughput"),
        (lambda p: Perf(np.ones(len(p)), np.full(len(p), -1.0)), "latency and a throughput"),
        (lambda _: Perf(np.ones(1), np.ones(1)), "a row for each of 2"),
    ],
)
def test_answers_that_cannot_be_used_are_refused(broken, states):
    with pytest.raises(InputError, match=states):
        branch_and_bound(broken, [Variable("x", (1, 2, 3))], 1.0)


def test_numbers_out_of_range_are_refused():
    grid = Grid(np.ones((2, 2)), np.ones((2, 2)))
    for bound, options in [(0.0, {}), (math.nan, {}), (1.0, {"batch_size": 0}), (1.0, {"max_points": 1})]:
        with pytest.raises(InputError):
            branch_and_bound(grid.perf, grid.variables, bound, **options)
    sides = [replace(variable, rising=None) for variable in grid.variables]
    with pytest.raises(InputError, match="at least 8 points"):
        branch_and_bound(grid.perf, sides, 1.0, max_points=7)
    with pytest.raises(InputError, match="there are none"):
        branch_and_bound(grid.perf, [], 1.0)
    with pytest.raises(InputError, match="must be 0 or more"):
        Tolerances(throughput=-0.1)
    with pytest.raises(InputError, match="must have a value"):
        Variable("x", ())
    with pytest.raises(InputError, match="must differ"):
        Variable("x", (1, 1))
