"""Work of the planner's server: answers and jobs of several browsers on one pool of threads, with turns by session.

A session is one browser. It sees its own jobs and files, and nothing of the others.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthwise.config.files import also_allow
from lengthwise.schema.errors import InputError
from lengthwise.search.workers import available_cpus

FIRST, COMPLETE, JOB = 0, 1, 2
"""Kinds of tasks: first answers to a move, answers with intervals, jobs of seconds to minutes."""
MAX_WAITING, MAX_SESSIONS, MAX_JOBS, MAX_FILES, MAX_FILE_BYTES = 64, 64, 8, 8, 16 * 1024 * 1024


class CancelledTaskError(Exception):
    """A task ended before its result: its browser left, cancelled it, or requested a newer answer."""


@dataclass(eq=False)
class Task:
    """An answer or a job of one tab; ``function`` gets the task, for its files, its progress and its end."""

    session: Session
    tab: str
    kind: int
    function: Callable[[Task], Any]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    future: Future[Any] = field(default_factory=Future)
    progress: tuple[str, int, int] = ("waiting", 0, 0)
    is_cancelled: bool = False
    threads: int = 1  # for its own work: when it starts, its part of the processors that jobs share

    def __post_init__(self) -> None:
        """Mark the future as running, so that only this task ends it."""
        self.future.set_running_or_notify_cancel()

    def check(self) -> None:
        """Raise CancelledTaskError if no browser waits for the result. Long functions call it often."""
        if self.is_cancelled:
            raise CancelledTaskError

    def report(self, step: str, done: int, of: int) -> None:
        """Set the progress: a step, and how many of its parts are done. Raises CancelledTaskError as ``check``."""
        self.check()
        self.progress = step, done, of

    def run(self) -> None:
        """Set the result of the future, or its error."""
        try:
            self.check()
            self.progress = "running", 0, 0
            self.future.set_result(self.function(self))
        except BaseException as error:  # noqa: BLE001 - raised where the future is read
            if isinstance(error, InputError):  # a browser knows its files by their names
                error.args = (self.session.without_folder(str(error)),)
            self.future.set_exception(error)


class Session:
    """The jobs and uploaded files of one browser. Each has a bounded number of both, and drops the oldest."""

    def __init__(self) -> None:
        """Make a session without jobs and files."""
        self.key = secrets.token_urlsafe(24)
        self.jobs: OrderedDict[str, Task] = OrderedDict()
        self.files: OrderedDict[str, Path] = OrderedDict()
        self.last_turn = 0
        self._folder: Path | None = None

    def job(self, identity: str) -> Task:
        """Return a job of this session. Raises InputError for others."""
        if (found := self.jobs.get(identity)) is None:
            raise InputError("this browser has no such job (any more); reload the page and start it again")
        return found

    def store(self, name: str, content: bytes) -> str:
        """Store an uploaded file, and return its identity."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="lengthwise-ui-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            also_allow(self._folder)
        identity = secrets.token_urlsafe(12)
        place = self._folder / identity
        place.mkdir()
        safe = "".join(c if c.isalnum() or c in "._- ()" else "_" for c in name).strip(". ")[-80:] or "file"
        self.files[identity] = place / safe
        self.files[identity].write_bytes(content)
        while len(self.files) > MAX_FILES:
            shutil.rmtree(self.files.popitem(last=False)[1].parent, ignore_errors=True)
        return identity

    def without_folder(self, text: str) -> str:
        """Return a text with uploaded files by their names instead of their paths."""
        for path in list(self.files.values()):
            text = text.replace(str(path), path.name)
        return text

    def file(self, identity: Any) -> Path:
        """Return the path of an uploaded file. Raises InputError for others."""
        if not isinstance(identity, str) or (found := self.files.get(identity)) is None:
            raise InputError("this browser has no such file (any more); reload the page and upload it again")
        return found


class Pool:
    """Threads that run tasks: sessions take turns, and one thread each is free of jobs and of complete answers."""

    def __init__(self, threads: int | None = None) -> None:
        """Start ``threads`` daemon threads (None: one more than CPUs, at least three)."""
        self._count = threads or max(3, available_cpus() + 1)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._without_page = Session()
        self._changed = threading.Condition()
        self._waiting: list[Task] = []
        self._running: list[Task] = []
        self._turn = 0
        for _ in range(self._count):
            threading.Thread(target=self._work, daemon=True).start()

    def session(self, key: str | None, *, is_page: bool = True) -> Session:
        """Return the session with this key, or a new one for a page. Calls without a page share one, and its turns.

        Beyond MAX_SESSIONS the one unused for longest ends.
        """
        with self._changed:
            known = self._sessions.get(key or "")
            if known is None and not is_page:
                return self._without_page
            found = known or Session()
            self._sessions[found.key] = found
            self._sessions.move_to_end(found.key)
            while len(self._sessions) > MAX_SESSIONS:
                for task in self._sessions.popitem(last=False)[1].jobs.values():
                    self._cancel(task)
            return found

    def add(self, task: Task) -> Task:
        """Queue a task. An answer cancels older ones of its tab. Raises InputError if too many tasks wait."""
        with self._changed:
            if task.kind != JOB:
                for other in [*self._waiting, *self._running]:
                    if other.kind != JOB and (other.session, other.tab) == (task.session, task.tab):
                        self._cancel(other)
            else:
                jobs = task.session.jobs
                for old in [one for one in jobs.values() if one.future.done()][: max(0, len(jobs) - MAX_JOBS + 1)]:
                    del jobs[old.id]
                if len(jobs) >= MAX_JOBS:
                    raise InputError(f"a browser may have {MAX_JOBS} unfinished jobs; cancel one, or wait")
            if len(self._waiting) >= MAX_WAITING:
                raise InputError(f"{MAX_WAITING} tasks wait for this server; try again later")
            if task.kind == JOB:
                task.session.jobs[task.id] = task
            self._waiting.append(task)
            self._changed.notify_all()
        return task

    def cancel(self, task: Task) -> None:
        """End a task: at once if it waits, else at its next ``check``."""
        with self._changed:
            self._cancel(task)

    def _cancel(self, task: Task) -> None:
        task.is_cancelled = True
        if task in self._waiting:
            self._waiting.remove(task)
            task.future.set_exception(CancelledTaskError())

    def _next(self) -> Task | None:
        def is_ready(task: Task) -> bool:  # one thread is left for each kind of shorter tasks
            return sum(one.kind >= task.kind for one in self._running) < max(1, self._count - task.kind)

        def order(task: Task) -> tuple[int, int, int]:
            return task.kind, sum(one.session is task.session for one in self._running), task.session.last_turn

        return min(filter(is_ready, self._waiting), key=order, default=None)  # of equals the oldest

    def _work(self) -> None:
        while True:
            with self._changed:
                while (task := self._next()) is None:
                    self._changed.wait()
                self._waiting.remove(task)
                self._running.append(task)
                task.threads = max(1, (self._count - JOB) // max(1, sum(one.kind == JOB for one in self._running)))
                self._turn += 1
                task.session.last_turn = self._turn
            task.run()
            with self._changed:
                self._running.remove(task)
                self._changed.notify_all()
            del task  # else this thread keeps the task, and its result, while it waits for the next one
