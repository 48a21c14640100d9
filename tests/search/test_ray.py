"""Workers on a real Ray of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from lengthwise.schema.errors import InputError, LengthwiseError, MissingExtraError, UnknownNameError
from lengthwise.search import workers
from lengthwise.search import workers as _ray

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow  # starting Ray takes seconds


@pytest.fixture(scope="module")
def worker_pool():
    """Two workers that can import the chores."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(Path(__file__).parent)
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", folder)
        with workers.ray(jobs=2) as made:
            yield made


@pytest.fixture
def chores(worker_pool):
    import chores

    return chores


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


def test_the_work_is_loaded_once_a_process(worker_pool, chores):
    reported = [result for _, result in worker_pool.run(range(200), chores.Double())]
    assert sorted(twice for twice, _, _ in reported) == list(range(0, 400, 2))
    assert {loads for _, _, loads in reported} == {1}
    assert os.getpid() not in {pid for _, pid, _ in reported}


def test_a_caller_that_stops_early_can_submit_other_work(worker_pool, chores):
    first = worker_pool.run(range(100, 200), chores.picky)
    assert len(list(islice(first, 3))) == 3
    first.close()
    assert sorted(worker_pool.run([1, 2], chores.picky)) == [(0, 1), (1, 2)]


def test_a_task_whose_process_was_lost_is_done_again(worker_pool, chores, tmp_path):
    assert list(worker_pool.run([tmp_path], chores.once_deadly)) == [(0, "survived")]
    assert (tmp_path / "attempts").exists()


def test_a_task_that_kills_every_process_is_reported(worker_pool, chores):
    with pytest.raises(LengthwiseError, match="could not do a task in 4 attempts"):
        list(worker_pool.run([3], chores.dies))


def test_a_task_that_a_node_cannot_import_is_reported(worker_pool, chores):
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        list(worker_pool.run([1], chores.Nowhere()))


def test_a_node_with_another_code_is_refused(worker_pool, monkeypatch):
    monkeypatch.setattr(_ray, "code_version", lambda: "another")
    refused = pytest.raises(InputError, match=r"node [0-9.]+ of the Ray cluster has another lengthwise \(0")
    with refused, workers.ray():
        pass
    assert ray.is_initialized()  # it was not ours to end


def test_a_ray_that_was_joined_already_is_used_and_left(worker_pool, chores):
    with workers.ray() as again:
        assert list(again.run([1], chores.picky)) == [(0, 1)]
    assert ray.is_initialized()


def in_a_new_process(code, **env):
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout.strip(), done.stderr


def test_a_script_hears_nothing_from_ray_and_sends_functions_of_its_own():
    code = (
        "from lengthwise.search.workers import ray\n"
        "with ray(jobs=1) as crew:\n"
        "    print(list(crew.run([3], lambda task: print('noise') or task + 1)))\n"
        "import ray\n"
        "print(ray.is_initialized())"
    )
    assert in_a_new_process(code) == ("[(0, 4)]\nFalse", "")


def test_an_unreachable_address_is_reported():
    code = (
        "from lengthwise.search.workers import ray\n"
        "from lengthwise.schema.errors import InputError\n"
        "try:\n"
        "    with ray('127.0.0.1:1'): pass\n"
        "except InputError as error:\n"
        "    print(error)"
    )
    reported, noise = in_a_new_process(code)
    assert reported.startswith("no Ray cluster responds at '127.0.0.1:1'")
    assert noise == ""


def test_a_cluster_is_joined_by_its_address_and_goes_on(worker_pool, chores):
    address = ray.get_runtime_context().gcs_address
    code = (
        "from lengthwise.search.workers import ray\n"
        f"with ray({address!r}) as crew:\n"
        "    print(sorted(crew.run([3, 4], abs)))\n"
    )
    assert in_a_new_process(code) == ("[(0, 3), (1, 4)]", "")
    assert list(worker_pool.run([1], chores.picky)) == [(0, 1)]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"searching on Ray needs .*lengthwise\[ray\]"), workers.ray():
        pass
