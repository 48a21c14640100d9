"""Whatever dies, the resumed run gives the answers of an undisturbed one: nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest
from engines_world import (
    QUICK,
    Prompts,
    active_requests,
    answers,
    chained,
    dispatchers,
    engines,
    job_of,
    local,
    plan,
    play,
    post,
    reported,
    undisturbed,
    until,
    writer,
)
from killed_world import gone, started
from plan_world import tasks_of

from lengthwise.apps.launch.local import EngineTimeouts
from lengthwise.apps.ledger import FINISHED, State, open_ledger
from lengthwise.apps.run import Settings, new_owner
from lengthwise.schema.errors import EngineError, OutputError

pytestmark = pytest.mark.slow
BOTH = [(plan(0), plan(1))]
SLOW = {"more": "--fixed-s 0.05"}


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The answers of the chained application in an undisturbed run."""
    return undisturbed(tmp_path_factory.mktemp("complete"), chained())


def resumed(tmp_path, complete):
    """The run gone on with; it must end as the undisturbed one did."""
    job = job_of(chained(), BOTH)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path / "retry", ("m0", "m1"))))
        assert finished.resumed
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
        assert sum(ledger.counts().values()) == len(chained())
    return finished


def children_of(pid):
    """Processes that it started and that are still there, keepers included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(words[1]) == pid and words[0] not in "ZX":
            found.append(path.parent.name)
    return found


def fault(kind, number=1, seen=None, **fields):
    """Sets a fault for the next requests of the first engine that is there, and looks on until so many had it."""

    async def during(_, launcher):
        await until(lambda: engines(launcher))
        url = engines(launcher)[0][0]
        await asyncio.to_thread(post, url, "/emulator/faults", {"incoming": [{"kind": kind, **fields}] * number})
        while seen is not None and len(seen) < number:
            await asyncio.sleep(0.01)
            try:
                entries = (await asyncio.to_thread(reported, url))["entries"]
            except OSError:
                return  # it was ended
            seen[:] = [entry for entry in entries if entry["fault"] == kind and entry["finished"]]

    return during


@pytest.mark.parametrize(
    "when",
    [
        lambda row: row["pids"],
        lambda row: row["active"] >= 4,
        lambda row: row["done"] >= 1,
        lambda row: row["done"] >= 8,
    ],
    ids=["ready", "leased", "done", "children"],
)
def test_a_killed_coordinator_leaves_no_engine_and_its_tasks_are_taken_at_once(tmp_path, complete, when):
    process, pids = started(tmp_path, when)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert gone(pids)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        assert sum(n for (_, state), n in ledger.counts().items() if state not in FINISHED), "it was on its way"
        assert any(name.startswith("owner:") for name in ledger.metadata()), "the killed coordinator did not deregister"
    resumed(tmp_path, complete)


def test_a_run_stopped_once_returns_all_leases_keeps_tokens_and_leaves_no_engine(tmp_path, complete):
    process, pids = started(tmp_path, lambda row: row["active"] >= 4 and row["written"] >= 4)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "--resume" in (tmp_path / "said.txt").read_text()
    assert gone(pids)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        states = {state for _, state in ledger.counts()}
        assert State.LEASED not in states
        assert not [name for name in ledger.metadata() if name.startswith("owner:")]
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as file:
        assert file.execute("SELECT count(*) FROM partials").fetchone()[0] > 0, "tokens are kept"
    resumed(tmp_path, complete)


def test_a_termination_stops_it_as_an_interrupt_does(tmp_path, complete):
    process, pids = started(tmp_path, lambda row: row["active"] >= 2)
    process.terminate()
    assert process.wait() == 130
    assert received(tmp_path) == ["stopped 1"]
    assert gone(pids)
    resumed(tmp_path, complete)


def received(tmp_path):
    """The lines in which a coordinator's process reports that it was requested to stop."""
    return [line for line in (tmp_path / "said.txt").read_text().splitlines() if line.startswith("stopped")]


