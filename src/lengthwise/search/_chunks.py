"""What goes to a worker in another process, and what comes back: a few tasks at a time."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from lengthwise.schema.errors import InputError

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
