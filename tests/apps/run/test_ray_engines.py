"""Runs on a real Ray of this machine: actors keep engine processes; whatever dies, the answers stay the same."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from engines_world import SERVER, active_requests, answers, chained, dispatchers, job_of, plan, play, undisturbed, until
from killed_world import gone, is_gone, started
from plan_world import tasks_of

from lengthwise.apps.launch import EngineConfig, EngineTimeouts
from lengthwise.apps.ledger import FINISHED, State, open_ledger
from lengthwise.schema.errors import EngineError

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow
BOTH = [(plan(0), plan(1))]


@pytest.fixture(scope="module")
def cluster():
    """Two GPUs that are none, on a Ray of this machine."""
    from lengthwise.apps.launch.ray import import_ray

    import_ray().init("local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The answers of the chained application on local engines."""
    return undisturbed(tmp_path_factory.mktemp("complete"), chained())


def on_ray(tmp_path, names, *, command=SERVER, more="--fixed-s 0.02", timeouts=None):
    from lengthwise.apps.launch.ray import RayLauncher

    return RayLauncher(
        [EngineConfig(name, served=name, max_num_seqs=4, command=f"{command} {more}") for name in names],
        tmp_path / "logs",
        timeouts=timeouts or EngineTimeouts(ready_s=60.0, grace_s=3.0, stall_s=20.0, request_s=60.0),
    )


def pids(launcher):
    """Processes of the engines that run, and of their actors."""
    placed = list(launcher.running.values())
    return [
        ray.get(one.actor.__ray_call__.remote(lambda saved: (saved.process.local.process.pid, os.getpid())))
        for one in placed
    ]


def test_a_run_on_ray_answers_as_local_engines_do_and_leaves_nothing(cluster, tmp_path, complete):
    job, launcher, seen = job_of(chained(), BOTH), on_ray(tmp_path, ("m0", "m1")), []

    async def look(_, launcher):
        await until(lambda: len(launcher.running) == 2)
        seen.extend(await asyncio.to_thread(pids, launcher))

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, look))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
    assert gone([pid for pair in seen for pid in pair])
    # Ray tells what is free a moment later.
    asyncio.run(until(lambda: ray.available_resources().get("GPU") == 2))


@pytest.mark.parametrize("which", [0, 1], ids=["engine", "actor"])
def test_a_killed_ray_worker_or_its_engine_is_restarted_and_nothing_is_lost(cluster, tmp_path, complete, which):
    job, launcher, seen = job_of(chained(), BOTH), on_ray(tmp_path, ("m0", "m1"), more="--fixed-s 0.05"), []

    async def kill(one, launcher):
        await until(lambda: len(launcher.running) == 2)
        seen.extend(await asyncio.to_thread(pids, launcher))
        await until(lambda: active_requests(one) > 0)
        os.kill(seen[0][which], signal.SIGKILL)

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, kill))
        assert finished.exit_code == 0
        assert "died" in [event.what for event in finished.events]
        assert answers(ledger, job.layout) == complete
    assert gone([pid for pair in seen for pid in pair])


FOLDER = Path(__file__).parent
WORDS = "--host {host} --port {port} --model {name}"


def pid_of(launcher, name, which):
    """The process of a model's engine (0) or of its actor (1), ready or not."""

    def both(retained):
        local = retained.process.local
        return 0 if local is None else local.process.pid, os.getpid()

    (actor,) = [one.actor for one in list(launcher.placed) if one.config.name == name]
    return ray.get(actor.__ray_call__.remote(both))[which]


def waits(log):
    """The pid of the gated engine once its log reports that it waits."""
    message = log.read_text().split() if log.exists() else []
    return int(message[1]) if message[:1] == ["waits"] and len(message) > 1 else None


@pytest.mark.parametrize("which", [0, 1], ids=["engine", "actor"])
def test_an_engine_killed_before_it_is_ready_on_ray_is_restarted(cluster, tmp_path, complete, which):
    gate = tmp_path / "gate"
    command = f"{sys.executable} {FOLDER / 'gated.py'} {gate} {WORDS}"
    job, launcher, seen = job_of(chained(), BOTH), on_ray(tmp_path, ("m0", "m1"), command=command), []

    async def kill(_, launcher):
        await until(lambda: any(map(waits, (tmp_path / "logs").glob("m0-*.log"))))
        logs = list((tmp_path / "logs").glob("m0-*.log"))
        seen.append(waits(logs[0]))
        assert not launcher.running
        os.kill(seen[0] if which == 0 else await asyncio.to_thread(pid_of, launcher, "m0", 1), signal.SIGKILL)
        await until(lambda: is_gone(seen[0]))
        gate.touch()

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, kill))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
    reported = [event.what for event in finished.events if event.model == 0]
    assert reported[:3] == ["start", "start", "ready"], "it was killed while it started"
    assert gone([waits(log) for log in (tmp_path / "logs").glob("*.log")])


