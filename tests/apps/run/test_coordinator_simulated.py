"""The coordinator in virtual time: all tasks end, in the plan's order, the same whenever it is run."""

from __future__ import annotations

import numpy as np
from simulated_world import World, fresh, plan, tasks_of

from lengthwise.apps.ledger import State
from lengthwise.schema.app import TaskDraw


def rows(ledger, layout):
    """Every task's answer in the application's order."""
    by_place = ledger.rows(0, len(layout.tasks))
    return [by_place[int(place)] for place in layout.place_of]


def test_all_tasks_of_one_model_are_answered(tmp_path):
    world = World(tasks_of([0] * 300), [(plan(0, dp=2),)])
    with fresh(tmp_path) as ledger:
        finished = world.run(ledger)
        assert (finished.how, finished.exit_code, finished.of(State.DONE)) == ("done", 0, 300)
        tokens = [row.output.output_tokens for row in rows(ledger, world.layout)]
        assert tokens == world.draw.output_tokens.tolist()
        assert ledger.counts() == {(0, State.DONE): 300}
        assert not [name for name in ledger.metadata() if name.startswith("owner:")]


def drawn(world, output_tokens):
    return TaskDraw(world.draw.present, world.draw.prompt_tokens, np.asarray(output_tokens, np.int64))


def test_a_model_that_finishes_makes_room_for_the_next(tmp_path):
    tasks = tasks_of([0] * 40 + [1] * 60 + [2] * 20)
    stages = [(plan(0, 2), plan(1, 2)), (plan(1, 2), plan(2, 2))]
    world = World(tasks, stages)
    world.draw = drawn(world, [20] * 40 + [500] * 60 + [20] * 20)
    with fresh(tmp_path) as ledger:
        finished = world.run(ledger)
        assert finished.of(State.DONE) == 120
        ready = [(event.model, event.gpus) for event in finished.events if event.what == "ready"]
        assert sorted(ready) == [(0, (0,)), (0, (1,)), (1, (2,)), (1, (3,)), (2, (0,)), (2, (1,))]
        stopped = [event.model for event in finished.events if event.what == "stop"]
        assert stopped[:2] == [0, 0]


def test_chains_between_models_run_to_their_end(tmp_path):
    models = [0, 1, 0, 1] * 25
    parents = [(4 * i + j, 4 * i + j - 1) for i in range(25) for j in (1, 2, 3)]
    world = World(tasks_of(models, parents=parents), [(plan(0), plan(1))])
    with fresh(tmp_path) as ledger:
        assert world.run(ledger).of(State.DONE) == 100


def test_models_that_wait_for_each_other_take_turns_on_one_gpu(tmp_path):
    models = [0, 1, 0, 1] * 5
    parents = [(4 * i + j, 4 * i + j - 1) for i in range(5) for j in (1, 2, 3)]
    world = World(tasks_of(models, parents=parents), [(plan(0),), (plan(1),), (plan(0),), (plan(1),)], gpus=1)
    with fresh(tmp_path) as ledger:
        finished = world.run(ledger)
        assert finished.of(State.DONE) == 20
        assert [event.model for event in finished.events if event.what == "ready"] == [0, 1, 0, 1]


def test_engines_that_can_sleep_are_woken_where_they_were(tmp_path):
    models = [0, 1, 0] * 5
    parents = [(3 * i + j, 3 * i + j - 1) for i in range(5) for j in (1, 2)]
    world = World(tasks_of(models, parents=parents), [(plan(0),), (plan(1),), (plan(0),)], gpus=1)
    world.sleeps = lambda _: True
    with fresh(tmp_path) as ledger:
        finished = world.run(ledger)
        assert finished.of(State.DONE) == 15
        what = [(event.what, event.model) for event in finished.events if event.what in ("start", "wake")]
        assert what == [("start", 0), ("start", 1), ("wake", 0)]


def test_requests_interrupted_between_stages_keep_their_tokens(tmp_path):
    tasks = tasks_of([0] * 8 + [1] * 2)
    world = World(tasks, [(plan(0), plan(1)), (plan(0, tp=2),)], gpus=2)
    world.draw = drawn(world, [500] * 8 + [50] * 2)
    with fresh(tmp_path) as ledger:
        saved = []
        keep, ledger.save = ledger.save, lambda partials: (saved.extend(partials), keep(partials))[1]
        finished = world.run(ledger)
        assert finished.of(State.DONE) == 10
        assert [len(partial.output_ids) > 40 for _, partial in saved] == [True] * 8
        tokens = [row.output.output_tokens for row in rows(ledger, world.layout)]
        assert tokens == world.draw.output_tokens.tolist()
        uncut = World(tasks, [(plan(0, tp=2),), (plan(1, tp=2),)], gpus=2)
        uncut.draw = world.draw
        with fresh(tmp_path, "uncut") as other:
            uncut.run(other)
            assert [row.output for row in rows(other, uncut.layout)] == [
                row.output for row in rows(ledger, world.layout)
            ]


def test_tasks_that_do_not_come_to_be_are_skipped(tmp_path):
    tasks = tasks_of([0] * 10)
    world = World(tasks, [(plan(0),)])
    present = np.arange(10) % 2 == 0
    draw = type(world.draw)(present, world.draw.prompt_tokens, world.draw.output_tokens)
    world = World(tasks, [(plan(0),)], draw=draw)
    with fresh(tmp_path) as ledger:
        finished = world.run(ledger)
        assert (finished.of(State.DONE), finished.of(State.SKIPPED)) == (5, 5)


def test_the_same_run_takes_the_same_time_and_gives_the_same_outputs(tmp_path):
    models = [0, 1] * 50
    parents = [(2 * i + 1, 2 * i) for i in range(50)]
    world = World(tasks_of(models, parents=parents), [(plan(0, 2), plan(1, 2))])
    reported = []
    for name in ("a", "b"):
        with fresh(tmp_path, name) as ledger:
            finished = world.run(ledger)
            reported.append((finished.seconds, finished.events, [row.output for row in rows(ledger, world.layout)]))
    assert reported[0] == reported[1]
