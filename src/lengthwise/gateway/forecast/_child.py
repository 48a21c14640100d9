"""The process of a predictor: reads batches of questions, writes answers, ends with its parent.

What it prints goes to stderr. Its memory is bounded, and it is the first to go when the machine's is short.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

from lengthwise.gateway.forecast._asking import Said, ask, measured_s, nothing
from lengthwise.gateway.forecast._frames import LENGTH, framed, told

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Answers until its input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tied_to_parent()
    questions = sys.stdin.buffer
    first = _read(questions)
    if first is None:
        return
    task = pickle.loads(first)  # noqa: S301 - the parent's own words
    sys.path[:] = task["path"]
    _bounded(task["most_bytes"])
    predictor = _greet(task, answers)
    while predictor is not None and (payload := _read(questions)) is not None:
        number, asked = pickle.loads(payload)  # noqa: S301
        _write(answers, told(number, _asked(predictor, asked)))


def _greet(task: dict[str, Any], answers: BinaryIO) -> Any:
    """The predictor, once it is told how quick it is, or why it cannot be had (None)."""
    try:
        predictor = _predictor(task)
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        _write(answers, json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        return None
    hello = {"seconds": measured_s(predictor), "reads_text": bool(getattr(predictor, "reads_text", False))}
    _write(answers, json.dumps(hello).encode())
    return predictor


def _predictor(task: dict[str, Any]) -> Any:
    if task["pickled"] is not None:
        return pickle.loads(task["pickled"])  # noqa: S301
    from lengthwise.predict import opened

    return opened(task["file"])


def _asked(predictor: Any, questions: list[Any]) -> Said:
    """Answers; memory that was not to be had, or an answer too strange to be judged, is a fault like others."""
    try:
        return ask(predictor, questions)
    except Exception as error:  # noqa: BLE001 - the process need not end for it
        return nothing(len(questions), error)


def _bounded(most_bytes: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - no path
        file.write("1000")


def _tied_to_parent() -> None:
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _read(file: BinaryIO) -> bytes | None:
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return file.read(LENGTH.unpack(head)[0])


def _write(file: BinaryIO, payload: bytes) -> None:
    file.write(framed(payload))
    file.flush()


if __name__ == "__main__":
    main()
