"""Parts of the GPUs: reported where they serve more than one pipeline of all, or meet a bound that it cannot."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from lengthwise import catalog
from lengthwise.schedule import Estimator, Planner, Strategy, best_schedule, build_plan
from lengthwise.schedule.plan import MIN_GAIN, best_parts, part_sizes
from lengthwise.schema.errors import ScheduleError


def planner_of(estimator, gpus, strategies=tuple(Strategy)):
    setting = estimator.setting
    cluster = replace(setting.cluster, gpus=gpus)
    tables = {tp: one for tp, one in setting.tables.items() if tp <= gpus}
    part = Estimator(setting.task, cluster, setting.model, tables, setting.assumptions)
    return Planner(part, tuple(tables), strategies)


@pytest.mark.slow
def test_parts_have_what_so_many_clusters_of_their_own_have(opt_estimator):
    planner = Planner(opt_estimator, [1, 2, 4])
    complete = planner.best().row
    found = best_parts(planner, math.inf, complete.throughput_rps)
    setting = opt_estimator.setting
    cluster = replace(setting.cluster, gpus=found.gpus)
    alone = best_schedule(setting.task, cluster, setting.model, tables={1: setting.tables[1]})
    assert (found.gpus, found.copies) == (1, 4)
    assert found.row == alone.row
    assert found.throughput_rps == 4 * alone.row.throughput_rps > complete.throughput_rps * (1 + MIN_GAIN)
    assert build_plan(planner).parts == found


def test_no_parts_are_reported_where_all_gpus_together_achieve_as_much(opt_estimator):
    planner = Planner(opt_estimator, [1, 2, 4])
    complete = planner.best(3.0).row
    assert best_parts(planner, 3.0, complete.throughput_rps) is None
    assert best_parts(planner, 3.0) is not None
    assert best_parts(planner, math.inf, best_parts(planner).throughput_rps / (1 + MIN_GAIN / 2)) is None


def test_a_bound_that_only_fewer_gpus_meet_names_them(opt_estimator):
    """Of three GPUs two are a stage, the third is another one behind it."""
    planner, two = planner_of(opt_estimator, 3), planner_of(opt_estimator, 2)
    bound_s = 1.02 * min_s(two)
    assert bound_s < min_s(planner)
    with pytest.raises(ScheduleError, match=r"Fewer GPUs meet it: 2 GPUs alone, with RRA, .*--gpus 2") as reported:
        build_plan(planner, bound_s)
    words = two.best(bound_s).row.words
    assert re.search(re.escape(words), str(reported.value))


def test_what_no_part_meets_is_refused_as_it_is(opt_estimator):
    planner = Planner(opt_estimator, [1, 2, 4])
    with pytest.raises(ScheduleError) as reported:
        build_plan(planner, 0.1)
    assert "Fewer GPUs" not in str(reported.value)
    assert "lower quantile" in str(reported.value)


def test_a_split_has_no_parts_of_one_gpu_and_weights_must_fit(opt_estimator):
    only = planner_of(opt_estimator, 2, [Strategy.WAA_C])
    assert best_parts(only) is None
    setting = opt_estimator.setting
    small = replace(setting.cluster, gpus=2, gpu_memory_utilization=0.5)
    model = catalog.model("opt-13b")
    tight = Planner(Estimator(setting.task, small, model, setting.tables), [1, 2])
    assert best_parts(tight) is None


def test_parts_lie_within_nodes_or_are_complete_nodes_that_use_up_all():
    assert part_sizes(4, 4) == [1, 2]
    assert part_sizes(7, 8) == [1, 2, 4]
    assert part_sizes(48, 8) == [1, 2, 4, 8, 16, 24]
    assert part_sizes(1, 8) == []


def min_s(planner):
    with pytest.raises(ScheduleError) as reported:
        planner.best(0.01)
    return float(re.search(r"Allow at least ([\d.]+) s", str(reported.value))[1])
