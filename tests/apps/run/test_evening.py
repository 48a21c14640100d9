"""A replica that joins late takes over a share of what is under way; nothing is lost, and it is sooner over."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from engines_world import answers as message
from engines_world import engines, job_of, local, play, reported, undisturbed, until
from plan_world import tasks_of
from simulated_world import World, fresh, plan

from lengthwise.apps.ledger import State, open_ledger
from lengthwise.schema.app import TaskDraw


def late(stages, *, seconds=lambda plan, how: float(how == "start")):
    """A hundred long answers on one engine, and a short model beside them whose GPU is free soon."""
    world = World(tasks_of([0] * 100 + [1]), stages, gpus=2, seconds=seconds)
    lengths = np.array([500] * 100 + [20])
    world.draw = TaskDraw(world.draw.present, world.draw.prompt_tokens, lengths)
    return world


def test_half_of_what_is_under_way_goes_to_the_one_that_joins(tmp_path):
    alone, two = late([(plan(0), plan(1))]), late([(plan(0), plan(1)), (plan(0, dp=2),)])
    with fresh(tmp_path, "isolated") as one, fresh(tmp_path, "two") as other:
        finished, sooner = alone.run(one), two.run(other)
        assert (finished.of(State.DONE), sooner.of(State.DONE)) == (101, 101)
        assert sooner.seconds < 0.95 * finished.seconds
        assert [row.output for row in one.rows(0, 101)] == [row.output for row in other.rows(0, 101)]
        assert {row.attempts for row in other.rows(0, 101)} == {1}


@pytest.mark.slow
def test_on_real_engines_they_go_on_from_their_tokens(tmp_path):
    tasks = tasks_of([0] * 20 + [1])
    slow = {"more": "--fixed-s 0.05", "max_num_seqs": 32}
    job = job_of(tasks, [(plan(0), plan(1)), (plan(0, dp=2),)])
    job.decider.lengths = [200] * 20 + [3]
    job.decider.most = 220
    launcher, logs = local(tmp_path, ("m0", "m1"), **slow), {}

    async def look(_, launcher):
        while True:
            await until(lambda: engines(launcher))
            for url, pid in engines(launcher):
                with contextlib.suppress(OSError):  # it may have ended since
                    logs[pid] = await asyncio.to_thread(reported, url)
            await asyncio.sleep(0.05)

    complete = undisturbed(tmp_path / "complete", tasks, decider=job.decider, **slow)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, look))
        assert finished.exit_code == 0
        assert message(ledger, job.layout) == complete
    assert len([event for event in finished.events if event.what == "ready" and event.model == 0]) == 2
    assert sum(log["aborts"] for log in logs.values()) >= 8
