"""Tables of stages of two degrees: kept in a file, checked, and read stage by stage by both engines."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from test_kernel_agrees import assert_same
from worlds import GPU, MODEL, NODE, cost_tables, of_two_degrees

from lengthwise.cost import load, save
from lengthwise.cost.tables import check
from lengthwise.engine import simulate
from lengthwise.engine.step_time import CostReader
from lengthwise.schema.cost_tables import OtherDegree
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.workload import Workload

ENGINES = pytest.mark.parametrize("engine", ["kernel", "reference"])
STEP = (7, 900, [(60, 0), (33, 50)])


def run(tables, engine):
    rng = np.random.default_rng(4)
    n, limits = 30, EngineLimits(max_num_seqs=8, watermark=0.0)
    workload = Workload(np.zeros(n), rng.integers(1, 90, n), rng.integers(1, 30, n))
    parallel = Parallelism(pp=len(tables.stage_layers))
    scheduler, kv = Scheduler(batching="mixed"), KvPlan(500, 16, 0, 0, 0, 0)
    return simulate(workload, Deployment(MODEL, GPU, NODE, parallel, limits, scheduler, tables, kv, 400), engine=engine)


def test_a_file_holds_both_degrees(tmp_path):
    tables = of_two_degrees(cost_tables([2, 1, 1], additional=True), [0, 1, 1])
    save(tables, tmp_path / "two.npz")
    assert_same(load(tmp_path / "two.npz"), tables)


def test_each_stage_takes_the_time_of_its_degree():
    tables = of_two_degrees(cost_tables([2, 1, 3]), [0, 1, 1])
    plain = dataclasses.replace(tables, other=None)
    other = dataclasses.replace(tables.other.tables, stage_layers=tables.stage_layers)
    a, b, both = (CostReader(t).step(*STEP) for t in (plain, other, tables))
    assert both.stages_s == [a.stages_s[0], b.stages_s[1], b.stages_s[2]]
    assert both.layer_s == pytest.approx(a.layer_s * 2 / 6 + b.layer_s * 4 / 6)
    assert both.send_s == pytest.approx((a.send_s + b.send_s) / 2)
    assert (both.embedding_s, both.host_s, both.head_s) == (a.embedding_s, a.host_s, b.head_s)


@ENGINES
def test_a_pipeline_of_one_degree_is_the_same_in_either_form(engine):
    plain = cost_tables([1, 1, 1])
    marked = of_two_degrees(plain, [0, 0, 0])
    other = OtherDegree(plain, np.ones(3, np.int64))
    turned = dataclasses.replace(marked.other.tables, other=other, stage_layers=plain.stage_layers)
    assert_same(run(marked, engine).requests, run(plain, engine).requests)
    assert_same(run(turned, engine).requests, run(plain, engine).requests)


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({"stages": np.array([0])}, "for each of the stages"),
        ({"stages": np.array([0, 2])}, "for each of the stages"),
        ({"tables": of_two_degrees(cost_tables([2, 2]), [0, 1])}, "no other of its own"),
        ({"tables": cost_tables([1], rule=1)}, "the same attention rule"),
        ({"tables": dataclasses.replace(cost_tables([1]), head_s=np.array([0, -1.0]))}, "other"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(change, states):
    tables = of_two_degrees(cost_tables([2, 2]), [0, 1])
    with pytest.raises(ProfileError, match=states):
        check(dataclasses.replace(tables, other=dataclasses.replace(tables.other, **change)), "these tables")


def test_gpus_count_groups_and_single_stages():
    assert Parallelism(tp=4, pp=3, replicas=2, single_stages=2).gpus == 2 * (4 + 1 + 1)
    with pytest.raises(InputError, match="single_stages"):
        Parallelism(tp=2, pp=1, single_stages=2)