def test_a_run_interrupted_twice_ends_at_once_and_leaves_the_ledger_intact(tmp_path, complete):
    """Its engines do not go when they are asked to, so that it is still there for the second."""
    process, pids = started(tmp_path, lambda row: row["active"] >= 4, f"stubborn={STUBBORN}")
    process.send_signal(signal.SIGINT)
    until_here(lambda: received(tmp_path) == ["stopped 1"])
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert received(tmp_path) == ["stopped 1", "stopped 2"]
    assert gone(pids)
    resumed(tmp_path, complete)


def until_here(fact, max_s=60.0):
    end = time.monotonic() + max_s
    while not fact():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


STUBBORN = f"{sys.executable} {Path(__file__).parent / 'stubborn.py'}"
PATIENT = EngineTimeouts(ready_s=3600.0, grace_s=150.0, stall_s=20.0, request_s=60.0)
"""With these timeouts a wait for an engine of ``STUBBORN`` lasts longer than any test."""


def stopped_twice(tmp_path, launcher, when, between):
    """A run that is stopped when it may be, and again once it is ending: over within a minute, it waited for none."""
    pids, others = [], set(children_of(os.getpid()))

    async def stop(one, _):
        await until(lambda: when(one))
        pids.extend(pid for pid in children_of(os.getpid()) if pid not in others)
        one.stop()
        await until(between)
        one.stop()

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        job = job_of(chained(), BOTH)
        finished = asyncio.run(asyncio.wait_for(play(job, ledger, launcher, stop), 60.0))
        assert finished.exit_code == 130
        assert finished.of(State.LEASED) == 0
    assert pids
    assert gone(pids)


def test_a_run_stopped_again_while_engines_shut_down_kills_them(tmp_path, complete):
    command = f"{STUBBORN} --host {{host}} --port {{port}} --model {{name}}"
    launcher = local(tmp_path, ("m0", "m1"), command=command, timeouts=PATIENT, **SLOW)

    def going(one):
        return len(engines(launcher)) == 2 and active_requests(one) > 1

    stopped_twice(tmp_path, launcher, going, lambda: not launcher.running)
    resumed(tmp_path, complete)


def test_stopped_again_while_engines_start_it_kills_them(tmp_path, complete):
    launcher = local(tmp_path, ("m0", "m1"), command=f"{STUBBORN} never {{port}}", more="", timeouts=PATIENT)

    def deaf():
        return [log for log in (tmp_path / "logs").glob("*.log") if "deaf" in log.read_text()]

    before = []

    def since():
        before.append(time.monotonic())
        return before[-1] > before[0] + 1.0  # a start that was called off is being ended by then

    stopped_twice(tmp_path, launcher, lambda _: len(deaf()) == 2, since)
    resumed(tmp_path, complete)


def test_stopped_while_engines_start_it_waits_for_none_of_them(tmp_path):
    job = job_of(chained(), BOTH)
    command = f"{sys.executable} -c 'import time; time.sleep(600)' {{port}}"
    launcher, pids = local(tmp_path, ("m0", "m1"), command=command, more=""), []
    before = set(children_of(os.getpid()))

    async def stop(one, _):
        await until(lambda: len(list((tmp_path / "logs").glob("*.log"))) == 2)
        await until(lambda: len(set(children_of(os.getpid())) - before) >= 2)
        pids.extend(set(children_of(os.getpid())) - before)
        one.stop()

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(asyncio.wait_for(play(job, ledger, launcher, stop), 30.0))
        assert finished.exit_code == 130
        assert finished.of(State.LEASED) == 0
        assert [event.what for event in finished.events] == ["start", "start"], "neither was ready"
    assert len(pids) >= 2, "both had been started"
    assert gone(pids)


