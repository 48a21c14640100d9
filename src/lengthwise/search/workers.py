"""Runs tasks on several workers: threads, processes or a Ray cluster, with one interface."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, Self, TypeVar

from lengthwise.schema.errors import InputError, LengthwiseError, MissingExtraError
from lengthwise.search.store import code_version

T = TypeVar("T")
R = TypeVar("R")

WAKE_S = 0.2  # longest time until a Ctrl-C takes effect
MAX_CHUNK, CHUNKS_PER_WORKER = 8, 16
RAY_RETRIES = 3  # retries of a chunk whose node or process was lost; errors of the work itself are not retried
CHUNKS_PER_CPU = 2  # chunks in flight per CPU of a cluster: one runs, one waits at the node
CONNECT_TIMEOUT_S = 5.0


class Workers(Protocol):
    """Runs lists of tasks. The functions ``threads``, ``processes`` and ``ray`` yield workers."""

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        """Yield the index and the result of each task, in the order of completion.

        The first error of a task is raised in the caller with its original type. After an error, or when the caller
        stops the iteration, no waiting task starts, and the caller does not wait for running ones. Processes retain
        their copy of ``work`` until a run with another object.
        """


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _worker_count(jobs: int | None) -> int:
    count = available_cpus() if jobs is None else jobs
    if count < 1:
        raise InputError(f"a search needs 1 worker or more, not {count}")
    return count


def chunks(tasks: int, jobs: int) -> list[range]:
    """Return the task indices in chunks; a worker receives a chunk in one message.

    A chunk has at most MAX_CHUNK tasks, and few enough that each of the ``jobs`` workers gets CHUNKS_PER_WORKER chunks,
    which balances the load. If there are too few tasks for that, each is a chunk.
    """
    size = max(1, min(MAX_CHUNK, tasks // (jobs * CHUNKS_PER_WORKER)))
    return [range(start, min(start + size, tasks)) for start in range(0, tasks, size)]


@contextmanager
def threads(jobs: int | None = None) -> Iterator[Workers]:
    """Yield workers in ``jobs`` threads (None: one per CPU). They suit compiled code, which releases the GIL."""
    yield _Threads(_worker_count(jobs))


@dataclass(frozen=True)
class _Threads:
    """Daemon threads, so that Ctrl-C does not wait for compiled code. Each run starts new ones."""

    jobs: int

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:  # noqa: C901
        waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()

        def work_off() -> None:
            while (at := waiting.get()) is not None:
                try:
                    done.put((at, work(tasks[at]), None))
                except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                    done.put((at, None, error))

        count = min(self.jobs, len(tasks))
        for item in [*range(len(tasks)), *[None] * count]:
            waiting.put(item)
        try:
            for _ in range(count):
                threading.Thread(target=work_off, daemon=True).start()
            remaining = len(tasks)
            while remaining:
                try:  # with a timeout, because a Ctrl-C that another thread receives does not wake this one
                    at, result, error = done.get(timeout=WAKE_S)
                except queue.Empty:
                    continue
                if error is not None:
                    raise error
                remaining -= 1
                yield at, result  # type: ignore[misc]
        finally:
            with suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            for _ in range(count):
                waiting.put(None)


ChunkResult = tuple[list[Any], "SentError | None"]  # the results of a chunk up to the first error, and that error


def _run_chunk(work: Callable[[Any], Any], tasks: Iterable[Any]) -> ChunkResult:
    results: list[Any] = []
    try:
        for task in tasks:
            results.append(work(task))  # noqa: PERF401 - results before an error are returned
    except Exception as error:  # noqa: BLE001 - raised in the caller's process
        return results, SentError.of(error)
    return results, None


def _results(chunk: range, answer: ChunkResult) -> Iterator[tuple[int, Any]]:
    results, error = answer
    yield from zip(chunk, results, strict=False)
    if error is not None:
        raise error.as_raised()


@dataclass(frozen=True)
class SentError:
    """An error in a form that can be sent to another process, which rebuilds the error from its parts.

    Pickle would call the class with ``args``, which fails if the class takes other arguments than the message.
    """

    kind: type[Exception]
    arguments: tuple[Any, ...]
    state: dict[str, Any]
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return the parts of an error; if it cannot be pickled, those of a RuntimeError with its message."""
        trace = "".join(traceback.format_exception(error))
        sent = cls(type(error), error.args, error.__dict__, trace)
        try:
            pickle.loads(pickle.dumps(sent)).as_raised()  # noqa: S301 - of this process
        except Exception:  # noqa: BLE001 - pickling of unknown classes may raise anything
            return cls(RuntimeError, (f"{type(error).__name__}: {error}",), {}, trace)
        return sent

    def as_raised(self) -> Exception:
        """Return the original error, with the worker's traceback as its cause."""
        error = self.kind.__new__(self.kind, *self.arguments)
        error.__dict__.update(self.state)
        error.__cause__ = _WorkerTraceback(self.trace)
        return error


