"""A run's folder is one coordinator's at a time; the leases of dead ones are taken at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from simulated_world import World, fresh, plan, tasks_of

from lengthwise.apps.ledger import State
from lengthwise.apps.run import RunFolder, live_coordinators, new_owner
from lengthwise.apps.run.job import is_dead
from lengthwise.schema.errors import InputError, OutputError


def test_a_folder_with_a_run_in_it_is_refused_without_resume(tmp_path):
    folder = RunFolder(tmp_path / "out")
    assert not folder.has_run
    with folder.locked(resume=False) as ledger:
        assert ledger.metadata() == {}
    with pytest.raises(InputError, match="holds a run already: go on with it by --resume"), folder.locked(resume=False):
        pass
    with folder.locked(resume=True) as ledger:
        assert ledger.metadata() == {}


def test_two_coordinators_in_one_folder_are_refused(tmp_path):
    folder = RunFolder(tmp_path / "out")
    one, two = folder.locked(resume=False), folder.locked(resume=True)
    with one, pytest.raises(InputError, match="one coordinator at a time"), two:
        pass


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot run in"), RunFolder(tmp_path / "file" / "out").locked(resume=False):
        pass


def dead_owner():
    """Of a process that has ended."""
    words = "from lengthwise.apps.run.job import new_owner; print(new_owner())"
    return subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout.strip()


def test_a_process_that_has_exited_is_known_to_be_dead_and_others_are_not():
    own, other = new_owner(), dead_owner()
    assert not is_dead(own)
    assert is_dead(other)
    host, *rest = other.split("/")
    assert not is_dead("/".join([host + "-other", *rest]))
    assert not is_dead("somebody")
    boot = own.split("/")
    boot[1] = "an-earlier-boot"
    assert is_dead("/".join(boot))


def test_leases_of_a_dead_coordinator_are_taken_at_once_those_of_a_live_one_when_they_run_out(tmp_path):
    world = World(tasks_of([0] * 6), [(plan(0),)])
    dead, elsewhere = dead_owner(), new_owner().replace("/", "-elsewhere/", 1)
    with fresh(tmp_path) as ledger:
        ledger.open(world.job().identity, world.layout.tasks)
        ledger.set_metadata({f"owner:{dead}": "runs", f"owner:{elsewhere}": "runs"})
        assert len(ledger.lease(0, 3, owner=dead, now_s=0.0, lease_s=1e6)) == 3
        assert len(ledger.lease(0, 2, owner=elsewhere, now_s=0.0, lease_s=500.0)) == 2
        finished = world.run(ledger)
        assert finished.resumed
        assert finished.of(State.DONE) == 6
        assert 500.0 < finished.seconds < 600.0
        assert live_coordinators(ledger) == [elsewhere]
