"""Finished requests in a file, a line of JSON each: whole lines, written off the event loop in batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lengthwise.gateway.protocols import Clock, monotonic
from lengthwise.schema.errors import InputError, OutputError

Again = tuple[int, float]
"""(tokens that had come, total predicted then)"""


MOST = 1 << 53
"""Beyond it no number of JSON is whole."""


@dataclass(frozen=True, slots=True)
class Row:
    """Times are of the gateway's clock; one that never came is NaN. No prompt, no key, no text.

    Attributes:
        id: In order of arrival.
        model: Asked for.
        tenant: Its name.
        priority: Class; smaller goes first.
        arrival_s: When its body had come.
        prompt_tokens: Counted or estimated.
        max_tokens: The longest output it asked for.
        predicted_tokens: Before its first token.
        source: Of that prediction.
        predicted_level: The share of the predicted distribution below the true length, 0 to 1: uniform where
            predictions are right.
        retry: What was predicted later, as tokens came.
        output_tokens: That came.
        queued_for_s: In the gateway's queue in all.
        dispatched_s: First sent to an engine.
        first_token_s: Its first token came; NaN where the answer came whole.
        finished_s: Over.
        served_s: At engines in all.
        worker: The last.
        preemptions: How often it was cut.
        resumed_tokens: Tokens that it kept over cuts and fail-overs.
        failovers: How often an engine failed it.
        outcome: One of ``request.Outcome``.
    """

    id: int
    model: str
    tenant: str
    priority: int
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    predicted_tokens: float
    source: str
    predicted_level: float
    retry: tuple[Again, ...]
    output_tokens: int
    queued_for_s: float
    dispatched_s: float
    first_token_s: float
    finished_s: float
    served_s: float
    worker: str
    preemptions: int
    resumed_tokens: int
    failovers: int
    outcome: str

    @property
    def jct_s(self) -> float:
        """Arrival to end."""
        return self.finished_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.arrival_s


def as_dict(row: Row) -> dict[str, Any]:
    """The row for JSON: what is not known is None, seconds to the microsecond."""
    return {name: _plain(value) for name, value in asdict(row).items()}


def from_dict(report: Mapping[str, Any]) -> Row:
    """The row that ``as_dict`` told; raises KeyError, TypeError or ValueError where it is none."""
    values = {name: report[name] for name in _NAMES}
    for name in _FLOATS:
        values[name] = math.nan if values[name] is None else float(values[name])
    for name in _INTEGERS:
        if not abs(values[name]) <= MOST:
            raise ValueError(f"{name} must be a whole number; it is {values[name]!r}")
        values[name] = int(values[name])
    for name in _TEXTS:
        if not isinstance(values[name], str):
            raise TypeError(f"{name} must be a text; it is {values[name]!r}")
    values["retry"] = tuple((int(at), float(total)) for at, total in values["retry"] if abs(at) <= MOST)
    return Row(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


_NAMES = tuple(field.name for field in fields(Row))
_FLOATS = tuple(field.name for field in fields(Row) if field.type == "float")
_TEXTS = tuple(field.name for field in fields(Row) if field.type == "str")
_INTEGERS = tuple(field.name for field in fields(Row) if field.type == "int")


FORMAT = "lengthwise-journal"
VERSION = 1
FLUSH_S = 0.5
MAX_BYTES = 256 << 20
OLD_FILES = 16
"""So many older files are looked for."""
MOST_KEPT = 100_000
"""Rows kept for a disk that does not take them; beyond it the oldest are lost, and counted."""
_log = logging.getLogger("lengthwise.gateway")


class Journal:
    """Appends rows to a file; what was flushed survives whatever ends the process.

    Every start writes a line of its own that ties the gateway's clock to the time of day. A file of ``max_bytes``
    becomes ``NAME.1`` (and that ``NAME.2``, up to ``keep``), and a new one begins.

    Args:
        path: The file; it is made, or gone on with.
        clock: The gateway's.
        flush_s: Rows wait at most so long before they are written.
        max_bytes: Of one file.
        keep: Old files kept.
        epoch: Seconds since 1970, asked once.

    Attributes:
        written: Rows.
        lost: Rows that could not be written.
    """

    def __init__(
        self,
        path: Path | str,
        clock: Clock = monotonic,
        *,
        flush_s: float = FLUSH_S,
        max_bytes: int = MAX_BYTES,
        keep: int = 4,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self.written = self.lost = 0
        self._flush_s, self._most_bytes, self._keep = flush_s, max_bytes, keep
        head = {"format": FORMAT, "version": VERSION, "clock_s": clock(), "unix_s": epoch()}
        self._head = _line(head)
        self._rows: list[Row] = []
        self._file = -1
        self._writer: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def over(self, row: Row) -> None:
        """A request is over; written with the next batch."""
        if len(self._rows) >= MOST_KEPT:
            self.lost += len(self._rows) // 2
            del self._rows[: len(self._rows) // 2]
        self._rows.append(row)

    async def __aenter__(self) -> Self:
        """Opens the file; raises OutputError where it cannot be written."""
        try:
            self._open()
        except OSError as error:
            raise OutputError(
                f"the journal {self.path} must be a file that can be written: {error.strerror or error}"
            ) from error
        self._writer = ThreadPoolExecutor(1, "journal")
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes what is left."""
        if self._task is not None:
            self._stop.set()
            await self._task
            await self.flush()
        if self._writer is not None:
            self._writer.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    async def flush(self) -> None:
        """Writes all rows there are."""
        if not self._rows or self._writer is None:
            return
        rows, self._rows = self._rows, []
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, self._append, rows)
        except OSError as error:
            self._rows = rows + self._rows
            _log.warning("the journal %s cannot be written: %s", self.path, error.strerror or error)
        else:
            self.written += len(rows)

    async def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._flush_s)
            await self.flush()

    # On the writer's thread:

    def _open(self) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            _write(file, (b"\n" if torn else b"") + self._head)
        except OSError:
            os.close(file)
            raise
        self._file = file

    def _append(self, rows: list[Row]) -> None:
        if self._file < 0:
            self._open()
        elif os.fstat(self._file).st_size > self._most_bytes:
            self._rotate()
        size = os.fstat(self._file).st_size
        try:
            _write(self._file, b"".join([_line(as_dict(row)) for row in rows]))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)  # all of them come again
            raise

    def _rotate(self) -> None:
        """Moves the files on and begins another; where that fails none is open until the next rows."""
        file, self._file = self._file, -1  # its number may be somebody else's as soon as it is closed
        os.close(file)
        names = [self.path, *(Path(f"{self.path}.{i}") for i in range(1, self._keep + 1))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if self._keep == 0:
            self.path.unlink(missing_ok=True)
        self._open()


def read(path: Path | str) -> Iterator[tuple[int, Row]]:
    """(run, row) of a journal in the order in which requests ended; times are of the day (seconds since 1970).

    A run is one life of a gateway. A line that was torn, or is no row, is left out.

    Raises:
        InputError: It is no journal, or cannot be read.
    """
    return _runs([Path(path)])


def read_all(path: Path | str) -> Iterator[tuple[int, Row]]:
    """The same of a journal with the older files beside it, those first; a run may go on from one file to the next."""
    older = (Path(f"{path}.{i}") for i in range(OLD_FILES, 0, -1))
    return _runs([*(file for file in older if file.exists()), Path(path)])


def _runs(files: Iterable[Path]) -> Iterator[tuple[int, Row]]:
    run, head = 0, b""
    for file in files:
        started, shift_s = False, math.nan
        for line, told in _lines(file):
            if told.get("format") == FORMAT:
                run += started or line != head  # the first line of a file that goes on with a run is that run's
                started, head, shift_s = True, line, _shift_s(told)
                continue
            if not started:
                break
            row = _row(told, shift_s)
            if row is not None:
                yield run, row
        if not started:
            raise InputError(
                f"{file} must be a journal of `lengthwise serve` (its first line says {FORMAT!r}); it is none"
            )


def _lines(file: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line that is whole."""
    try:
        with file.open("rb") as lines:
            for line in lines:
                told = _read_line(line)
                if told is not None:
                    yield line, told
    except OSError as error:
        raise InputError(f"the journal {file} must be a file that can be read: {error.strerror or error}") from error


def _shift_s(head: dict[str, Any]) -> float:
    """From the run's clock to the time of day; NaN where the line does not tell: no row of that run has a time."""
    try:
        return float(head["unix_s"]) - float(head["clock_s"])
    except (KeyError, TypeError, ValueError):
        return math.nan


def _row(report: dict[str, Any], shift_s: float) -> Row | None:
    try:
        for name in ("arrival_s", "dispatched_s", "first_token_s", "finished_s"):
            if report[name] is not None:
                report[name] += shift_s
        row = from_dict(report)
    except (KeyError, TypeError, ValueError):
        return None
    return row if math.isfinite(row.arrival_s) else None


def _read_line(line: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _line(report: dict[str, Any]) -> bytes:
    return json.dumps(report, separators=(",", ":")).encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    """All of it: one write, unless the disk takes less."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