class _WorkerTraceback(Exception):  # noqa: N818 - not raised: shows another process's traceback
    def __str__(self) -> str:
        return f"in a worker:\n{self.args[0]}"


Pipe = connection.Connection


@contextmanager
def processes(jobs: int | None = None) -> Iterator[Workers]:
    """Yield workers in ``jobs`` processes (None: one per CPU), for work that is mostly Python.

    ``work``, tasks and results must be picklable. Each process imports the modules of ``work`` and the program's main
    module, so a script must start its work under ``if __name__ == "__main__":``. Engines should be compiled before
    (``engine.warm_up()``); otherwise each process compiles them.
    """
    pool = _ProcessPool(_worker_count(jobs))
    try:
        yield pool
    finally:
        pool.kill(list(pool.members))


class _ProcessPool:
    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.members: dict[Pipe, SpawnProcess] = {}
        self._work: Any = None

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        waiting = deque(chunks(len(tasks), self.jobs))
        busy: dict[Pipe, range] = {}

        def send(pipe: Pipe) -> None:
            busy[pipe] = waiting.popleft()
            data = pickle.dumps([tasks[at] for at in busy[pipe]])
            with suppress(BrokenPipeError, ConnectionResetError):  # the process died: raised when its pipe is read
                pipe.send_bytes(data)

        if work is not self._work:
            self.kill(list(self.members))
            self._work = work
        count = min(self.jobs, len(waiting))
        if len(self.members) < count:
            data = pickle.dumps(work)
            self.members.update(_started_process(data) for _ in range(count - len(self.members)))
        try:
            for pipe in list(self.members)[:count]:
                send(pipe)
            while busy:
                ready: list[Any] = connection.wait(list(busy), timeout=WAKE_S)
                for pipe in ready:
                    chunk, answer = busy.pop(pipe), self._received(pipe)
                    if waiting and answer[1] is None:
                        send(pipe)
                    yield from _results(chunk, answer)
        finally:
            self.kill(list(busy))  # the caller stopped, and their results are obsolete

    def kill(self, pipes: Sequence[Pipe]) -> None:
        members = [(pipe, self.members.pop(pipe)) for pipe in pipes if pipe in self.members]
        for pipe, process in members:
            pipe.close()
            process.kill()
        for _, process in members:
            process.join()

    def _received(self, pipe: Pipe) -> ChunkResult:
        try:
            answer: ChunkResult = pickle.loads(pipe.recv_bytes())  # noqa: S301 - of a child process
        except (EOFError, ConnectionResetError) as error:
            process = self.members[pipe]
            process.join()
            code = process.exitcode
            self.kill([pipe])
            name = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            message = f"a worker process died ({name}); its output names the cause"
            if code == -9:  # the kernel's response to a lack of memory
                message = "a worker process was killed (signal 9), probably for lack of memory: try fewer jobs"
            raise LengthwiseError(message) from error
        return answer


def _started_process(work: bytes) -> tuple[Pipe, SpawnProcess]:
    """Start a worker process that ignores Ctrl-C; the signal is blocked until the process can ignore it."""
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, work), daemon=True)
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # starting it later would unblock the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    else:
        process.start()
    child_end.close()
    return parent_end, process


