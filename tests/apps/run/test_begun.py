"""What a run that is gone on with finds answered is told before an engine starts, and it is what the ledger has."""

from __future__ import annotations

from simulated_world import World, fresh, plan, tasks_of

from lengthwise.apps.ledger import State
from lengthwise.apps.run import identity_of


def world_of():
    """Each row asks the first model, then the second."""
    parents = [(2 * i + 1, 2 * i) for i in range(200)]
    return World(tasks_of([0, 1] * 200, parents=parents), [(plan(0), plan(1))], gpus=2, mean=400.0)


def ran(world, ledger, **more):
    """What was told, and what had been started by then."""
    launcher, told = world.launcher(), []
    ended = world.run(ledger, launcher=launcher, started=lambda kept: told.append((kept, launcher.starts)), **more)
    return ended, told


def cut(world, ledger):
    """A run that is cancelled on its way."""

    def look(progress):
        if progress.share > 0.3:
            ledger.note({"cancel": "1"})

    ended = world.run(ledger, monitor=look, watch_s=0.5)
    assert ended.how == "cancelled"
    return ended.of(State.DONE)


def test_a_first_run_has_nothing_to_tell(tmp_path):
    with fresh(tmp_path) as ledger:
        ended, told = ran(world_of(), ledger)
    assert (ended.exit_code, told) == (0, [])


def test_a_run_that_is_gone_on_with_tells_at_its_start_what_is_answered(tmp_path):
    world = world_of()
    with fresh(tmp_path) as ledger:
        done = cut(world, ledger)
        assert 0 < done < 400
        ended, [(kept, starts)] = ran(world, ledger)
    assert ended.of(State.DONE) == 400
    assert starts == 0
    assert sum(kept.retained) == done
    assert sum(kept.retained) + sum(kept.remaining) == 400
    assert f"{kept.retained[0]} of {kept.retained[0] + kept.remaining[0]} answers kept" in kept.words()


def test_a_second_run_over_the_answers_of_a_first_tells_at_its_start_what_it_takes_over(tmp_path):
    world = world_of()
    with fresh(tmp_path) as ledger:
        done = cut(world, ledger)
        ended, [(kept, starts)] = ran(world, ledger, identity=identity_of("another", world.layout))
    assert ended.of(State.DONE) == 400
    assert starts == 0
    assert sum(kept.retained) == done
    assert ended.reused == kept
