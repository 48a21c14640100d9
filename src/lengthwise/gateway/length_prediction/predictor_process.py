"""Run a predictor in a child process, so that the gateway survives if it hangs, crashes or sends invalid data."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import pickle
import signal
import struct
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from lengthwise.gateway import child_process
from lengthwise.gateway.length_prediction import prediction
from lengthwise.gateway.length_prediction.prediction import FaultCounter
from lengthwise.gateway.request import MAX_TOKENS
from lengthwise.predict.distribution import LEVELS
from lengthwise.schema.errors import InputError

_MAX_RESPONSE_BYTES = 1 << 22
_HEAD = struct.Struct("<II")


class ProtocolError(Exception):
    """The process sent something other than the response to its query, and must be killed."""


def _decode(payload: bytes, number: int, n: int) -> prediction.PredictedRows:
    """Return the rows of batch ``number`` of ``n`` queries. Raises ProtocolError if the response is invalid."""
    start = _HEAD.size + n
    end = start + n * 8 * len(LEVELS)
    if len(payload) < end or _HEAD.unpack_from(payload) != (number, n):
        raise ProtocolError(f"expected the response to batch {number} of {n}")
    valid = np.frombuffer(payload, np.uint8, n, _HEAD.size) == 1
    rows = np.frombuffer(payload, "<f8", n * len(LEVELS), start).reshape(n, len(LEVELS))
    used = rows[valid]
    if not ((used[:, 0] >= 1) & (used[:, -1] <= MAX_TOKENS) & (used[:, 1:] >= used[:, :-1]).all(axis=1)).all():
        raise ProtocolError("rows that are no distributions")
    metadata = _parse_object(payload[end:])
    faults, error = metadata.get("faults"), metadata.get("error")
    counts = {str(k): int(v) for k, v in faults.items() if isinstance(v, int)} if isinstance(faults, dict) else {}
    return prediction.PredictedRows(rows, valid, counts, None if error is None else str(error))


def _parse_object(payload: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(payload)
    except ValueError:
        raise ProtocolError("no JSON") from None
    if not isinstance(parsed, dict):
        raise ProtocolError("no JSON object")
    return parsed


_log = logging.getLogger(__name__)
_MAX_BATCH, _MAX_BATCH_CHARS = 256, 1 << 20
_TERMINATE_S = 2.0


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a predictor's process."""

    start_s: float = 60.0  # timeout of its start
    hang_s: float = 5.0  # timeout of a response, after which the process is killed
    backoff_s: float = 0.1  # wait before a restart; doubled with every failure in a row
    max_backoff_s: float = 30.0
    max_waiting: int = 2048  # queries that may wait; further ones get no result
    max_bytes: int = 8 << 30  # memory of the process


