"""An application run on a real Ray of this machine: a worker killed, the run cancelled, gone on with."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / "apps"), str(Path(__file__).parent)]
from app_world import chain
from test_app_runs import QUICK, ROWS, small, space

from lengthwise.apps.launch import EngineConfig, EngineTimeouts
from lengthwise.apps.ledger import open_ledger
from lengthwise.apps.run import CANCEL, Settings
from lengthwise.usecases.app_plan import planned_app
from lengthwise.usecases.app_run import RunMonitor, run_app
from lengthwise.usecases.app_setup import Engines

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
SERVER = f"{sys.executable} -m lengthwise.testing.engine_server --host {{host}} --port {{port}} --model {{name}}"
SETTINGS = Settings(linger_s=0.02, lease_s=5.0, backoff_s=0.05, max_backoff_s=0.2)


def engines(launcher, more):
    loaded = [EngineConfig(name, served=f"{name}-on-ray", max_num_seqs=4, command=f"{SERVER} {more}") for name in "abc"]
    return Engines(launcher, loaded, timeouts=EngineTimeouts(ready_s=60.0, grace_s=3.0), ray="local")


def processes():
    """Of engines that were started for this test."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
        except OSError:
            continue
        if any(word.endswith(b"-on-ray") for word in words) and b"lengthwise.testing.engine_server" in words:
            found.append(int(folder.name))
    return found


class Error:
    """Kills an engine once something is under way, and has the run end once something is done."""

    def __init__(self, ledger):
        self.ledger, self.killed, self.cancelled = ledger, [], False

    def __call__(self, progress):
        going, finished = (sum(getattr(one, name) for one in progress.models) for name in ("active", "completed"))
        if going and not self.killed:
            self.killed = processes()[:1]
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)
        elif self.killed and finished and not self.cancelled:
            self.cancelled = True
            with open_ledger(self.ledger) as ledger:
                ledger.set_metadata({CANCEL: "1"})


def test_a_run_on_ray_survives_a_killed_worker_and_goes_on_after_it_was_cancelled(tmp_path):
    planned = planned_app(small(chain()), ROWS, space(chain()), QUICK)
    alone = run_app(planned, ROWS, engines("local", "--fixed-s 0.002"), tmp_path / "isolated", settings=SETTINGS)
    folder = tmp_path / "ray"
    error = Error(folder / "ledger.sqlite")
    watching = RunMonitor(error, every_s=0.05)
    slow = engines("ray", "--fixed-s 0.1")
    first = run_app(planned, ROWS, slow, folder, settings=SETTINGS, monitor=watching)
    assert error.killed
    reported = [event["what"] for event in first.metadata["events"]]
    # One that was not ready yet when it was killed was never there to die: it is restarted all the same.
    assert "died" in reported or reported.count("start") > reported.count("ready")
    assert first.completed.how == "cancelled"
    last = run_app(planned, ROWS, engines("ray", "--fixed-s 0.002"), folder, settings=SETTINGS, resume=True)
    assert last.completed.exit_code == 0
    assert last.completed.resumed
    assert last.exported.files == alone.exported.files
    assert not processes()