@pytest.mark.parametrize("after", [0, 3, 12], ids=["before", "early", "late"])
def test_a_killed_engine_is_restarted_and_nothing_is_lost(tmp_path, complete, after):
    job = job_of(chained(), BOTH)

    async def kill(one, launcher):
        await until(lambda: len(engines(launcher)) == 2)
        _, pid = engines(launcher)[0]
        await until(lambda: active_requests(one) > 0)
        for dispatcher in dispatchers(one):
            for slot in dispatcher.slots:
                await until(
                    lambda slot=slot: all(len(w.draft.output_ids) >= min(after, 5) for w in slot.active.values())
                )
        os.kill(pid, signal.SIGKILL)

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"), **SLOW), kill))
        assert finished.exit_code == 0
        assert "died" in [event.what for event in finished.events]
        assert answers(ledger, job.layout) == complete


WITHOUT_ATTEMPT = {"full", "double_usage", "split", "slow"}
"""Faults that the run waits out, or that are none to a correct reader of streams."""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("status", {"status": 500}),
        ("full", {"retry_after_s": 1}),
        ("error", {"after_tokens": 2}),
        ("malformed", {"after_tokens": 2}),
        ("close", {"after_tokens": 3}),
        ("close", {"after_tokens": 0}),
        ("no_done", {}),
        ("double_usage", {}),
        ("split", {}),
        ("slow", {"seconds": 0.01}),
    ],
    ids=["500", "503", "error", "garbage", "truncated", "reset", "no_done", "double_usage", "split", "slow"],
)
def test_a_bad_answer_is_requested_again_and_the_run_ends_the_same(tmp_path, complete, kind, fields):
    job, seen = job_of(chained(), BOTH), []
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        launcher = local(tmp_path, ("m0", "m1"), **SLOW)
        finished = asyncio.run(play(job, ledger, launcher, fault(kind, 2, seen, **fields)))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
        assert len(seen) == 2, "the engine answered two requests so"
        counted = 0 if kind in WITHOUT_ATTEMPT else 2
        assert sum(row.attempts - 1 for row in ledger.rows(0, 18)) == counted, "and each is an attempt, or is none"


def test_a_hung_engine_is_given_up_and_its_request_is_retried(tmp_path, complete):
    from lengthwise.apps.launch import EngineTimeouts

    job = job_of(chained(), BOTH)
    timeouts = EngineTimeouts(ready_s=60.0, grace_s=1.0, stall_s=2.0, request_s=20.0)
    launcher, seen = local(tmp_path, ("m0", "m1"), timeouts=timeouts, **SLOW), []
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, fault("hang", 2, seen, after_tokens=2)))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
        assert [entry["finished"] for entry in seen] == ["aborted"] * 2, "the coordinator gave both up"
        assert sum(row.attempts - 1 for row in ledger.rows(0, 18)) == 2


def test_an_engine_that_fails_repeatedly_is_restarted(tmp_path, complete):
    job = job_of(chained(), BOTH, settings=Settings(**{**vars(QUICK), "max_attempts": 9, "engine_failures": 4}))
    launcher = local(tmp_path, ("m0", "m1"), **SLOW)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, fault("status", 1000, status=500)))
        assert finished.exit_code == 0
        assert sum(row.attempts - 1 for row in ledger.rows(0, 18)) >= 4, "it failed again and again"
        assert len([event for event in finished.events if event.what == "start"]) > 2
        assert "died" not in [event.what for event in finished.events], "it was ended, and had not died"
        assert answers(ledger, job.layout) == complete


def test_an_engine_out_of_memory_ends_its_process_and_is_restarted(tmp_path, complete):
    job = job_of(chained(), BOTH)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(
            play(job, ledger, local(tmp_path, ("m0", "m1"), **SLOW), fault("die", 1, after_tokens=2))
        )
        assert finished.exit_code == 0
        assert "died" in [event.what for event in finished.events]
        assert answers(ledger, job.layout) == complete