class ProcessRunner:
    """Runs a predictor in a process, which is restarted when it fails.

    Queries that arrive while the process is busy form the next batch. The predictor is a file, "default", or a
    picklable object. ``faults`` counts the faults of rows, the ends of a process ("died", "hung", "invalid response"),
    and queries without a result ("down": no process, "busy": too many queries wait).
    """

    needs_deadline = True

    def __init__(self, file: str, predictor: Any, faults: FaultCounter, limits: ProcessLimits | None = None) -> None:
        self.faults, self._limits = faults, limits or ProcessLimits()
        self._pickled = None if predictor is None else pickle.dumps(predictor)
        self._file = file
        self._queue: deque[tuple[prediction.Query, prediction.PendingRow]] = deque()
        self._batch: list[prediction.PendingRow] = []
        self._wake, self._started = asyncio.Event(), asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._reaping: set[asyncio.Task[None]] = set()
        self.seconds, self.up, self.starts = float("inf"), False, 0
        self.reads_output: tuple[int, int] | None = None
        self._failures, self._refused = 0, ""

    async def start(self) -> None:
        """Start the process and wait until it is up. Raises InputError if the predictor cannot be loaded."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        await self._started.wait()
        if self._refused:
            await self.stop()
            raise InputError(f"the predictor cannot be used: {self._refused}")

    async def stop(self) -> None:
        """Stop the process."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await asyncio.gather(*self._reaping)

    def submit(self, query: prediction.Query) -> prediction.PendingRow:
        """Queue a query. Its row is None at once if there is no process, or if too many queries wait."""
        row: prediction.PendingRow = asyncio.get_running_loop().create_future()
        if not self.up or len(self._queue) >= self._limits.max_waiting:
            self.faults.add({"busy" if self.up else "down": 1})
            row.set_result(None)
            return row
        self._queue.append((query, row))
        self._wake.set()
        return row

    def state(self) -> dict[str, Any]:
        """Return the state for the admin page."""
        pid = self._process.pid if self._process is not None else None
        return {"up": self.up, "pid": pid, "starts": self.starts, "waiting": len(self._queue)}

    async def _run(self) -> None:
        limits = self._limits
        while not self._refused:
            try:
                await self._run_process()
            except Exception as error:  # noqa: BLE001 - another process starts in any case
                self._failures += 1
                invalid = isinstance(error, ProtocolError | child_process.FrameTooLongError)
                kind = "hung" if type(error) is TimeoutError else "invalid response" if invalid else "died"
                self.faults.add({kind: 1}, f"{kind}: {type(error).__name__}: {error}")
                _log.warning("the predictor's process is restarted (%s): %s", kind, error)
            finally:
                await self._reset()
            backoff_s = limits.backoff_s * 2 ** min(self._failures - 1, 30) if self._failures else 0.0
            await asyncio.sleep(min(backoff_s, limits.max_backoff_s))

    async def _run_process(self) -> None:
        self.starts += 1
        limits, process = self._limits, await child_process.spawn_module(__name__)
        self._process = process
        out = process.stdin
        assert out is not None
        task = {"path": sys.path, "file": self._file, "pickled": self._pickled, "max_bytes": limits.max_bytes}
        out.write(child_process.frame(pickle.dumps(task)))
        async with asyncio.timeout(limits.start_s):
            hello = _parse_object(await child_process.read_frame(process, _MAX_RESPONSE_BYTES))
        if not isinstance(hello.get("seconds"), float) and not isinstance(hello.get("refused"), str):
            raise ProtocolError("expected the greeting of the process")
        self._refused = hello.get("refused", "")
        if not self._refused:
            span = hello.get("reads_output")
            self.seconds, self.reads_output, self.up = hello["seconds"], (span[0], span[1]) if span else None, True
        self._started.set()

        async def wake_on_exit() -> None:
            await process.wait()
            self._wake.set()

        waiter = asyncio.get_running_loop().create_task(wake_on_exit())
        try:
            for number in itertools.count():
                if not self.up or process.returncode is not None:
                    break
                await self._wake.wait()
                if queries := self._next_batch():
                    out.write(child_process.frame(pickle.dumps((number, queries), pickle.HIGHEST_PROTOCOL)))
                    async with asyncio.timeout(limits.hang_s):
                        await out.drain()
                        payload = await child_process.read_frame(process, _MAX_RESPONSE_BYTES)
                    predicted = _decode(payload, number, len(queries))
                    self.faults.add(predicted.faults, predicted.error)
                    self._failures = 0
                    prediction.resolve(self._batch, predicted)
                    self._batch = []
        finally:
            waiter.cancel()
        if self.up:
            raise ConnectionResetError(f"it exited with {process.returncode}")

    def _next_batch(self) -> list[prediction.Query]:
        queries: list[prediction.Query] = []
        chars = 0
        while self._queue and len(queries) < _MAX_BATCH and chars < _MAX_BATCH_CHARS:
            query, row = self._queue.popleft()
            if not row.done():
                queries.append(query)
                self._batch.append(row)
                chars += len(query.text) + len(query.output)
        if not self._queue:
            self._wake.clear()
        return queries

    async def _reset(self) -> None:
        self.up = False
        process, self._process = self._process, None
        prediction.resolve([*self._batch, *(row for _, row in self._queue)])
        self._batch = []
        self._queue.clear()
        self._wake.clear()
        self._started.set()
        if process is not None:
            child_process.close(process)
            reaping = asyncio.get_running_loop().create_task(child_process.wait_terminated(process, _TERMINATE_S))
            self._reaping.add(reaping)
            reaping.add_done_callback(self._reaping.discard)
            await asyncio.shield(reaping)


def main() -> None:
    """Run a predictor in the child process: answer the parent's queries until the parent closes its pipe."""
    pipe = child_process.ParentPipe()
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if (first := pipe.receive()) is None:
        return
    task = pickle.loads(first)  # noqa: S301 - from the parent process
    sys.path[:] = task["path"]
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (task["max_bytes"], task["max_bytes"]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - no path
        file.write("1000")
    try:
        if task["pickled"] is not None:
            predictor = pickle.loads(task["pickled"])  # noqa: S301 - from the parent process
        else:
            from lengthwise.predict import opened

            predictor = opened(task["file"])
    except Exception as error:  # noqa: BLE001 - the parent reports it, whatever it is
        pipe.send(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        return
    span = getattr(predictor, "reads_output", None)
    span = None if span is None else [int(tokens) for tokens in span]
    pipe.send(json.dumps({"seconds": prediction.measure_latency_s(predictor), "reads_output": span}).encode())
    while (payload := pipe.receive()) is not None:
        number, queries = pickle.loads(payload)  # noqa: S301 - from the parent process
        predicted = prediction.predict_rows(predictor, queries)
        valid, rows = predicted.valid.astype(np.uint8).tobytes(), predicted.rows.astype("<f8").tobytes()
        metadata = json.dumps({"faults": predicted.faults, "error": predicted.error}).encode()
        pipe.send(_HEAD.pack(number, len(valid)) + valid + rows + metadata)
