"""Workers: every task once, errors as they were, and no worker left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.schema.errors import InputError, LengthwiseError, UnknownNameError
from lengthwise.search import workers
from lengthwise.search.workers import chunks

SLEEPERS = """
import sys
import chores
from lengthwise.search.workers import processes
if __name__ == "__main__":
    with processes(2) as crew:
        try:
            list(crew.run([(sys.argv[1], 60)] * 4, chores.naps))
        except KeyboardInterrupt:
            print("interrupted")
"""


@pytest.fixture(params=[workers.threads, workers.processes], ids=["threads", "processes"])
def worker_pool(request):
    with request.param(2) as made:
        yield made


def until(true):
    """Waits for what must come; a test that hangs is ended by pytest."""
    while not true():
        time.sleep(0.01)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_task_is_done_once_and_reported_with_its_index(worker_pool, chores):
    for count in (0, 1, 100, 3):
        tasks = [at * 10 for at in range(count)]
        assert sorted(worker_pool.run(tasks, chores.picky)) == list(enumerate(tasks))


def test_an_error_is_raised_as_what_it_was_and_the_workers_stay(worker_pool, chores):
    with pytest.raises(UnknownNameError, match="no number named 'seven'") as caught:
        list(worker_pool.run(range(1_000), chores.picky))
    assert (caught.value.kind, caught.value.known) == ("number", ["eight", "six"])
    assert caught.value.__notes__ == ["while counting"]
    assert sorted(worker_pool.run([1, 2], chores.picky)) == [(0, 1), (1, 2)]


def test_results_before_an_error_are_reported(chores):
    for make in (workers.threads, workers.processes):
        reported = []
        with make(1) as worker_pool, pytest.raises(UnknownNameError):
            reported.extend(result for _, result in worker_pool.run(range(100), chores.picky))
        assert reported == list(range(7))


def test_a_caller_that_stops_early_can_submit_other_work(worker_pool, chores):
    first = worker_pool.run(range(100, 200), chores.picky)
    assert len(list(islice(first, 3))) == 3
    first.close()
    assert sorted(worker_pool.run([1, 2], chores.picky)) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("make", [workers.threads, workers.processes])
def test_at_least_one_worker_is_required(make):
    with pytest.raises(InputError, match="1 worker or more, not 0"), make(0):
        pass


def test_ctrl_c_is_received_while_threads_work_and_no_other_task_is_started():
    started, end = [], threading.Event()

    def interrupts(task):
        started.append(threading.current_thread())
        if task == 0:
            os.kill(os.getpid(), signal.SIGINT)
        end.wait()

    with workers.threads(2) as worker_pool, pytest.raises(KeyboardInterrupt):
        list(worker_pool.run(range(9), interrupts))
    end.set()
    for thread in started:
        thread.join()
    assert 1 <= len(started) <= 2


def test_processes_load_the_work_once_and_keep_it(chores):
    work = chores.Double()
    with workers.processes(2) as worker_pool:
        reported = [result for _ in range(3) for _, result in worker_pool.run(range(50), work)]
        pids = {pid for _, pid, _ in reported}
        assert os.getpid() not in pids
        assert len(pids) <= 2
        assert {loads for _, _, loads in reported} == {1}
        assert {pid for _, (_, pid, _) in worker_pool.run(range(50), chores.Double())}.isdisjoint(pids)
    assert not any(map(is_alive, pids))


def test_a_killed_worker_is_reported_and_replaced(chores):
    with workers.processes(2) as worker_pool:
        with pytest.raises(LengthwiseError, match=r"worker process .* killed \(signal 9\).* fewer jobs"):
            list(worker_pool.run(range(10), chores.dies))
        assert sorted(worker_pool.run([4, 5], chores.dies)) == [(0, 4), (1, 5)]


def test_a_script_that_would_start_itself_again_is_reported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from lengthwise.search.workers import processes\n"
        "with processes(1) as crew:\n"
        "    print(list(crew.run([1], abs)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=60)
    assert "if __name__ == '__main__':" in done.stderr
    assert "LengthwiseError: a worker process died (exit code 1); its output names the cause" in done.stderr


def test_unpicklable_values_are_reported(chores):
    with workers.processes(1) as worker_pool:
        with pytest.raises(AttributeError, match="secret"):
            list(worker_pool.run([0], chores.secret))
        with pytest.raises(RuntimeError, match="ValueError: locked"):
            list(worker_pool.run([1], chores.secret))
        with pytest.raises(ModuleNotFoundError, match="nowhere"):
            list(worker_pool.run([1], chores.Nowhere()))


def test_leaving_ends_tasks_under_way(chores, tmp_path):
    pids = tmp_path / "pids"
    with workers.processes(2) as worker_pool:
        asking = worker_pool.run([(pids, 0), (pids, 60)], chores.naps)
        assert next(asking) == (0, 0)
        until(lambda: len(pids.read_text().split()) == 2)
    assert not any(map(is_alive, pids.read_text().split()))


@pytest.fixture
def sleepers(chores, tmp_path):
    """A process group: a program and its two workers, all of them busy for a minute."""
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", SLEEPERS, str(pids)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = subprocess.Popen(command, process_group=0, **pipes)
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    yield program, pids.read_text().split()
    program.communicate()


def test_workers_die_with_a_parent_that_is_killed(sleepers):
    program, pids = sleepers
    assert all(map(is_alive, pids))
    program.kill()
    until(lambda: not any(map(is_alive, pids)))


def test_ctrl_c_ends_parent_and_workers_without_noise(sleepers):
    program, pids = sleepers
    os.killpg(program.pid, signal.SIGINT)
    assert program.communicate() == ("interrupted\n", "")
    assert not any(map(is_alive, pids))


def test_a_process_counts_the_cpus_that_it_may_use():
    code = (
        "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1]);"
        "from lengthwise.search.workers import available_cpus; print(available_cpus())"
    )
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert reported.stdout == "1\n"


@given(st.integers(0, 3_000), st.integers(1, 64))
def test_chunks_hold_every_task_once_and_leave_enough_for_all(tasks, jobs):
    cut = chunks(tasks, jobs)
    assert [at for which in cut for at in which] == list(range(tasks))
    assert all(1 <= len(which) <= 8 for which in cut)
    assert len(cut) >= min(tasks, 16 * jobs)
