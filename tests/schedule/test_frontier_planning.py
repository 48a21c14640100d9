"""Throughput against the bound, and static batches as doing nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from curve_columns import static_batches
from stage_visits import decode_visit_s, prefill_visit_s

from lengthwise import catalog
from lengthwise.schedule import (
    Cluster,
    Estimator,
    Planner,
    Strategy,
    TaskLengths,
    breakpoints,
    cluster_tables,
    frontiers,
)
from lengthwise.schedule.frontier import MAX_POINTS, non_dominated


@pytest.fixture(scope="module")
def planner(opt_estimator):
    return Planner(opt_estimator, [1, 2, 4])


@pytest.fixture(scope="module")
def fronts(planner):
    return frontiers(planner)


def test_a_frontier_rises(fronts):
    assert [strategy for strategy, _ in fronts] == ["rra", "waa-c", "waa-m"]
    for strategy, points in fronts:
        assert 1 <= len(points) <= MAX_POINTS
        assert {p.row.strategy for p in points} == {strategy}
        for sooner, later in pairwise(points):
            assert sooner.constrained_latency_s < later.constrained_latency_s
            assert sooner.row.throughput_rps < later.row.throughput_rps


def test_a_point_meets_its_stated_latency(planner, fronts):
    for _, points in fronts:
        for point in points[:: max(1, len(points) // 5)]:
            assert point.constrained_latency_s == point.row.latency_high_s


def test_the_end_of_a_frontier_is_the_unbounded_optimum(planner, fronts):
    for strategy, points in fronts:
        alone = Planner(planner.estimator, [1, 2, 4], [Strategy(strategy)])
        assert points[-1].row.throughput_rps == pytest.approx(alone.best().row.throughput_rps, rel=0.02)


def test_between_searched_bounds_little_is_missed(planner, fronts):
    for strategy, shown in fronts:
        alone = Planner(planner.estimator, [1, 2, 4], [Strategy(strategy)])
        points = non_dominated([side for side in planner.spaces if side.strategy == strategy])
        for bound_s in (
            shown[0].constrained_latency_s * 1.3,
            math.sqrt(shown[0].constrained_latency_s * shown[-1].constrained_latency_s),
        ):
            had = max(p.row.throughput_rps for p in points if p.constrained_latency_s <= bound_s)
            assert had >= 0.9 * alone.best(bound_s).row.throughput_rps


def test_kinks_are_where_another_kind_takes_over(fronts):
    found = breakpoints(fronts)
    assert len(found) >= 2
    assert all(a.bound_s < b.bound_s for a, b in pairwise(found))
    least = min((p for _, points in fronts for p in points), key=lambda p: p.constrained_latency_s)
    assert found[0].bound_s == least.constrained_latency_s
    assert least.row.words in found[0].words


def test_kinds_that_overtake_each_other_at_every_step_are_one(fronts):
    """Two whose bests lie a hundredth of a bound apart take turns; the first and the one at the end are reported."""
    (_, points), *_ = fronts
    turns = [
        replace(
            points[0], constrained_latency_s=1.01**i, row=replace(points[0].row, strategy=kind, throughput_rps=1.02**i)
        )
        for i, kind in enumerate(["waa-c", "waa-m"] * 10)
    ]
    by_kind = [(kind, tuple(p for p in turns if p.row.strategy == kind)) for kind in ("waa-c", "waa-m")]
    assert [kink.bound_s for kink in breakpoints(by_kind)] == [1.0, turns[-1].constrained_latency_s]


def test_static_batches_have_the_closed_form(opt, four_a40, opt_tables):
    """One stage of four GPUs: a prefill, then 7 decode iterations over growing context."""
    task = TaskLengths.fixed(256, 8)
    got = static_batches(Estimator(task, four_a40, opt, opt_tables))
    at = int(np.flatnonzero(got.batch == 16)[0])
    ends = {"first": True, "last": True}
    prefill_s = float(prefill_visit_s(opt_tables[4], task, 16, 40, **ends))
    decode_s = decode_visit_s(opt_tables[4], task, 16, [16 * (256 + u) for u in range(1, 8)], 40, **ends)
    assert got.latency_s[at] == pytest.approx(prefill_s + decode_s.sum())
    row = got.rows[at]
    assert row.throughput_rps == pytest.approx(16 / row.latency_s)
    assert (row.tp, row.tp_groups, row.decode_steps) == (4, 1, 7)


def test_static_batches_over_nodes_are_stages(opt):
    cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), 8)
    task = TaskLengths.fixed(256, 8)
    tables = cluster_tables(opt, cluster, [1, 4])
    got = static_batches(Estimator(task, cluster, opt, tables))
    at = int(np.flatnonzero(got.batch == 16)[0])
    assert (got.tp[at], got.tp_groups[at], got.micro_batches[at]) == (4, 2, 2)
    first = {"first": True, "last": False}
    last = {"first": False, "last": True}
    prefill = [float(prefill_visit_s(tables[4], task, 8, 20, **ends)) for ends in (first, last)]
    decode = [
        decode_visit_s(tables[4], task, 8, [8 * (256 + u) for u in range(1, 8)], 20, **ends) for ends in (first, last)
    ]
    want = sum(prefill) + max(prefill) + np.maximum(2 * np.maximum(*decode), sum(decode)).sum()
    assert got.latency_s[at] == pytest.approx(want)


def test_the_best_static_batch_meets_the_bound_and_memory(opt_estimator):
    got = static_batches(opt_estimator)
    assert (got.memory_share <= 1).all()
    row = got.best(6.0)
    assert row.latency_s <= 6.0
    larger = got.latency_s[got.batch > row.prefill_batch]
    assert larger[0] > 6.0
    assert got.best(0.1) is None
    assert got.best(math.inf).prefill_batch == got.batch[-1]


def test_bounds_of_the_paper_are_quantiles_of_static_latencies(opt_estimator):
    low, middle, high = static_batches(opt_estimator).bounds_s()
    assert low < middle < high
    assert (low, middle, high) == pytest.approx((3.1, 5.9, 11.5), rel=0.15)


def test_a_choice_beats_doing_nothing_at_every_bound_of_the_paper(planner):
    static = static_batches(planner.estimator)
    for bound_s in (*static.bounds_s(), math.inf):
        assert planner.best(bound_s).row.throughput_rps > 1.2 * static.best(bound_s).throughput_rps


def test_static_batches_have_a_frontier_too(opt_estimator):
    got = static_batches(opt_estimator)
    for bound_s in (3.0, 5.9, 11.5, math.inf):
        points = got.front(bound_s)
        assert 2 <= len(points) <= MAX_POINTS
        assert points[0].constrained_latency_s == got.latency_s.min()
        for sooner, later in pairwise(points):
            assert sooner.constrained_latency_s < later.constrained_latency_s
            assert sooner.row.throughput_rps < later.row.throughput_rps
        shown = max(p.row.throughput_rps for p in points if p.constrained_latency_s <= bound_s)
        assert shown == got.best(bound_s).throughput_rps


def test_what_does_not_fit_has_no_static_batch(summaries):
    model = catalog.model("gpt-3-175b")
    cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), 4)
    got = static_batches(Estimator(summaries, cluster, model, cluster_tables(model, cluster, [1, 4])))
    assert got.rows == ()
    assert got.best(math.inf) is None
    assert got.bounds_s() == ()
    assert got.front() == ()