def test_a_request_that_is_refused_is_dead_at_once_and_the_rest_finish(tmp_path):
    tasks = tasks_of([0] * 6)
    job = job_of(tasks, [(plan(0),)])
    plain = job.decider.decide

    def decide(task, outputs):
        if task == 2:
            job.decider.most = 1_000_000
        one = plain(task, outputs)
        job.decider.most = 40
        return one

    job.decider.decide = decide
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0",))))
        assert (finished.of(State.DONE), finished.of(State.DEAD), finished.exit_code) == (5, 1, 1)
        (row,) = [row for row in ledger.rows(0, 6) if row.state == State.DEAD]
        assert "maximum context length" in row.error
        assert row.attempts == 1


def test_a_task_that_cannot_be_rendered_is_dead_and_blocks_what_hangs_on_it(tmp_path):
    from lengthwise.schema.errors import InputError

    tasks = chained(rows=3)
    job = job_of(tasks, BOTH)
    plain = job.decider.decide

    def decide(task, outputs):
        if task == 1:
            raise InputError("row 0 has no field 'title'")
        return plain(task, outputs)

    job.decider.decide = decide
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"))))
        assert (finished.of(State.DONE), finished.of(State.DEAD), finished.of(State.BLOCKED)) == (7, 1, 1)
        assert "no field 'title'" in next(row.error for row in ledger.rows(0, 9) if row.state == State.DEAD)


def test_a_poison_request_that_kills_engines_is_found_and_the_rest_finish(tmp_path):
    """Two engines by turns: the request's text makes the engine end, whatever it runs beside."""
    tasks = tasks_of([0] * 8)
    command = f"{sys.executable} {Path(__file__).parent / 'poisoned_engine.py'} {{host}} {{port}} {{name}}"
    job = job_of(tasks, [(plan(0),)])
    plain = job.decider.decide

    def decide(task, outputs):
        job.decider.version = "poison" if task == 3 else "v1"
        return plain(task, outputs)

    job.decider.decide = decide
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0",), command=command, more="")))
        assert (finished.of(State.DONE), finished.of(State.DEAD), finished.exit_code) == (7, 1, 1)
        (row,) = [row for row in ledger.rows(0, 8) if row.state == State.DEAD]
        assert int(job.layout.task_of[row.task]) == 3
        assert row.attempts == 3
        assert "its engine died" in row.error
        assert len([event for event in finished.events if event.what == "died"]) <= 6


def test_engines_that_die_without_a_request_to_blame_end_the_run_with_what_to_do(tmp_path):
    command = f"{sys.executable} {Path(__file__).parent / 'poisoned_engine.py'} {{host}} {{port}} {{name}} always"
    settings = Settings(**{**vars(QUICK), "max_engine_failures": 3, "max_attempts": 50})
    job = job_of(tasks_of([0] * 4), [(plan(0),)], settings=settings)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(EngineError, match="3 died one after another"):
            asyncio.run(play(job, ledger, local(tmp_path, ("m0",), command=command, more="")))
        assert ledger.counts() == {(0, State.READY): 4}


def test_a_full_disk_ends_the_run_with_a_clear_error_and_it_goes_on_later(tmp_path, complete):
    job, calls = job_of(chained(), BOTH), []
    launcher = local(tmp_path, ("m0", "m1"), **SLOW)
    pids = []
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:

        async def fill(one, launcher):
            await until(lambda: len(engines(launcher)) == 2)
            pids.extend(pid for _, pid in engines(launcher))
            # The file may not grow any more: what a full disk does to SQLite.
            await writer(one).call(
                lambda: calls.append(ledger.store.connection.execute("PRAGMA max_page_count = 1").fetchone())
            )

        with pytest.raises(OutputError, match="full"):
            asyncio.run(play(job, ledger, launcher, fill))
    assert calls, "the file was stopped from growing"
    assert len(pids) == 2
    assert gone(pids)
    resumed(tmp_path, complete)


def leased_and_held(other):
    """Whether a ledger is held by another client now, while requests are under way."""
    other.execute("BEGIN IMMEDIATE")
    if other.execute("SELECT count(*) FROM tasks WHERE state = ?", (State.LEASED,)).fetchone() != (0,):
        return True
    other.execute("ROLLBACK")
    return False


