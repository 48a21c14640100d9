"""What a deployed schedule can become with no weights moved: the best of its layout, against looking at all of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lengthwise import catalog
from lengthwise.schedule import Cluster, Controls, Estimator, Planner, Strategy, TaskLengths, cluster_tables
from lengthwise.schedule.adaptation import InPlace
from lengthwise.schedule.controls import columns
from lengthwise.schedule.search_space import row_of

WITHIN = 1.02
"""The planner's tolerance."""


def deployed(estimator, tp, groups):
    """Some schedule of RRA's layout."""
    controls = Controls(Strategy.RRA, 4, 4, tp=tp, tp_groups=groups)
    return row_of(controls, estimator.estimate([controls]))


def all_of(estimator, tp, groups, batches, phases):
    """The estimates of every batch at every length of phases, short as those are that the best ones have."""
    given = [Controls(Strategy.RRA, n, m, tp=tp, tp_groups=groups) for m in phases for n in batches]
    return estimator.estimate(columns(given))


@pytest.fixture(scope="module")
def of_opt(opt, four_a40, opt_tables):
    return lambda task: Estimator(TaskLengths.from_preset(task), four_a40, opt, opt_tables)


@pytest.fixture(scope="module")
def t5_code():
    model, cluster = catalog.model("t5-11b"), Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 8)
    tables = cluster_tables(model, cluster, [1, 4])
    return Estimator(TaskLengths.from_preset("exegpt-g"), cluster, model, tables)


def is_the_best(estimator, tp, groups, bound_s=math.inf, max_num_seqs=math.inf):
    """What is found is within the tolerance of the best of all short phases."""
    planner, row = Planner(estimator, [tp], [Strategy.RRA]), deployed(estimator, tp, groups)
    found = InPlace(planner, row, max_num_seqs=max_num_seqs).best(bound_s)
    every = all_of(estimator, tp, groups, range(1, 121), range(1, 31))
    good = every.feasible & (every.latency_high_s <= bound_s) & (every.decode_batch <= max_num_seqs)
    assert (found.tp, found.tp_groups) == (tp, groups)
    assert found.latency_high_s <= bound_s
    assert max(found.prefill_batch, found.decode_batch) <= max_num_seqs
    assert found.throughput_rps >= every.throughput_rps[good].max() / WITHIN
    return found


@pytest.mark.parametrize(("task", "tp", "groups"), [("exegpt-g", 1, 0), ("exegpt-g", 2, 2), ("exegpt-t", 2, 2)])
def test_the_best_lies_where_throughput_is_not_monotone(of_opt, task, tp, groups):
    """The corner that a search ends at, the most requests, is up to a fifth below."""
    is_the_best(of_opt(task), tp, groups)


@pytest.mark.parametrize(("tp", "groups", "bound_s"), [(1, 0, math.inf), (4, 2, math.inf), (4, 2, 19.6)])
def test_so_it_does_for_an_encoder_decoder(t5_code, tp, groups, bound_s):
    is_the_best(t5_code, tp, groups, bound_s)


@pytest.mark.parametrize("max_num_seqs", [64, 200, 500.5])
def test_slots_cover_prefills_and_the_decode_batch(of_opt, max_num_seqs):
    found = is_the_best(of_opt("exegpt-g"), 2, 2, max_num_seqs=max_num_seqs)
    assert found.decode_batch > max_num_seqs / 2


def test_without_slots_or_time_there_is_no_schedule(of_opt):
    """RRA serves one request in one slot; WAA has one in each of its iterations."""
    code = of_opt("exegpt-g")
    phases, ever = (
        InPlace(Planner(code, [4]), deployed(code, 4, 1), max_num_seqs=max_num_seqs) for max_num_seqs in (1, math.inf)
    )
    assert phases.best().prefill_batch == 1
    assert ever.best(0.01) is None
    handed = Planner(code, [2], [Strategy.WAA_C])
    assert InPlace(handed, handed.best().row, max_num_seqs=100).best() is None


def test_one_bound_after_another_is_as_each_alone(t5_code):
    planner, row = Planner(t5_code, [4], [Strategy.RRA]), deployed(t5_code, 4, 2)
    after = InPlace(planner, row)
    for bound_s in (40.0, 19.6, 30.0):
        alone = InPlace(planner, row).best(bound_s)
        assert after.best(bound_s).throughput_rps == pytest.approx(alone.throughput_rps, rel=WITHIN - 1)
        assert after.best(bound_s).latency_high_s <= bound_s


@pytest.mark.parametrize("strategy", list(Strategy))
def test_of_every_strategy_the_split_stays(opt, four_a40, opt_tables, strategy):
    task, rra = TaskLengths.from_samples([200, 400, 900], [1, 5, 9]), strategy is Strategy.RRA
    estimator = Estimator(task, four_a40, opt, opt_tables)
    planner, bound_s = Planner(estimator, [2], [strategy]), 1.2
    row = planner.best().row
    found = InPlace(planner, row).best(bound_s)
    assert (found.family, found.prefill_gpus) == (row.family, row.prefill_gpus)
    assert found.latency_high_s <= bound_s
    best = 0.0
    for second in range(1, 10) if rra else (1, 2, 3):
        given = [
            Controls(strategy, n, second if rra else 1, None if rra else second, row.tp, row.tp_groups)
            for n in range(1, 200)
        ]
        got = estimator.estimate(given, np.full(len(given), row.prefill_gpus))
        best = max(best, got.throughput_rps[got.latency_high_s <= bound_s].max(initial=0.0))
    assert found.throughput_rps >= best / WITHIN
