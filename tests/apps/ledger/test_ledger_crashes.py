"""Processes die at any moment: what was recorded stays, and the run ends as if nothing had been."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ledger_world import (
    LIMIT_S,
    child,
    drain,
    drain_and_die,
    drain_until_killed,
    finish,
    finished,
    tasks_of,
    undisturbed,
)

from lengthwise.apps.ledger import FINISHED, State, open_ledger
from lengthwise.schema.errors import OutputError

TASKS = tasks_of(9)


@pytest.mark.slow
def test_killed_before_any_statement_a_run_resumes_and_ends_alike(place, tmp_path):
    expected = undisturbed(place("expected"), TASKS)
    assert {state for _, state, *_ in expected} == set(FINISHED), "every kind of end is there"
    log = tmp_path / "count"
    assert finished(child(drain_and_die, place("complete"), TASKS, 0, str(log))) == 0
    count = int(log.read_text().split()[-1])
    assert count > 40, "the points at which it is killed are those of a whole run"
    for kill_at in range(1, count + 1):
        died_at(place, tmp_path, kill_at, expected)


def died_at(place, tmp_path, kill_at, expected):
    run, log = place(f"at{kill_at}"), tmp_path / f"log{kill_at}"
    assert finished(child(drain_and_die, run, TASKS, kill_at, str(log))) == -signal.SIGKILL
    with open_ledger(run) as ledger:
        if not ledger.counts():  # killed before the tasks were laid out: all or none of them are
            assert not ledger.open("run", TASKS)
        states = {row.task: row.state for row in ledger.rows(0, len(TASKS))}
    acknowledged = {int(task): State(int(state)) for task, state in map(str.split, log.read_text().splitlines())}
    retained = {task: state for task, state in acknowledged.items() if state != State.READY}
    assert retained.items() <= states.items(), "what was acknowledged is there"
    assert finish(run, TASKS) == expected


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_random_moments_again_and_again_a_run_ends_alike(place, seed):
    tasks, rng, ends = tasks_of(400, seed), np.random.default_rng(seed), []
    begin_s = time.monotonic()
    expected = undisturbed(place("expected"), tasks)
    whole_s = time.monotonic() - begin_s
    for _ in range(12):
        process = child(drain_until_killed, place(), tasks)
        process.join(float(rng.uniform(0, whole_s / 4)))
        process.kill()
        ends.append(finished(process))
    assert -signal.SIGKILL in ends, "at least one was killed on its way"
    assert set(ends) <= {0, -signal.SIGKILL}
    with open_ledger(place()) as ledger:
        ledger.open("run", tasks)
    assert finish(place(), tasks) == expected


@pytest.mark.slow
def test_a_server_that_crashes_under_a_run_loses_nothing_that_was_acknowledged(server):
    tasks, place, done = tasks_of(600), server.place("crashing"), []
    expected = undisturbed(server.place("uncrashed"), tasks)
    with open_ledger(place) as ledger:
        ledger.open("run", tasks)
        for crash in range(3):
            worker = threading.Thread(target=work, args=(ledger, done), daemon=True)
            worker.start()
            until_more(done, worker)
            server.crash()
            worker.join(LIMIT_S)
            with pytest.raises(OutputError, match="cannot use the ledger"):
                ledger.counts()
            server.start()
            states = {row.task: row.state for row in ledger.rows(0, 600)}  # the same handle reconnects
            assert all(states[one.task] == one.state for one in done if one.state != State.READY), crash
            ledger.expire(now_s=1e9)
    assert finish(place, tasks) == expected


def until_more(done, worker):
    before = len(done)
    until(lambda: len(done) > before + 20 or not worker.is_alive())


def work(ledger, done):
    with contextlib.suppress(OutputError):
        drain(ledger, "worker", batch=2, acknowledged=done.extend)


def until(message):
    end = time.monotonic() + LIMIT_S
    while not message():
        assert time.monotonic() < end, "never came"
        time.sleep(0.001)


def test_a_coordinator_that_is_frozen_loses_its_tasks_and_ends_nothing_when_it_wakes(place):
    tasks = tasks_of(400)
    process = child(drain_until_killed, place(), tasks)
    until(lambda: laid_out(place()))
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: state_of(process.pid) == "T")
    try:
        assert left(place()), "it is frozen on its way"
        # Frozen within a transaction, it holds a file's lock.
        with open_ledger(place(), timeout_s=1) as ledger, contextlib.suppress(OutputError):
            ledger.expire(now_s=1e9)
            drain(ledger, "other")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    finished(process)
    assert finish(place(), tasks) == undisturbed(place("expected"), tasks)


def state_of(pid):
    """As the kernel has it: T of one that is stopped."""
    return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0]


def left(place):
    """Tasks that have not ended."""
    with open_ledger(place, read_only=True) as ledger:
        return sum(n for (_, state), n in ledger.counts().items() if state not in FINISHED)


def laid_out(place):
    with open_ledger(place) as ledger:
        return bool(ledger.counts())