def _serve(pipe: Pipe, pickled_work: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    work: Callable[[Any], Any] | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            tasks = pipe.recv_bytes()
            try:
                work = pickle.loads(pickled_work) if work is None else work  # noqa: S301 - of the parent process
                result = pickle.dumps(_run_chunk(work, pickle.loads(tasks)))  # noqa: S301
            except Exception as error:  # noqa: BLE001 - work, tasks or results that cannot be pickled
                result = pickle.dumps(([], SentError.of(error)))
            pipe.send_bytes(result)


def _exit_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


@contextmanager
def ray(address: str = "local", *, jobs: int | None = None) -> Iterator[Workers]:
    """Yield workers on a Ray cluster, one per CPU of the cluster; needs the extra ``ray``.

    The address "local" starts a cluster on this machine with ``jobs`` CPUs, which ends with the context. Any other
    address is one of ``ray.init``: "auto", "host:port", "ray://host:port". If this process is already connected to Ray,
    it uses that connection and leaves it open. Every node must have the same lengthwise, NumPy, Numba and SciPy as this
    process. Raises MissingExtraError if Ray is not installed, and InputError, before the first task, if no cluster
    responds at the address, ``jobs`` is less than 1, or the versions of a node differ.
    """
    cpus = _worker_count(jobs)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("searching on Ray", "ray") from error
    is_joined = ray.is_initialized()
    if not is_joined:
        local: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if address == "local" else {}
        try:
            # If nothing listens at the address, Ray retries for a minute and then ends this process.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if host and port.isdigit():
                socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (OSError, ValueError, RuntimeError) as error:
            advice = "start one with `ray start --head`, or use 'local'"
            raise InputError(f"no Ray cluster responds at {address!r} ({error}): {advice}") from error
    try:
        _check_nodes(ray)
        yield _Cluster(ray, max(1, int(ray.cluster_resources().get("CPU", 1))))
    finally:
        if not is_joined:
            ray.shutdown()


def _node_versions() -> tuple[str, str]:
    return version("lengthwise"), code_version()


def _check_nodes(ray: Any) -> None:
    """Raise InputError unless every node would compute the same results as this process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote, own = ray.remote(num_cpus=0)(_node_versions), version("lengthwise")
    versions = {
        node["NodeManagerAddress"]: remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    for name, reference in versions.items():
        try:
            other, code = ray.get(reference)
        except ray.exceptions.RayError as error:
            raise InputError(
                f"node {name} of the Ray cluster has no lengthwise that can search: "
                f"install {own} there ({_first_line(error)})"
            ) from error
        if code != code_version():
            raise InputError(
                f"node {name} of the Ray cluster has another lengthwise ({other}) than this process ({own}), "
                "or other versions of NumPy, Numba or SciPy: install the same on every node"
            )


@dataclass(frozen=True)
class _Cluster:
    ray: Any
    cpus: int

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        remote = self.ray.remote(max_retries=RAY_RETRIES)(_run_chunk_on_node)
        # Ray's pickle sends functions of a script by value. _run_chunk_on_node loads the work, for a clear error. In a
        # list, Ray passes the reference instead of the object.
        work_reference = [self.ray.put(self.ray.cloudpickle.dumps(work))]
        waiting = deque(chunks(len(tasks), self.cpus))
        running: dict[Any, range] = {}
        try:
            while waiting or running:
                while waiting and len(running) < CHUNKS_PER_CPU * self.cpus:
                    chunk = waiting.popleft()
                    running[remote.remote(work_reference, [tasks[at] for at in chunk])] = chunk
                ready, _ = self.ray.wait(list(running), timeout=WAKE_S)
                for reference in ready:
                    chunk = running.pop(reference)
                    try:
                        answer: ChunkResult = self.ray.get(reference)
                    except self.ray.exceptions.RayError as error:
                        raise LengthwiseError(
                            f"the Ray cluster could not do a task in {RAY_RETRIES + 1} attempts: {_first_line(error)}"
                        ) from error
                    yield from _results(chunk, answer)
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)


def _first_line(error: Exception) -> str:  # of Ray's long message, which names the cause
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _run_chunk_on_node(work_reference: list[Any], tasks: list[Any]) -> ChunkResult:
    try:
        work = _loaded_work(work_reference[0])
    except Exception as error:  # noqa: BLE001 - a module that the node lacks, raised as an error of the work
        return [], SentError.of(error)
    return _run_chunk(work, tasks)


@lru_cache(maxsize=1)
def _loaded_work(reference: Any) -> Any:
    """Return the work, which is loaded once per process rather than once per chunk."""
    import ray

    return pickle.loads(ray.get(reference))  # noqa: S301 - of the driver
