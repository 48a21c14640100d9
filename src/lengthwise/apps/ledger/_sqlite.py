"""The ledger's store in one SQLite file: nothing to install, one machine, any number of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lengthwise.apps.ledger._layout import Chunk
from lengthwise.apps.ledger._sql import Session, Work
from lengthwise.apps.ledger._sqlite_tables import APPLICATION, DIALECT, FORMAT, TABLES
from lengthwise.schema.errors import InputError, InternalError, OutputError

_OLDEST = (3, 37, 0)  # STRICT tables; RETURNING and UPDATE FROM are older
_NO_LEDGER = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_HELD = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CACHE_KIB = 64 * 1024
_LOG_PAGES = 4_000
_LOG_BYTES = 64 * 1024 * 1024


class SqliteStore:
    """A file, with its log beside it (``-wal``, ``-shm``): memory that all who have it open must share."""

    dialect = DIALECT

    def __init__(self, path: Path, *, read_only: bool, patience_s: float) -> None:
        self.where, self._read_only, self._patience_s = str(path), read_only, patience_s
        self._lock = threading.RLock()
        if sqlite3.sqlite_version_info < _OLDEST:
            raise InputError(
                f"a ledger needs SQLite 3.37 or later, this Python has {sqlite3.sqlite_version}: use a newer Python, "
                "or keep the ledger in PostgreSQL (postgresql://...)"
            )
        with self._told():
            self._connection = _connected(path, read_only, patience_s)
        try:
            with self._told():
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def write(self, work: Callable[[Session], Work]) -> Work:
        """What the work returns, when all that it changed is on the disk."""
        if self._read_only:
            raise InputError(f"{self.where} was opened to be read: open it without read_only to change it")
        with self._lock, self._told():
            # Held from the start: a reader that turns writer could find that another has written meanwhile.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                done = work(SqliteSession(self._connection))
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            return done

    def read(self, work: Callable[[Session], Work]) -> Work:
        """What the work returns."""
        with self._lock, self._told():
            return work(SqliteSession(self._connection))

    def close(self) -> None:
        """Lets go of the file."""
        with self._lock:
            self._connection.close()

    def _prepare(self) -> None:
        """Makes the tables, or checks that what stands there is ours; then sets how it is written."""
        if self._empty() and not self._read_only:
            self._create()
        self._check()
        if not self._read_only:
            self._set_log()
            # FULL flushes the log at every commit: NORMAL survives a kill, but not a power cut.
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            self._connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        self._connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")

    def _create(self) -> None:
        """All or nothing, once, whoever else opens the file at the same moment."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            if self._empty():
                for statement in TABLES:
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA application_id = {APPLICATION}")
                self._connection.execute(f"PRAGMA user_version = {FORMAT}")
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _check(self) -> None:
        if self._empty():
            raise InputError(
                f"there must be a ledger in {self.where}; it is empty: a run that has just begun makes it in a moment"
            )
        if self._pragma("application_id") != APPLICATION:
            raise InputError(
                f"{self.where} is no ledger, but the database of another program: name another file"
            )
        if (found := self._pragma("user_version")) > FORMAT:
            raise InputError(
                f"{self.where} has format {found}, this lengthwise knows up to {FORMAT}: install a newer "
                "lengthwise, or name another file"
            )

    def _empty(self) -> bool:
        return not (self._pragma("schema_version") or self._pragma("user_version"))

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _set_log(self) -> None:
        """A write-ahead log: readers and a writer do not wait for each other.

        SQLite does not wait here for others who set it at the same moment, so that it is asked again.
        """
        for _ in range(max(1, int(self._patience_s / 0.05))):
            with contextlib.suppress(sqlite3.OperationalError):
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            time.sleep(0.05)
        self._connection.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of files and of SQLite in the words of lengthwise."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a closed ledger: no fault of the file
        except sqlite3.IntegrityError as error:
            raise InternalError(f"a law of the ledger {self.where} would be broken: {error}") from error
        except sqlite3.DatabaseError as error:
            raise self._error(error) from error

    def _error(self, error: sqlite3.DatabaseError) -> InputError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _NO_LEDGER:
            return InputError(f"{self.where} is no ledger, or damaged ({error}): name another file")
        if code in _HELD:
            return OutputError(
                f"the ledger {self.where} must be free to be written within {self._patience_s:g} s; another process "
                "holds it for longer: end that process, or go on later with --resume (what was recorded stays)"
            )
        return OutputError(
            f"cannot keep the ledger in {self.where}: {error}; what was recorded before stays: make room or mend "
            "the disk, and go on with --resume"
        )


class SqliteSession:
    """Inside one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a statement returns, all of it."""
        return self._connection.execute(statement, _plain(values)).fetchall()

    def changed(self, statement: str, *values: Any) -> int:
        """How many rows a statement changed."""
        self._connection.execute(statement, _plain(values))
        # A cursor's own rowcount is -1 after WITH ... UPDATE.
        return int(self._connection.execute("SELECT changes()").fetchone()[0])

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """A statement for many rows."""
        self._connection.executemany(statement, rows)

    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Fills a table."""
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        for chunk in chunks:
            self._connection.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", chunk)  # noqa: S608


def _plain(values: tuple[Any, ...]) -> list[Any]:
    """SQLite knows no lists; as JSON they are one value, of any length."""
    return [json.dumps(value) if isinstance(value, list) else value for value in values]


def _connected(path: Path, read_only: bool, patience_s: float) -> sqlite3.Connection:
    """Autocommit: transactions are begun and ended in words. Threads take turns by a lock of ours."""
    if read_only and not path.exists():
        raise InputError(
            f"there must be a ledger at {path}; there is no file: start a run first, or name its place"
        )
    try:
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot keep a ledger in {path}: {error.strerror or error}") from error
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={_mode(path, read_only)}",
        uri=True,
        timeout=patience_s,
        isolation_level=None,
        check_same_thread=False,
    )


def _mode(path: Path, read_only: bool) -> str:
    if not read_only:
        return "rwc"
    # A reader, too, keeps its place in files beside the ledger. Where it may not make them, a ledger without a
    # log is one that nobody has open, and can be read as it is.
    alone = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return "ro&immutable=1" if alone else "ro"
