"""Tasks done by several workers at once: threads, processes or a Ray cluster behind one seam."""

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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, Protocol, Self, TypeVar

from lengthwise.schema.errors import InputError, LengthwiseError, MissingExtraError
from lengthwise.search.store import code_version

T = TypeVar("T")
R = TypeVar("R")

WAKE_S = 0.2  # how long a Ctrl-C may go unheard
_LARGEST, _A_WORKER = 8, 16


def at_least_one(jobs: int) -> int:
    """The number of workers, checked."""
    if jobs < 1:
        raise InputError(f"there must be 1 worker or more, not {jobs}")
    return jobs


def chunks(tasks: int, jobs: int) -> list[range]:
    """The tasks' places, cut into pieces: large enough to be cheap to send, small enough to share evenly.

    Of few tasks, which may be long, each goes alone; a worker has at least 16 pieces to do, so that the
    last one to end makes the others wait for a small part of the whole.
    """
    size = max(1, min(_LARGEST, tasks // (jobs * _A_WORKER)))
    return [range(start, min(start + size, tasks)) for start in range(0, tasks, size)]


@dataclass(frozen=True)
class Answer(Generic[R]):
    """What became of a chunk: the results up to the first error, and that."""

    results: list[R]
    error: SentError | None = None


def answer(work: Callable[[T], R], tasks: Iterable[T]) -> Answer[R]:
    """The work done, here."""
    results: list[R] = []
    try:
        for task in tasks:
            results.append(work(task))  # noqa: PERF401 - what was done before an error is kept
    except Exception as error:  # noqa: BLE001 - raised again where it can be seen
        return Answer(results, SentError.of(error))
    return Answer(results)


@dataclass(frozen=True)
class SentError:
    """An error on its way to another process.

    Pickle makes an error by calling its class with ``args``, which fails where a class takes other
    arguments than its message (UnknownNameError); here it is put together from its parts.
    """

    kind: type[Exception]
    arguments: tuple[Any, ...]
    state: dict[str, Any]
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        """What can be sent of an error; of one that cannot be pickled, its words."""
        trace = "".join(traceback.format_exception(error))
        sent = cls(type(error), error.args, error.__dict__, trace)
        try:
            pickle.loads(pickle.dumps(sent)).as_raised()  # noqa: S301 - our own
        except Exception:  # noqa: BLE001 - anything may go wrong in the pickling of strangers
            return cls(RuntimeError, (f"{type(error).__name__}: {error}",), {}, trace)
        return sent

    def as_raised(self) -> Exception:
        """The error again, with where it came from as its cause."""
        error = self.kind.__new__(self.kind, *self.arguments)
        error.__dict__.update(self.state)
        error.__cause__ = _Elsewhere(self.trace)
        return error


class _Elsewhere(Exception):  # noqa: N818 - not raised: shows another process' traceback
    def __str__(self) -> str:
        return f"in a worker:\n{self.args[0]}"


Pipe = connection.Connection

_spawn = multiprocessing.get_context("spawn")


@contextmanager
def worker_pool(jobs: int) -> Iterator[_Crew]:
    """Up to so many processes, which end with the context."""
    workers = _Crew(jobs)
    try:
        yield workers
    finally:
        workers.dismiss(list(workers.members))


class _Crew:
    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.members: dict[Pipe, SpawnProcess] = {}
        self._work: Any = None

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        waiting = deque(chunks(len(tasks), self.jobs))
        busy: dict[Pipe, range] = {}
        try:
            for pipe in self._called(work, min(self.jobs, len(waiting))):
                busy[pipe] = self._hand(pipe, tasks, waiting.popleft())
            while busy:
                ready: list[Any] = connection.wait(list(busy), timeout=WAKE_S)
                for pipe in ready:
                    which, told = busy.pop(pipe), self._received(pipe)
                    if waiting and told.error is None:
                        busy[pipe] = self._hand(pipe, tasks, waiting.popleft())
                    yield from zip(which, told.results, strict=False)
                    if told.error is not None:
                        raise told.error.as_raised()
        finally:
            self.dismiss(list(busy))  # nobody wants their answers any more

    def dismiss(self, pipes: Sequence[Pipe]) -> None:
        """Ends these processes, whatever they do."""
        leaving = [(pipe, self.members.pop(pipe)) for pipe in pipes if pipe in self.members]
        for pipe, process in leaving:
            pipe.close()
            process.kill()
        for _, process in leaving:
            process.join()

    def _called(self, work: Callable[[T], R], count: int) -> list[Pipe]:
        """So many members that know the work; the others, if there are, stay idle."""
        if work is not self._work:
            self.dismiss(list(self.members))
            self._work = work
        if len(self.members) < count:
            load = pickle.dumps(work)
            for _ in range(count - len(self.members)):
                self.members.update([_started(load)])
        return list(self.members)[:count]

    def _hand(self, pipe: Pipe, tasks: Sequence[T], which: range) -> range:
        """Sends tasks to an idle member."""
        load = pickle.dumps([tasks[at] for at in which])
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead: told when it is heard
            pipe.send_bytes(load)
        return which

    def _received(self, pipe: Pipe) -> Answer[Any]:
        try:
            told: Answer[Any] = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own child's
        except (EOFError, ConnectionResetError) as error:
            process = self.members[pipe]
            process.join()
            code = process.exitcode
            self.dismiss([pipe])
            raise LengthwiseError(_exit_message(code)) from error
        return told


def _exit_message(code: int | None) -> str:
    if code == -9:  # Windows has no name for it
        return "a worker process was killed (signal 9), as the system does when memory is short: try fewer jobs"
    name = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f"a worker process died ({name}); what it printed says why"


def _started(load: bytes) -> tuple[Pipe, SpawnProcess]:
    ours, theirs = _spawn.Pipe()
    with _uninterrupted():
        process = _spawn.Process(target=_serve, args=(theirs, load), daemon=True)
        process.start()
    theirs.close()
    return ours, process


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """What is started inside never hears Ctrl-C, not even before it can say so itself."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would open the mask again when started inside
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Pipe, load: bytes) -> None:
    """A process' life: chunks in, answers out, until nobody is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    work: Callable[[Any], Any] | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            asked = pipe.recv_bytes()
            try:
                work = pickle.loads(load) if work is None else work  # noqa: S301 - our own parent's
                told = pickle.dumps(answer(work, pickle.loads(asked)))  # noqa: S301
            except Exception as error:  # noqa: BLE001 - what cannot be pickled, either way
                told = pickle.dumps(Answer[Any]([], SentError.of(error)))
            pipe.send_bytes(told)


def _die_with_parent() -> None:
    """Ends this process with the one that started it, killed or not, in the midst of a task."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_RETRIES = 3  # of a chunk whose node or process was lost; an error of the work itself is not tried again
_IN_FLIGHT = 2  # chunks a CPU: one under way, one that waits beside it
_REACH_S = 5.0
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def cluster(address: str, jobs: int) -> Iterator[_Cluster]:
    """The workers of a cluster, which is left (a local one: ended) with the context.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: No cluster answers, or a node has another lengthwise or none.
    """
    ray = _imported()
    joined = not ray.is_initialized()
    if joined:
        _join(ray, address, jobs)
    try:
        _check_nodes(ray)
        yield _Cluster(ray, max(1, int(ray.cluster_resources().get("CPU", 1))))
    finally:
        if joined:
            ray.shutdown()


def _imported() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("searching on Ray", "ray") from error
    return ray


def _join(ray: Any, address: str, jobs: int) -> None:
    own = {"num_cpus": jobs, "include_dashboard": False} if address == "local" else {}
    try:
        _reach(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"no Ray cluster answers at {address!r} ({error}): start one with `ray start --head`, or use 'local'"
        ) from error


def _here() -> tuple[str, str]:
    """What a node has: the version of lengthwise, and of all that decides a result."""
    return version("lengthwise"), code_version()


def _reach(address: str) -> None:
    """Raises OSError where nobody listens: Ray itself tries for a minute, then ends the whole process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()


def _check_nodes(ray: Any) -> None:
    """Raises InputError unless every node would come to the same results as this process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(_here)
    asked = {
        node["NodeManagerAddress"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    for name, told in asked.items():
        _check_node(ray, name, told)


def _check_node(ray: Any, name: str, report: Any) -> None:
    ours = version("lengthwise")
    try:
        theirs, code = ray.get(report)
    except ray.exceptions.RayError as error:
        raise InputError(
            f"node {name} of the Ray cluster has no lengthwise that can search: "
            f"install {ours} there ({_short_message(error)})"
        ) from error
    if code != code_version():
        raise InputError(
            f"node {name} of the Ray cluster has another lengthwise ({theirs}) than this process ({ours}), "
            "or other versions of NumPy, Numba or SciPy: install the same on every node"
        )


@dataclass(frozen=True)
class _Cluster:
    ray: Any
    cpus: int

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        done = self.ray.remote(max_retries=_RETRIES)(_done)
        # Pickled as Ray does it (functions of a script by value), but loaded by us, for a clear error.
        load = [
            self.ray.put(self.ray.cloudpickle.dumps(work))
        ]  # in a list, Ray hands on where it is instead of what it is
        waiting = deque(chunks(len(tasks), self.cpus))
        flying: dict[Any, range] = {}
        try:
            while waiting or flying:
                while waiting and len(flying) < _IN_FLIGHT * self.cpus:
                    which = waiting.popleft()
                    flying[done.remote(load, [tasks[at] for at in which])] = which
                landed, _ = self.ray.wait(list(flying), timeout=WAKE_S)
                for told in landed:
                    yield from self._report(told, flying.pop(told))
        finally:
            for told in flying:
                self.ray.cancel(told, force=True)

    def _report(self, report: Any, which: range) -> Iterator[tuple[int, Any]]:
        try:
            came: Answer[Any] = self.ray.get(report)
        except self.ray.exceptions.RayError as error:
            raise LengthwiseError(
                f"the Ray cluster could not do a task, tried {_RETRIES + 1} times: {_short_message(error)}"
            ) from error
        yield from zip(which, came.results, strict=False)
        if came.error is not None:
            raise came.error.as_raised()


def _short_message(error: Exception) -> str:
    """Of Ray's pages of trace the line that says what happened."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _done(load: list[Any], tasks: list[Any]) -> Answer[Any]:
    """A chunk's answer, on a node."""
    try:
        work = _work(load[0])
    except Exception as error:  # noqa: BLE001 - a module that is not on the node, told as the work's error
        return Answer([], SentError.of(error))
    return answer(work, tasks)


@lru_cache(maxsize=1)
def _work(load: Any) -> Any:
    """The work, loaded once a process rather than once a chunk."""
    import ray

    return pickle.loads(ray.get(load))  # noqa: S301 - our own driver's


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
    return worker_pool(at_least_one(available_cpus() if jobs is None else jobs))


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
    return cluster(address, at_least_one(available_cpus() if jobs is None else jobs))


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
