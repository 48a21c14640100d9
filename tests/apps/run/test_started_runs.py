"""A resumed run reports the answers that it finds before an engine starts, and they match the ledger."""

from __future__ import annotations

from simulated_world import World, fresh, plan, tasks_of

from lengthwise.apps.ledger import State
from lengthwise.apps.run import identity_of


def world_of():
    """Each row asks the first model, then the second."""
    parents = [(2 * i + 1, 2 * i) for i in range(200)]
    return World(tasks_of([0, 1] * 200, parents=parents), [(plan(0), plan(1))], gpus=2, mean=400.0)


def ran(world, ledger, **more):
    """The finished run, and its report at the start with the engines started by then."""
    launcher, reported = world.launcher(), []
    finished = world.run(
        ledger, launcher=launcher, started=lambda saved: reported.append((saved, launcher.starts)), **more
    )
    return finished, reported


def cut(world, ledger):
    """A run that is cancelled on its way."""

    def look(progress):
        if progress.share > 0.3:
            ledger.set_metadata({"cancel": "1"})

    finished = world.run(ledger, monitor=look, watch_s=0.5)
    assert finished.how == "cancelled"
    return finished.of(State.DONE)


def test_a_first_run_has_nothing_to_report(tmp_path):
    with fresh(tmp_path) as ledger:
        finished, reported = ran(world_of(), ledger)
    assert (finished.exit_code, reported) == (0, [])


def test_a_resumed_run_reports_at_its_start_what_is_answered(tmp_path):
    world = world_of()
    with fresh(tmp_path) as ledger:
        done = cut(world, ledger)
        assert 0 < done < 400
        finished, [(saved, starts)] = ran(world, ledger)
    assert finished.of(State.DONE) == 400
    assert starts == 0
    assert sum(saved.retained) == done
    assert sum(saved.retained) + sum(saved.remaining) == 400
    assert f"{saved.retained[0]} of {saved.retained[0] + saved.remaining[0]} answers kept" in saved.words()


def test_a_second_run_over_the_answers_of_a_first_reports_at_its_start_what_it_reuses(tmp_path):
    world = world_of()
    with fresh(tmp_path) as ledger:
        done = cut(world, ledger)
        finished, [(saved, starts)] = ran(world, ledger, identity=identity_of("another", world.layout))
    assert finished.of(State.DONE) == 400
    assert starts == 0
    assert sum(saved.retained) == done
    assert finished.reused == saved
