"""Ctrl-C during replanning: nothing is lost, and the run does not wait for a plan that it will not follow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import replanning_process
from simulated_world import fresh

from lengthwise.apps.ledger import State
from lengthwise.apps.run import run_simulated

pytestmark = pytest.mark.slow
SCRIPT = Path(replanning_process.__file__)


def answers(ledger, job):
    return [(row.state, row.output) for row in ledger.rows(0, len(job.layout.tasks))]


@pytest.mark.parametrize("way", ["current", "virtual"])
def test_a_run_interrupted_during_replanning_loses_nothing_and_resumes(tmp_path, way):
    job, launcher = replanning_process.parts()
    with fresh(tmp_path, "whole.sqlite") as ledger:
        assert run_simulated(job, ledger, launcher).exit_code == 0
        complete = answers(ledger, job)

    message = tmp_path / "said.txt"
    with message.open("wb") as file:
        process = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path), way], stdout=file)
    while replanning_process.PLANNING not in message.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    if way == "current":
        assert replanning_process.PLANNED not in message.read_text()

    job, launcher = replanning_process.parts()
    with fresh(tmp_path) as ledger:
        states = {state for _, state in ledger.counts()}
        assert State.LEASED not in states
        assert not [name for name in ledger.metadata() if name.startswith("owner:")]
        retained = answers(ledger, job)
        assert all(one == other for one, other in zip(retained, complete, strict=True) if one[0] == State.DONE)
        finished = run_simulated(job, ledger, launcher, from_s=time.time())
        assert finished.resumed
        assert finished.exit_code == 0
        assert answers(ledger, job) == complete
