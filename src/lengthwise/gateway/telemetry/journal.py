"""Append requests that have ended to a journal of JSON lines, in batches on a thread, and read journals."""

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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from lengthwise.gateway.protocols import Clock, monotonic
from lengthwise.schema.errors import InputError, OutputError

Reprediction = tuple[int, float]  # (tokens generated so far, predicted total)
PrefixKey = tuple[int, int]  # (leading tokens of a prompt, salted hash of these tokens)
_MAX_INTEGER = 1 << 53  # JSON readers that use doubles round larger integers


@dataclass(frozen=True, slots=True)
class Row:
    """A request that has ended, with any outcome. Times are on the gateway's clock, NaN if an event did not happen."""

    id: int  # in order of arrival
    model: str
    tenant: str  # name of the tenant
    priority: int  # priority class; a smaller one is served earlier
    arrival_s: float  # when the body was complete
    prompt_tokens: int  # as its engine counts them, or else counted or estimated by the gateway
    max_tokens: int  # requested maximum; 0 if the client requests none below the gateway's limit
    predicted_tokens: float  # length predicted before the first token, by ``source``
    source: str  # as in ``LengthPrediction``
    predicted_level: float  # predicted CDF at the output length (PIT); uniform over requests if calibrated
    repredictions: tuple[Reprediction, ...]
    output_tokens: int
    queued_for_s: float  # total time in the gateway's queue until the last dispatch
    dispatched_s: float  # first dispatch to a worker
    first_token_s: float  # NaN if the engine sent the response in one chunk
    finished_s: float
    served_s: float  # total time at workers
    worker: str  # last worker; "" if the request was never dispatched
    preemptions: int
    resumed_tokens: int  # tokens retained at returns to the queue, summed over the returns
    failovers: int  # moves from a worker that was lost, or failed after the request's first token
    outcome: str  # a value of ``Outcome``
    # within a run of the gateway, requests of one session and prompts with a common prefix have equal hashes
    session: int = 0  # salted hash of the session's name; 0: none
    prefix: tuple[PrefixKey, ...] = ()
    cached_tokens: float = math.nan  # cached prompt tokens; NaN: not reported by the engine
    kv_tokens: int = 0  # size of the worker's KV cache; 0: not reported by the engine

    @property
    def jct_s(self) -> float:
        """Time from arrival to finish."""
        return self.finished_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Time from arrival to first token."""
        return self.first_token_s - self.arrival_s


_TIMES = ("arrival_s", "dispatched_s", "first_token_s", "finished_s")
_TYPES = {field.name: field.type for field in fields(Row)}
_DEFAULTS = {"session": 0, "prefix": (), "cached_tokens": None, "kv_tokens": 0}  # for journals of earlier versions


def as_dict(row: Row) -> dict[str, Any]:
    """Return the row for JSON. NaN becomes None, and floats are rounded to six decimals."""
    return {
        name: (round(value, 6) if math.isfinite(value) else None) if isinstance(value, float) else value
        for name, value in asdict(row).items()
    }


def from_dict(values: Mapping[str, Any]) -> Row:
    """Return the row from values of ``as_dict``. Raises KeyError, TypeError or ValueError for other values."""
    row: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        value = values.get(name, _DEFAULTS[name]) if name in _DEFAULTS else values[name]
        match kind:
            case "float":
                row[name] = math.nan if value is None else float(value)
            case "int":
                if not abs(value) <= _MAX_INTEGER:
                    raise ValueError(f"{name} must be an integer; it is {value!r}")
                row[name] = int(value)
            case "str":
                if not isinstance(value, str):
                    raise TypeError(f"{name} must be a text; it is {value!r}")
                row[name] = value
            case "tuple[PrefixKey, ...]":
                row[name] = tuple((int(tokens), int(key)) for tokens, key in value)
            case _:
                row[name] = tuple((int(tokens), float(total)) for tokens, total in value if abs(tokens) <= _MAX_INTEGER)
    return Row(**row)


FORMAT = "lengthwise-journal"
VERSION = 1
FLUSH_S = 0.5
MAX_BYTES = 256 << 20
MAX_OLD_FILES = 16  # number of the oldest file that ``read_all`` looks for
MAX_BUFFERED_ROWS = 100_000  # while a disk rejects writes; beyond it the older half is dropped and counted
_log = logging.getLogger("lengthwise.gateway")


class Journal:
    """Appends rows to a file, which is created if necessary. Flushed rows survive a crash of the process.

    A file's first line, and one at every start, relates the gateway's clock to the time of day (``epoch`` returns the
    seconds since 1970). When the file exceeds ``max_bytes``, a new one begins: NAME becomes NAME.1, NAME.1 becomes
    NAME.2, up to ``num_old``. Rows are flushed every ``flush_s``. ``written`` and ``lost`` are numbers of rows.
    """

    def __init__(
        self,
        path: Path | str,
        clock: Clock = monotonic,
        *,
        flush_s: float = FLUSH_S,
        max_bytes: int = MAX_BYTES,
        num_old: int = 4,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self.written = self.lost = 0
        self._flush_s, self._max_bytes, self._num_old = flush_s, max_bytes, num_old
        self._head = _line({"format": FORMAT, "version": VERSION, "clock_s": clock(), "unix_s": epoch()})
        self._rows: list[Row | bytes] = []  # bytes: a line of the file that could not be written yet
        self._file, self._failed = -1, False
        self._writer: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def append(self, row: Row) -> None:
        """Add a row to the buffer that the next flush writes."""
        if len(self._rows) >= MAX_BUFFERED_ROWS:
            self.lost += len(self._rows) // 2
            del self._rows[: len(self._rows) // 2]
        self._rows.append(row)

    async def __aenter__(self) -> Self:
        """Open the file. Raises OutputError if it is not writable."""
        try:
            self._open()
        except OSError as error:
            raise OutputError(f"the journal {self.path} must be a writable file: {error.strerror or error}") from error
        self._writer = ThreadPoolExecutor(1, "journal")
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._stop.set()
            await self._task
            await self.flush()
            if self._rows:
                _log.warning("%d rows of the journal %s are lost", self.lost + len(self._rows), self.path)
        if self._writer is not None:
            self._writer.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    async def flush(self) -> None:
        """Write all buffered rows. If that fails, they stay buffered as lines of text, so that another try is cheap."""
        if not self._rows or self._writer is None:
            return
        rows, self._rows = self._rows, []
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._write_rows, rows)
        except OSError as error:
            self._rows = rows + self._rows
            if not self._failed:  # not at each attempt, as these follow twice a second
                _log.warning("the journal %s cannot be written: %s", self.path, error.strerror or error)
            self._failed = True
        else:
            self._failed = False
            self.written += len(rows)

    async def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._flush_s)
            await self.flush()

    # The methods below run on the writer's thread.

    def _open(self) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            size = os.fstat(file).st_size
            is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            _write(file, (b"\n" if is_torn else b"") + self._head)
        except OSError:
            os.close(file)
            raise
        self._file = file

    def _write_rows(self, rows: list[Row | bytes]) -> None:
        lines = [row if isinstance(row, bytes) else _line(as_dict(row)) for row in rows]
        rows[:] = lines
        if self._file < 0:
            self._open()
        elif os.fstat(self._file).st_size > self._max_bytes:
            self._rotate()
        size = os.fstat(self._file).st_size
        try:
            _write(self._file, b"".join(lines))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)  # the next flush writes all of these rows again
            raise

    def _rotate(self) -> None:
        """Rename the files and open a new one. If that fails, no file is open until the next rows come."""
        file, self._file = self._file, -1  # the OS may reuse the descriptor as soon as it is closed
        os.close(file)
        names = [self.path, *(Path(f"{self.path}.{i}") for i in range(1, self._num_old + 1))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if self._num_old == 0:
            self.path.unlink(missing_ok=True)
        self._open()


def read(path: Path | str) -> Iterator[tuple[int, Row]]:
    """Yield (number of the run, row) for each request of a journal, in the order in which the requests ended.

    A run is one start of the gateway. Times are seconds since 1970. Raises InputError if the file is no journal.
    """
    return _runs([Path(path)])


def read_all(path: Path | str) -> Iterator[tuple[int, Row]]:
    """Yield (number of the run, row) as ``read`` does, from the older files (NAME.2, NAME.1), then from the journal."""
    older = (Path(f"{path}.{i}") for i in range(MAX_OLD_FILES, 0, -1))
    return _runs([*(file for file in older if file.exists()), Path(path)])


def _runs(files: Iterable[Path]) -> Iterator[tuple[int, Row]]:
    run, head = 0, b""
    for file in files:
        is_journal, shift_s = False, math.nan
        for line, values in _lines(file):
            if values.get("format") == FORMAT:
                run += is_journal or line != head  # a rotated file starts with the head of the run that it continues
                is_journal, head, shift_s = True, line, math.nan  # if NaN stays, all rows of the run are skipped
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    shift_s = float(values["unix_s"]) - float(values["clock_s"])
                continue
            if not is_journal:
                break
            with contextlib.suppress(KeyError, TypeError, ValueError):
                row = from_dict(values)
                times = {name: getattr(row, name) + shift_s for name in _TIMES}
                if math.isfinite(times["arrival_s"]):
                    yield run, replace(row, **times)
        if not is_journal:
            rule = f"must be a journal of `lengthwise serve` (with {FORMAT!r} in its first line)"
            raise InputError(f"{file} {rule}; it is none")


def _lines(file: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    try:
        with file.open("rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    values = json.loads(line)
                    if isinstance(values, dict):
                        yield line, values
    except OSError as error:
        raise InputError(f"the journal {file} must be a readable file: {error.strerror or error}") from error


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
