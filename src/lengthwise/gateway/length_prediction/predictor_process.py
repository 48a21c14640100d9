"""A predictor in a process of its own: whatever it does, nobody here waits for it longer than they want."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import pickle
import signal
import struct
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from lengthwise.gateway.child_process import close, spawn_module, wait_terminated
from lengthwise.gateway.length_prediction.prediction import (
    Answer,
    Message,
    Question,
    Tally,
    ask,
    measured_s,
    nothing,
    sound,
)
from lengthwise.predict.distribution import LEVELS
from lengthwise.schema.errors import InputError

LENGTH = struct.Struct("<I")
MOST_ANSWER_BYTES = 1 << 22
_HEAD = struct.Struct("<II")
_ROW_BYTES = 8 * len(LEVELS)


class Rubbish(Exception):  # noqa: N818 - what came, and the process that sent it is ended for it
    """What came is no answer to what was asked."""


def framed(payload: bytes) -> bytes:
    """The payload after its length."""
    return LENGTH.pack(len(payload)) + payload


def told(number: int, message: Message) -> bytes:
    """Answers as bytes."""
    beside = json.dumps({"faults": message.faults, "error": message.error}).encode()
    rows = np.ascontiguousarray(message.rows, "<f8")
    good = np.ascontiguousarray(message.good, np.uint8)
    return _HEAD.pack(number, len(message.good)) + good.tobytes() + rows.tobytes() + beside


def heard(payload: bytes, number: int, n: int) -> Message:
    """The answers to n questions; Rubbish where it is none."""
    start, end = _HEAD.size + n, _HEAD.size + n + n * _ROW_BYTES
    if len(payload) < end or _HEAD.unpack_from(payload) != (number, n):
        raise Rubbish(f"an answer to batch {number} of {n} was expected")
    good = np.frombuffer(payload, np.uint8, n, _HEAD.size) == 1
    rows = np.frombuffer(payload, "<f8", n * len(LEVELS), start).reshape(n, len(LEVELS))
    if not all(sound(row) for row in rows[good]):
        raise Rubbish("rows that are no distributions")
    beside = _object(payload[end:])
    faults = beside.get("faults")
    counted = {str(k): int(v) for k, v in faults.items() if isinstance(v, int)} if isinstance(faults, dict) else {}
    error = beside.get("error")
    return Message(rows, good, counted, None if error is None else str(error))


def greeting(payload: bytes) -> dict[str, Any]:
    """What a process says when it is ready, or cannot be; Rubbish where it is something else."""
    found = _object(payload)
    if not isinstance(found.get("seconds"), float) and not isinstance(found.get("refused"), str):
        raise Rubbish("a greeting was expected")
    return found


def _object(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except ValueError:
        raise Rubbish("no JSON") from None
    if not isinstance(found, dict):
        raise Rubbish("no JSON object")
    return found


_log = logging.getLogger(__name__)
_MOST_BATCH, _MOST_BATCH_CHARS = 256, 1 << 20
_END_S = 2.0


@dataclass(frozen=True)
class Care:
    """How a process is treated.

    Attributes:
        start_s: It must greet within this.
        hang_s: An answer that takes longer never comes: it is ended.
        rest_s: Before it is started again; doubles with every failure in a row, up to ``most_rest_s``.
        most_rest_s: The longest rest.
        most_waiting: Questions that may wait; more get no answer.
        max_bytes: Memory of its own.
    """

    start_s: float = 60.0
    hang_s: float = 5.0
    rest_s: float = 0.1
    most_rest_s: float = 30.0
    most_waiting: int = 2048
    max_bytes: int = 8 << 30


class InProcess:
    """Asks a predictor in a process; all that wait while it is busy go into its next batch.

    Args:
        file: The predictor's file or "default"; "" where one is handed over.
        predictor: One that can be pickled, in place of a file.
        tally: Where faults are counted: those of rows, "died", "hung", "rubbish", "down", "busy".
        resilience: How it is treated.
    """

    waits = True

    def __init__(self, file: str, predictor: Any, tally: Tally, resilience: Care | None = None) -> None:
        self.tally, self._care = tally, resilience or Care()
        self._pickled = None if predictor is None else pickle.dumps(predictor)
        self._file = file
        self._waiting: deque[tuple[Question, Answer]] = deque()
        self._client_request: list[Answer] = []
        self._something = asyncio.Event()
        self._greeted = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None
        self._reaping: set[asyncio.Task[None]] = set()
        self.seconds, self.reads_text, self.up, self.starts = float("inf"), False, False, 0
        self._failed, self._refused = 0, ""

    async def start(self) -> None:
        """Returns when it has greeted for the first time, or has been given up for now.

        Raises:
            InputError: It told that the predictor cannot be had.
        """
        self._life = asyncio.get_running_loop().create_task(self._live())
        await self._greeted.wait()
        if self._refused:
            await self.stop()
            raise InputError(f"the predictor cannot be used: {self._refused}")

    async def stop(self) -> None:
        """Ends the process."""
        if self._life is not None:
            self._life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._life
            self._life = None
        await asyncio.gather(*self._reaping)

    def submit(self, question: Question) -> Answer:
        """An answer when the process has made it; None at once while there is none."""
        answer: Answer = asyncio.get_running_loop().create_future()
        if not self.up or len(self._waiting) >= self._care.most_waiting:
            self.tally.add({"busy" if self.up else "down": 1})
            answer.set_result(None)
            return answer
        self._waiting.append((question, answer))
        self._something.set()
        return answer

    def state(self) -> dict[str, Any]:
        """Whether it is up, its number, how often it was started."""
        pid = self._process.pid if self._process is not None else None
        return {"up": self.up, "pid": pid, "starts": self.starts, "waiting": len(self._waiting)}

    async def _live(self) -> None:
        """One process after another, until it is stopped."""
        while not self._refused:
            try:
                await self._one()
            except Exception as error:  # noqa: BLE001 - whatever ends a process, another is started
                self._note(error)
            finally:
                await self._end()
            rest_s = self._care.rest_s * 2 ** min(self._failed - 1, 30) if self._failed else 0.0
            await asyncio.sleep(min(rest_s, self._care.most_rest_s))

    async def _one(self) -> None:
        """The life of one process: greeting, batches, an exception at its end."""
        self.starts += 1
        resilience, process = self._care, await spawn_module(__name__)
        self._process = process
        out = process.stdin
        assert out is not None
        task = {"path": sys.path, "file": self._file, "pickled": self._pickled, "max_bytes": resilience.max_bytes}
        out.write(framed(pickle.dumps(task)))
        async with asyncio.timeout(resilience.start_s):
            hello = greeting(await self._read())
        self._refused = hello.get("refused", "")
        if not self._refused:
            self.seconds, self.reads_text = hello["seconds"], bool(hello.get("reads_text"))
            self.up = True
        self._greeted.set()
        watch = asyncio.get_running_loop().create_task(self._monitor_task(process))
        try:
            for number in itertools.count():
                if not self.up or process.returncode is not None:
                    break
                await self._something.wait()
                await self._batch(number, out)
        finally:
            watch.cancel()
        if self.up:
            raise ConnectionResetError(f"it ended with {process.returncode}")

    async def _monitor_task(self, process: asyncio.subprocess.Process) -> None:
        """Wakes who waits for questions when the process ends."""
        await process.wait()
        self._something.set()

    async def _batch(self, number: int, out: asyncio.StreamWriter) -> None:
        """Asks what waits, as much as is well done at once, and hands out what is answered."""
        questions = self._taken()
        if not questions:
            return
        out.write(framed(pickle.dumps((number, questions), pickle.HIGHEST_PROTOCOL)))
        async with asyncio.timeout(self._care.hang_s):
            await out.drain()
            said = heard(await self._read(), number, len(questions))
        self.tally.add(said.faults, said.error)
        self._failed = 0
        for place, answer in enumerate(self._client_request):
            if not answer.done():
                answer.set_result(said.rows[place] if said.good[place] else None)
        self._client_request = []

    def _taken(self) -> list[Question]:
        questions: list[Question] = []
        chars = 0
        while self._waiting and len(questions) < _MOST_BATCH and chars < _MOST_BATCH_CHARS:
            question, answer = self._waiting.popleft()
            if not answer.done():
                questions.append(question)
                self._client_request.append(answer)
                chars += len(question.text) + len(question.output)
        if not self._waiting:
            self._something.clear()
        return questions

    async def _read(self) -> bytes:
        stream = self._process.stdout if self._process is not None else None
        assert stream is not None
        length = LENGTH.unpack(await stream.readexactly(LENGTH.size))[0]
        if length > MOST_ANSWER_BYTES:
            raise Rubbish(f"an answer of {length} bytes")
        return await stream.readexactly(length)

    def _note(self, error: Exception) -> None:
        """Counts why a process ended."""
        self._failed += 1
        kind = {TimeoutError: "hung", Rubbish: "rubbish"}.get(type(error), "died")
        self.tally.add({kind: 1}, f"{kind}: {type(error).__name__}: {error}")
        _log.warning("the predictor's process %s and is started again: %s", kind, error)

    async def _end(self) -> None:
        """Ends the process that is there; who waits gets no answer."""
        self.up = False
        process, self._process = self._process, None
        for answer in [*self._client_request, *(answer for _, answer in self._waiting)]:
            if not answer.done():
                answer.set_result(None)
        self._client_request = []
        self._waiting.clear()
        self._something.clear()
        self._greeted.set()
        if process is not None:
            close(process)
            reaping = asyncio.get_running_loop().create_task(wait_terminated(process, _END_S))
            self._reaping.add(reaping)
            reaping.add_done_callback(self._reaping.discard)
            await asyncio.shield(reaping)


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
    _bounded(task["max_bytes"])
    predictor = _greet(task, answers)
    while predictor is not None and (payload := _read(questions)) is not None:
        number, asked = pickle.loads(payload)  # noqa: S301
        _write(answers, told(number, _client_request(predictor, asked)))


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


def _client_request(predictor: Any, questions: list[Any]) -> Message:
    """Answers; memory that was not to be had, or an answer too strange to be judged, is a fault like others."""
    try:
        return ask(predictor, questions)
    except Exception as error:  # noqa: BLE001 - the process need not end for it
        return nothing(len(questions), error)


def _bounded(max_bytes: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
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
