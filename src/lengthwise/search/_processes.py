"""Workers in processes of their own, each at the end of a pipe.

They are spawned, not forked: a fork takes along Numba's threads and locks as they happen to stand. Not
concurrent.futures, whose pool cannot be made to let go of a task under way before Python 3.14.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from lengthwise.schema.errors import LengthwiseError
from lengthwise.search._chunks import WAKE_S, Answer, SentError, answer, chunks

T = TypeVar("T")
R = TypeVar("R")
Pipe = connection.Connection

_spawn = multiprocessing.get_context("spawn")


@contextmanager
def crew(jobs: int) -> Iterator[_Crew]:
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
                    which, told = busy.pop(pipe), self._heard(pipe)
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

    def _heard(self, pipe: Pipe) -> Answer[Any]:
        try:
            told: Answer[Any] = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own child's
        except (EOFError, ConnectionResetError) as error:
            process = self.members[pipe]
            process.join()
            code = process.exitcode
            self.dismiss([pipe])
            raise LengthwiseError(_died(code)) from error
        return told


def _died(code: int | None) -> str:
    if code == -9:  # Windows has no name for it
        return (
            "a worker process was killed (signal 9), as the system does when memory is short: try fewer jobs"
        )
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
