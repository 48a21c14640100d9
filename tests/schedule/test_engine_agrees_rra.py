"""Estimates of RRA against the event engine: drawn lengths, a saturated queue, the same tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lengthwise.engine import simulate
from lengthwise.schedule import Controls, Estimator, Strategy, TaskLengths
from lengthwise.schedule.controls import rra_layout
from lengthwise.schema.cost_tables import OtherDegree
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.workload import Workload

REQUESTS = 60_000
LEVEL = 0.99
LAYOUTS = ((1, 0), (2, 1), (2, 2), (4, 1))
"""(tp, groups) on four GPUs: four stages, three of two degrees, two, one."""


def deployed(controls, model, cluster, tables):
    """The schedule on a replica that has more memory than it needs: estimates here are of time."""
    stages = rra_layout(model.layers, cluster.gpus, controls.tp, controls.tp_groups).stages
    degree = max(stage.tp for stage in stages)
    single = np.array([int(stage.tp != degree) for stage in stages])
    layers = np.array([stage.layers for stage in stages])
    cost = dataclasses.replace(tables[degree], stage_layers=layers)
    if single.any():
        cost = dataclasses.replace(cost, other=OtherDegree(tables[1], single))
    given = {"prefill_batch": controls.prefill_batch, "decode_steps": controls.decode_steps}
    given["micro_batches"] = controls.micro_batches or 0
    batching = f"rra({', '.join(f'{name}={value}' for name, value in given.items())})"
    parallel = Parallelism(degree, len(stages), single_stages=int(single.sum()))
    limits, kv = EngineLimits(max_num_seqs=4096, watermark=0.0), KvPlan(10**6, 16, 0.0, 0.0, 0.0, 0.0)
    return Deployment(model, cluster.gpu, cluster.node, parallel, limits, Scheduler(batching=batching), cost, kv, 1024)


def played(controls, seed, task, model, cluster, tables):
    """(requests a second, mean latency of those whose output is the quantile), a quarter of the run left out."""
    rng = np.random.default_rng(seed)
    prompt, output = (rng.choice(len(pmf), REQUESTS, p=pmf) for pmf in (task.prompt_pmf, task.output_pmf))
    workload = Workload(np.zeros(REQUESTS), prompt, output)
    requests = simulate(workload, deployed(controls, model, cluster, tables)).requests
    started_s = requests.scheduled_s
    from_s, to_s = started_s[REQUESTS // 4], started_s[-1]
    inside = (started_s >= from_s) & (started_s < to_s)
    long = inside & (output == task.output_quantile(LEVEL))
    assert long.sum() > 10
    return inside.sum() / (to_s - from_s), (requests.finished_s - started_s)[long].mean()


def drawn(count, seed):
    """Schedules at random, each layout in turn; a micro-batch has some requests at any time."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        tp, groups = LAYOUTS[number % len(LAYOUTS)]
        yield Controls(Strategy.RRA, int(rng.integers(12, 60)), int(rng.integers(2, 40)), tp=tp, tp_groups=groups)


def agree(estimator, controls, seed, model, cluster, tables, *, within=0.05):
    expected = estimator.estimate([controls])
    assert expected.feasible[0], "memory holds it"
    rate_rps, latency_s = played(controls, seed, estimator.setting.task, model, cluster, tables)
    assert rate_rps == pytest.approx(expected.throughput_rps[0], rel=within), controls
    assert latency_s == pytest.approx(expected.latency_s[0], rel=within), controls


@pytest.mark.parametrize(("tp", "groups"), LAYOUTS)
def test_a_schedule_yields_what_was_expected(opt_estimator, opt, four_a40, opt_tables, tp, groups):
    agree(opt_estimator, Controls(Strategy.RRA, 40, 13, tp=tp, tp_groups=groups), 3, opt, four_a40, opt_tables)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["exegpt-s", "exegpt-t"])
def test_random_schedules_yield_what_was_expected(opt, four_a40, opt_tables, preset):
    estimator, agreed = Estimator(TaskLengths.from_preset(preset), four_a40, opt, opt_tables), 0
    for seed, controls in enumerate(drawn(30, seed=11)):
        if estimator.estimate([controls]).feasible[0]:
            agree(estimator, controls, seed, opt, four_a40, opt_tables)
            agreed += 1
    assert agreed >= 20


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_fewer_micro_batches_than_stages(opt_estimator, opt, four_a40, opt_tables, micro_batches):
    controls = Controls(Strategy.RRA, 36, 12, micro_batches=micro_batches)
    agree(opt_estimator, controls, 5, opt, four_a40, opt_tables)
