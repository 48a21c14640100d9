"""Work for workers: importable, as what is sent to another process must be."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from lengthwise.schema.errors import UnknownNameError


class Double:
    """Counts how often it was unpickled in a process."""

    loads = 0

    def __setstate__(self, state):
        type(self).loads += 1

    def __getstate__(self):
        return {"filler": "x"}

    def __call__(self, task):
        return 2 * task, os.getpid(), type(self).loads


def picky(task):
    """Fails at 7 in a way that plain pickling cannot bring home."""
    if task == 7:
        error = UnknownNameError("number", "seven", ["six", "eight"])
        error.add_note("while counting")
        raise error
    return task


def dies(task):
    """The fate of a process when memory is short."""
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def secret(task):
    """Results and errors that no pickle can hold."""
    if task == 0:
        return lambda: task
    error = ValueError("locked")
    error.lock = lambda: task
    raise error


def busy(seconds):
    """Keeps a CPU busy for so many seconds of its time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return seconds


def naps(task):
    """Writes down who does it, then takes its time."""
    path, seconds = task
    with Path(path).open("a") as file:
        print(os.getpid(), file=file)
    time.sleep(seconds)
    return seconds


def once_deadly(folder):
    """Kills its process at the first try only, as a node does that is lost."""
    mark = Path(folder) / "attempts"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


class Nowhere:
    """Work whose module only the parent has."""

    def __reduce__(self):
        return __import__, ("nowhere",)

    def __call__(self, task):
        return task