def test_a_ledger_that_another_process_holds_is_waited_for(tmp_path, complete):
    job, place = job_of(chained(), BOTH), tmp_path / "ledger.sqlite"
    waited = []

    async def hold(one, launcher):
        other = sqlite3.connect(place, isolation_level=None, timeout=20)
        # Engines that were held off before they have work have no endings that could wait, and those whose prompts must
        # be read behind a lease that waits have none, either: then hold the ledger again.
        while not (other.in_transaction and writer(one).writing.locked()):
            if other.in_transaction:
                other.execute("ROLLBACK")
            await until(lambda: leased_and_held(other))
            before = other.execute("SELECT count(*) FROM results").fetchone()
            with contextlib.suppress(TimeoutError):
                await until(writer(one).writing.locked, max_s=8.0)
        await asyncio.sleep(1.0)
        same = other.execute("SELECT count(*) FROM results").fetchone() == before
        waited.append(same and writer(one).writing.locked())
        other.execute("ROLLBACK")
        other.close()

    with open_ledger(place) as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"), **SLOW), hold))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
    assert waited == [True], "endings waited to be written, and none was"


def test_a_ledger_locked_for_too_long_ends_the_run_which_resumes_later(tmp_path, complete):
    job, place = job_of(chained(), BOTH), tmp_path / "ledger.sqlite"
    in_use = []

    async def hold(_, launcher):
        await until(lambda: len(engines(launcher)) == 2)
        in_use.append(sqlite3.connect(place, isolation_level=None, timeout=20))
        in_use[0].execute("BEGIN IMMEDIATE")

    with open_ledger(place, timeout_s=0.5) as ledger, pytest.raises(OutputError, match="must be free"):
        asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"), **SLOW), hold))
    in_use[0].close()
    resumed(tmp_path, complete)


def test_a_lease_that_another_took_over_is_answered_twice_and_recorded_once(tmp_path, complete):
    job = job_of(chained(), BOTH)
    place = tmp_path / "ledger.sqlite"
    other = new_owner()
    lost, taken_over = [], []

    async def steal(one, launcher):
        await until(lambda: active_requests(one) >= 4)

        def taken():
            # As if this coordinator had slept through its leases, and another had taken them and died.
            writer(one).ledger.heartbeat(job.owner, now_s=time.time(), lease_s=0.0)
            lost.append(writer(one).ledger.expire(now_s=time.time() + 0.001))
            taken_over.extend(writer(one).ledger.lease(0, 3, owner=other, now_s=time.time(), lease_s=1.0))

        await writer(one).call(taken)

    with open_ledger(place) as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"), **SLOW), steal))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
        assert all(row.attempts == 1 for row in ledger.rows(0, 18))
    assert lost[0] >= 4
    assert len(taken_over) == 3


def test_two_coordinators_share_a_run_and_nothing_is_requested_twice_in_the_ledger(tmp_path, complete):
    async def together():
        gate = asyncio.Barrier(4)

        def launcher_of(n):
            """Its engines are ready when those of the other are."""
            launcher = local(tmp_path / str(n), ("m0", "m1"), **SLOW)
            start = launcher.start

            async def met(*where):
                engine = await start(*where)
                await gate.wait()
                return engine

            launcher.start = met
            return launcher

        jobs = [job_of(chained(), BOTH) for _ in range(2)]
        with open_ledger(tmp_path / "ledger.sqlite") as one, open_ledger(tmp_path / "ledger.sqlite") as two:
            both = [
                play(job, ledger, launcher_of(n)) for n, (job, ledger) in enumerate(zip(jobs, (one, two), strict=True))
            ]
            ends = await asyncio.gather(*both)
            return ends, answers(one, jobs[0].layout), one.rows(0, 18)

    ends, message, rows = asyncio.run(together())
    assert [finished.exit_code for finished in ends] == [0, 0]
    assert [len(finished.engines) for finished in ends] == [2, 2], "both were there, with all their engines"
    assert message == complete
    assert all(row.attempts == 1 for row in rows)


__all__ = ["Prompts"]
