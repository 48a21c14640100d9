"""Tasks done by several workers at once: threads, processes or a Ray cluster behind one seam."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lengthwise.search import _processes, _ray
from lengthwise.search._chunks import WAKE_S, at_least_one

T = TypeVar("T")
R = TypeVar("R")


class Workers(Protocol):
    """Who does tasks. Made by ``threads``, ``processes`` or ``ray``; does one run at a time."""

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        """Each task's place and result, as they come.

        The first error is raised here, as what it was there; of the other tasks none that waits is begun,
        and what is under way is not waited for. The same holds where the caller stops listening.

        Args:
            tasks: What is done; each is done once (on Ray again, where a node is lost).
            work: Does one task. Where it is the same object as at the last run, what processes have
                loaded for it is kept.
        """
        ...


def available_cpus() -> int:
    """The CPUs that this process may use, where the system says so; else those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def threads(jobs: int | None = None) -> Iterator[Workers]:
    """Workers in this process: right for compiled code, which lets go of the interpreter.

    Args:
        jobs: Tasks at a time; None: one a CPU.

    Raises:
        InputError: ``jobs`` is less than 1.
    """
    yield _Threads(at_least_one(available_cpus() if jobs is None else jobs))


def processes(jobs: int | None = None) -> AbstractContextManager[Workers]:
    """Workers in processes of their own on this machine: right for work that is mostly Python.

    ``work``, tasks and results must be picklable. Each process imports what ``work`` needs anew, the
    program's main module too, so that a script must begin its own doings under
    ``if __name__ == "__main__":``. An engine that is still to be compiled is better compiled before
    (``engine.warm_up()``): each process would compile it.

    Args:
        jobs: Processes; None: one a CPU.

    Raises:
        InputError: ``jobs`` is less than 1.
    """
    return _processes.crew(at_least_one(available_cpus() if jobs is None else jobs))


def ray(address: str = "local", *, jobs: int | None = None) -> AbstractContextManager[Workers]:
    """Workers on a Ray cluster, as many as it has CPUs; needs the extra ``ray``.

    Every node must have the same lengthwise, with the same NumPy, Numba and SciPy, as this process: that
    is asked of all nodes before the first task. A Ray that this process has joined already is used as it is.

    Args:
        address: "local" starts a cluster on this machine that ends with the context; else what
            ``ray.init`` takes: "auto", "host:port", "ray://host:port".
        jobs: CPUs of the local cluster; None: those of this process.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: No cluster answers at the address, ``jobs`` is less than 1, or a node has another
            lengthwise or none.
    """
    return _ray.cluster(address, at_least_one(available_cpus() if jobs is None else jobs))


@dataclass(frozen=True)
class _Threads:
    """Daemons, so that Ctrl-C need not wait for compiled code; new ones for every run."""

    jobs: int

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()
        threads = min(self.jobs, len(tasks))
        for item in [*range(len(tasks)), *[None] * threads]:
            waiting.put(item)
        try:
            for _ in range(threads):
                threading.Thread(target=_do, args=(tasks, work, waiting, done), daemon=True).start()
            for _ in tasks:
                at, result, error = _next(done)
                if error is not None:
                    raise error
                yield at, result  # type: ignore[misc]
        finally:
            _drain(waiting, threads)


def _do(
    tasks: Sequence[T],
    work: Callable[[T], R],
    waiting: queue.SimpleQueue[int | None],
    done: queue.SimpleQueue[tuple[int, R | None, BaseException | None]],
) -> None:
    """A thread's life."""
    while (at := waiting.get()) is not None:
        try:
            done.put((at, work(tasks[at]), None))
        except BaseException as error:  # noqa: BLE001 - raised again where it can be seen
            done.put((at, None, error))


def _next(done: queue.SimpleQueue[T]) -> T:
    """The next item; wakes now and then, for a Ctrl-C that reached another thread does not wake this one."""
    while True:
        try:
            return done.get(timeout=WAKE_S)
        except queue.Empty:
            continue


def _drain(waiting: queue.SimpleQueue[int | None], threads: int) -> None:
    """Leaves the threads nothing but their end."""
    try:
        while True:
            waiting.get_nowait()
    except queue.Empty:
        for _ in range(threads):
            waiting.put(None)