@pytest.mark.parametrize("which", [0, 1], ids=["engine", "actor"])
def test_killed_while_it_answers_on_ray_its_tokens_are_gone_on_from(cluster, tmp_path, complete, which):
    job, launcher, seen = job_of(chained(), BOTH), on_ray(tmp_path, ("m0", "m1"), more="--fixed-s 0.05"), []

    async def kill(one, launcher):
        await until(lambda: len(launcher.running) == 2)
        seen.extend(await asyncio.to_thread(pids, launcher))
        going = dispatchers(one)[0].slots[0].active
        await until(lambda: any(len(work.draft.output_ids) >= 3 for work in going.values()))
        os.kill(await asyncio.to_thread(pid_of, launcher, "m0", which), signal.SIGKILL)

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, kill))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
    assert "died" in [event.what for event in finished.events if event.model == 0]
    assert gone([pid for pair in seen for pid in pair])


@pytest.mark.parametrize("which", [0, 1], ids=["engine", "actor"])
def test_an_engine_killed_after_its_last_answer_on_ray_still_ends(cluster, tmp_path, complete, which):
    """The second model has nothing left to do, and its engine does not go when it is asked to."""
    command = f"{sys.executable} {FOLDER / 'stubborn.py'} {WORDS}"
    job, launcher, seen = job_of(chained(), BOTH), on_ray(tmp_path, ("m0", "m1"), command=command), []
    killed = []

    async def kill(one, launcher):
        await until(lambda: len(launcher.running) == 2)
        seen.extend(await asyncio.to_thread(pids, launcher))
        pid = await asyncio.to_thread(pid_of, launcher, "m1", which)
        await until(lambda: ("stop", 1) in [(event.what, event.model) for event in one.events])
        killed.append(not is_gone(pid))
        os.kill(pid, signal.SIGKILL)

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, kill))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
    assert killed == [True], "it was there when it was killed"
    assert gone([pid for pair in seen for pid in pair])


@pytest.mark.parametrize(
    "when",
    [lambda row: len(row["pids"]) == 4, lambda row: row["written"] >= 8, lambda row: row["done"] >= 8],
    ids=["ready", "answering", "children"],
)
def test_a_killed_coordinator_leaves_no_engine_on_ray_and_the_run_resumes_there(cluster, tmp_path, complete, when):
    address = ray.get_runtime_context().gcs_address
    process, _ = started(tmp_path, lambda row: len(row["pids"]) == 4 and when(row), f"ray={address}")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    rows = [json.loads(line) for line in (tmp_path / "said.txt").read_text().splitlines()]
    left = {pid for row in rows for pid in row["pids"]}
    assert len(left) == 4, "two engines and their actors"
    assert gone(left)
    job = job_of(chained(), BOTH)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        assert sum(n for (_, state), n in ledger.counts().items() if state not in FINISHED), "it was on its way"
        finished = asyncio.run(play(job, ledger, on_ray(tmp_path / "retry", ("m0", "m1"))))
        assert finished.resumed
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete


def test_an_engine_that_does_not_start_on_a_node_reports_the_reason(cluster, tmp_path):
    launcher = on_ray(
        tmp_path, ("m0",), command="python3 -c 'import sys; sys.exit(\"no such weights\")' {port}", more=""
    )
    job = job_of(tasks_of([0] * 3), [(plan(0),)])
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(EngineError, match="no such weights"):
            asyncio.run(play(job, ledger, launcher))
        assert ledger.counts() == {(0, State.READY): 3}


def test_a_replica_of_two_gpus_waits_for_both_of_them(cluster, tmp_path):
    tasks = tasks_of([0] * 4 + [1] * 2)
    job = job_of(tasks, [(plan(0, tp=2),), (plan(1, dp=2),)])
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, on_ray(tmp_path, ("m0", "m1"))))
        assert finished.exit_code == 0
        ready = [event.model for event in finished.events if event.what == "ready"]
        assert ready in ([0, 1, 1], [0, 1])  # one of the two may have answered all before the other is ready


@pytest.mark.parametrize("ready", [True, False], ids=["ending", "starting"])
def test_stopped_again_on_ray_it_waits_for_no_engine(cluster, tmp_path, ready):
    """Engines that do not go when they are asked to, or never get ready, with more patience than a test has."""
    words = "--host {host} --port {port} --model {name}" if ready else "never {port}"
    stubborn = f"{sys.executable} {Path(__file__).parent / 'stubborn.py'} {words}"
    timeouts = EngineTimeouts(ready_s=3600.0, grace_s=150.0, stall_s=20.0, request_s=60.0)
    launcher = on_ray(tmp_path, ("m0", "m1"), command=stubborn, more="", timeouts=timeouts)
    started = []

    def is_begun(one):
        deaf = [log for log in (tmp_path / "logs").glob("*.log") if "deaf" in log.read_text()]
        return active_requests(one) > 1 if ready else len(deaf) == 2

    async def stop(one, _):
        await until(lambda: is_begun(one))
        started.extend(pids(launcher) if ready else [])
        one.stop()
        await until(lambda: not launcher.running)
        await asyncio.sleep(1.0)  # a start that was called off is being ended by then
        one.stop()

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(asyncio.wait_for(play(job_of(chained(), BOTH), ledger, launcher, stop), 90.0))
    assert finished.exit_code == 130
    assert not launcher.placed
    assert gone([pid for both in started for pid in both])
