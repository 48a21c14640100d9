"""What was evaluated stays evaluated: an append-only file of results by the content of their question."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Point, Status

FILE = "evaluations.sqlite"
SCHEMA_VERSION = 1
TIMEOUT_S = 30.0
_PAGE = 1_000
_TABLE = "CREATE TABLE evaluations (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value TEXT NOT NULL)"
_NO_STORE = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}

# What decides an evaluation; scenario too, for a key holds its text and not the nouns it becomes. Left out is
# what only tells: cli and report turn numbers into pages; backend runs real engines.
DECIDING = (
    "_jit.py",
    "schema",
    "catalog",
    "workload",
    "cost",
    "policy",
    "predict",
    "theory",
    "engine",
    "metrics",
    "search",
    "config",
    "usecases",
)
_LIBRARIES = ("lengthwise", "numba", "numpy", "scipy")


class Store:
    """Results by key, in one SQLite file that several processes may read and append to at once.

    A result is never changed: the first one stored under a key stays. The file keeps its log beside it
    (``-wal``, ``-shm``), which needs memory shared by all who have it open: one machine, whatever the
    number of its processes. On a cluster only the process that asks writes.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self.path = connection, path

    @classmethod
    def open(cls, folder: Path | str) -> Store:
        """The store of a folder; both are made where they are missing.

        Raises:
            InputError: The file is no store, or a newer lengthwise wrote it.
            OutputError: The folder cannot be written.
        """
        path = Path(folder) / FILE
        with _report(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Autocommit: a put is one statement, and a read leaves no transaction that grows old.
            connection = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None)
        try:
            with _report(path):
                _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
        return cls(connection, path)

    def get(self, key: str) -> dict[str, Any] | None:
        """What is stored under a key, or None."""
        with _report(self.path):
            row = self._connection.execute("SELECT value FROM evaluations WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Stores a value unless the key has one; when this returns it is on the disk.

        Args:
            key: See ``content_key``.
            value: What JSON can hold, NaN and infinities too; floats come back to the last bit.

        Raises:
            OutputError: It cannot be written: a full disk, a read-only file, another's lock that stays.
        """
        text = json.dumps(value, separators=(",", ":"))
        statement = "INSERT INTO evaluations (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING"
        with _report(self.path):
            self._connection.execute(statement, (key, text))

    def __len__(self) -> int:
        with _report(self.path):
            return int(self._connection.execute("SELECT count(*) FROM evaluations").fetchone()[0])

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Keys and values in the order in which they were stored, those that are added meanwhile too."""
        last = 0
        while rows := self._rows_after(last):
            for last, key, value in rows:  # noqa: B007 - read after the loop
                yield key, json.loads(value)

    def _rows_after(self, last: int) -> list[tuple[int, str, str]]:
        """A page: a cursor left open would keep the log from being folded into the file."""
        statement = f"SELECT id, key, value FROM evaluations WHERE id > ? ORDER BY id LIMIT {_PAGE}"  # noqa: S608
        with _report(self.path):
            return self._connection.execute(statement, (last,)).fetchall()

    def close(self) -> None:
        """Lets go of the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Makes the table, or checks that what stands there is ours; then sets how it is written."""
    if (found := _version(connection)) > SCHEMA_VERSION:
        raise InputError(
            f"{path} has format {found}, this lengthwise knows up to {SCHEMA_VERSION}: "
            "install a newer lengthwise, or name another folder"
        )
    if found == 0:
        _create(connection, path)
    _set_journal(connection)
    # FULL flushes the log at every put. NORMAL would survive a kill but not a power cut, and is five times
    # as fast (0.04 ms against 0.2 ms on a cloud disk), which no evaluation of many milliseconds notices.
    connection.execute("PRAGMA synchronous = FULL")


def _create(connection: sqlite3.Connection, path: Path) -> None:
    """All or nothing, once, whoever else is opening the folder at the same moment."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _version(connection) == 0:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise InputError(f"{path} is the database of another program: name another folder")
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _set_journal(connection: sqlite3.Connection) -> None:
    """A write-ahead log: readers and a writer do not wait for each other.

    SQLite does not wait here for others who set it at the same moment, so that it is asked again.
    """
    for _ in range(int(TIMEOUT_S / 0.05)):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            time.sleep(0.05)
        else:
            return
    connection.execute("PRAGMA journal_mode = WAL")


@contextmanager
def _report(path: Path) -> Iterator[None]:
    """Errors of files and of SQLite in the words of lengthwise."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot keep evaluations in {path}: {error.strerror or error}") from error
    except sqlite3.ProgrammingError:
        raise  # a closed store, or another thread's: no fault of the file
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_STORE:
            raise InputError(f"{path} is no store of evaluations, or damaged ({error}): name another folder") from error
        raise OutputError(f"cannot keep evaluations in {path}: {error}") from error


def content_key(*parts: object) -> str:
    """The SHA-256 of the parts' content, in hexadecimal: the same content has the same key anywhere.

    Parts are what JSON knows: mappings (in any order of their keys), lists, tuples (as lists), texts,
    numbers (to the last bit; NaN and the infinities are values; 1 and 1.0 differ), booleans and None.

    Raises:
        TypeError: A part, or a key of a mapping, is of another kind.
    """
    _check_keys(parts)
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_keys(part: object) -> None:
    """JSON would write 1 and "1" alike."""
    if isinstance(part, dict):
        if wrong := [key for key in part if not isinstance(key, str)]:
            raise TypeError(f"the keys of a mapping must be texts, not {wrong[0]!r}")
        part = list(part.values())
    if isinstance(part, list | tuple):
        for item in part:
            _check_keys(item)


@lru_cache
def code_version() -> str:
    """The SHA-256 of all that decides a result: evaluations of another code must not be taken for ours.

    These are the sources and data files of the rooms in ``DECIDING``, and the versions of lengthwise and of
    the libraries that draw (NumPy), compile (Numba) and fit (SciPy).
    """
    root = Path(__file__).parents[1]
    digest = hashlib.sha256(repr([_installed(library) for library in _LIBRARIES]).encode())
    for path in _deciding_files(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _deciding_files(root: Path) -> list[Path]:
    rooms = [root / name for name in DECIDING]
    inside = [path for room in rooms for kind in ("*.py", "*.toml", "*.lwp") for path in room.rglob(kind)]
    return sorted({path for path in [*rooms, *inside] if path.is_file()})


def _installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def to_dict(choice: Choice) -> dict[str, Any]:
    """What JSON can hold of a choice: everything."""
    return dataclasses.asdict(choice) | {"status": str(choice.status)}


def from_dict(report: dict[str, Any]) -> Choice:
    """The choice that ``to_dict`` told of."""
    return Choice(
        **report
        | {
            "status": Status(report["status"]),
            "objective": Estimate(**report["objective"]),
            "capacity_rps": Estimate(**report["capacity_rps"]),
            "at": None if report["at"] is None else _point(report["at"]),
            "points": tuple(_point(point) for point in report["points"]),
        }
    )


def _point(report: dict[str, Any]) -> Point:
    values = {name: Estimate(**estimate) for name, estimate in report["values"].items()}
    return Point(report["rate_rps"], values, report["satisfied"])
