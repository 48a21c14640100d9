"""A simulated replica takes as long as the replica of the plan, which the engine simulates."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from plan_world import cluster_of, ensemble, served

from lengthwise import engine
from lengthwise.apps.launch import Draft, Lengths, SimulatedLauncher, TaskRequest, run_virtually
from lengthwise.apps.plan import Space
from lengthwise.schema.workload import Workload


@pytest.mark.parametrize("name", ["llama-2-13b", "opt-1.3b"])
def test_a_replica_takes_as_long_as_the_planned_one_also_where_memory_is_short(name):
    """Of the larger model 256 outputs at once do not all have room."""
    space = Space(served(1, name), cluster_of(1))
    (plan, *_) = space.plans(0)
    tasks, draw = ensemble((1000,), np.random.default_rng(1), mean=180.0)
    launcher = SimulatedLauncher(tasks.models, space.deployment, Lengths.of(tasks, draw), lambda *_: 0.0)

    async def serve():
        replica = await launcher.start(plan, (0,))

        async def one(task):
            await replica.generate(TaskRequest(task, "completions", {}), Draft())
            return asyncio.get_running_loop().time()

        return await asyncio.gather(*(one(task) for task in range(len(tasks))))

    finished_s = np.array(run_virtually(serve()))
    workload = Workload(np.zeros(len(tasks)), draw.prompt_tokens, draw.output_tokens)
    planned_s = engine.simulate(workload, space.deployment(plan), max_log_steps=0).requests.finished_s
    assert finished_s.max() == pytest.approx(float(planned_s.max()), rel=0.002)
    assert finished_s.mean() == pytest.approx(float(planned_s.mean()), rel=0.002)
