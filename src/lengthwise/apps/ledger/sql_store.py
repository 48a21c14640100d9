"""The ledger's SQL statements, the interface of stores, and the store in an SQLite file.

Statements are the same for all stores except for the parts of a ``Dialect``. States are literal numbers, so that the
planner can use partial indices: 0 waiting, 1 ready, 2 leased, 3 done, 4 skipped, 5 dead, 6 blocked.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from lengthwise.schema.app import Tasks
from lengthwise.schema.errors import InputError, InternalError, OutputError

Chunk = list[tuple[int, ...]]
CHUNK = 20_000
Work = TypeVar("Work")


@dataclass(frozen=True)
class Dialect:
    """The parts of statements that differ between stores.

    Attributes:
        numbers: Condition after a column: in a list of numbers.
        texts: The same for texts.
        lock: Locks selected rows until the end of the transaction.
        skip: The same, without the rows that another transaction has locked.
        answers: Inserts rows of ``results``; the first of a key stays.
        partials: Inserts rows of ``partials``, unless the key has a result; the last of a key stays.
        metadata: Inserts rows of ``facts``; the last of a name stays.
        moving: Ends leases: (state, whether it counts as an attempt, key, error, not before, task).
        empty: Removes all tasks and edges.
        laid_out: Runs after tasks were inserted.
        counts: Selects (call, state, tasks).
    """

    numbers: str
    texts: str
    lock: str
    skip: str
    answers: str
    partials: str
    metadata: str
    moving: str
    empty: tuple[str, ...]
    laid_out: tuple[str, ...]
    counts: str


class Session(Protocol):
    """A transaction."""

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a statement."""
        ...

    def changed(self, statement: str, *values: Any) -> int:
        """Run a statement and return the number of rows that it changed."""
        ...

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """Run one of the dialect's insertions for many rows."""
        ...

    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Fill a table with numbers."""
        ...


class Store(Protocol):
    """A database with atomic transactions; its errors are lengthwise's. ``where`` is its place, for messages."""

    dialect: Dialect
    where: str

    def write(self, work: Callable[[Session], Work]) -> Work:
        """Return the result of ``work`` once its changes are durable; ``work`` may be called more than once."""
        ...

    def read(self, work: Callable[[Session], Work]) -> Work:
        """Return the result of ``work`` without blocking writers."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def load_tasks(session: Session, tasks: Tasks, fence: int) -> None:
    """Insert tasks and their edges: ready (1) without parents, else waiting (0); fences start at ``fence``."""
    n = len(tasks)
    # Each pair once and in the order of the key: an index that only grows is filled quickly.
    pairs = np.unique(tasks.parent * max(1, n) + np.repeat(np.arange(n), np.diff(tasks.parent_start)))
    parents, children = np.divmod(pairs, max(1, n))
    pending = np.bincount(children, minlength=n)
    columns = [np.arange(n), tasks.call, tasks.model, pending == 0, pending, np.full(n, fence)]
    for table, names, values in (
        ("tasks", ("task", "call", "model", "state", "pending", "fence"), columns),
        ("edges", ("parent", "child"), [parents, children]),
    ):
        chunks = (
            list(zip(*(column[first : first + CHUNK].astype(np.int64).tolist() for column in values), strict=True))
            for first in range(0, len(values[0]), CHUNK)
        )
        session.load(table, names, chunks)


_TEMPLATES = {
    "lease": """
WITH picked AS MATERIALIZED (
    SELECT task FROM tasks WHERE model = ? AND state = 1 AND not_before_s <= ? ORDER BY task LIMIT ? {skip})
UPDATE tasks SET state = 2, fence = fence + 1, owner = ?, until_s = ?
WHERE task IN (SELECT task FROM picked) RETURNING task, fence, attempts""",
    "heartbeat": "UPDATE tasks SET until_s = ? WHERE state = 2 AND owner = ?",
    "expire": """
WITH picked AS MATERIALIZED (SELECT task FROM tasks WHERE state = 2 AND until_s <= ? {skip})
UPDATE tasks SET state = 1, owner = NULL WHERE state = 2 AND task IN (SELECT task FROM picked)""",
    "reserved": "SELECT task, fence FROM tasks WHERE state = 2 AND task {numbers} ORDER BY task {lock}",
    "children": """
SELECT task FROM tasks WHERE task IN (SELECT child FROM edges WHERE parent {numbers}) ORDER BY task {lock}""",
    "free": """
UPDATE tasks SET pending = pending - freed.parents,
    state = CASE WHEN state = 0 AND pending = freed.parents THEN 1 ELSE state END
FROM (SELECT child, count(*) AS parents FROM edges WHERE parent {numbers} GROUP BY child) AS freed
WHERE tasks.task = freed.child""",
    # All tasks behind a blocked one are blocked already: the recursion needs to follow waiting tasks only.
    "block": """
WITH RECURSIVE behind (task) AS (
    SELECT child FROM edges JOIN tasks ON tasks.task = child WHERE state = 0 AND parent {numbers}
    UNION
    SELECT child FROM behind JOIN edges ON parent = behind.task JOIN tasks ON tasks.task = child WHERE state = 0)
UPDATE tasks SET state = 6 WHERE state = 0 AND task IN (SELECT task FROM behind)""",
    "outputs": """
SELECT task, state, output, finish_reason, prompt_tokens, output_tokens
FROM tasks LEFT JOIN results ON results.key = tasks.key WHERE state IN (3, 4) AND task {numbers}""",
    "rows": """
SELECT task, state, attempts, tasks.key, error, output, finish_reason, prompt_tokens, output_tokens
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3
WHERE task >= ? ORDER BY task LIMIT ?""",
    "lengths": """
SELECT task, state, coalesce(prompt_tokens, 0), coalesce(output_tokens, 0)
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3 WHERE state >= 3 ORDER BY task""",
    "sums": """
SELECT call, sum(attempts), coalesce(sum(output_tokens), 0)
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3 GROUP BY call ORDER BY call""",
    "results": "SELECT key, output, finish_reason, prompt_tokens, output_tokens FROM results WHERE key {texts}",
    "partials": """
SELECT key, output, prompt_ids, output_ids FROM partials
WHERE key {texts} AND NOT EXISTS (SELECT 1 FROM results WHERE results.key = partials.key)""",
    "effort": "DELETE FROM partials WHERE key {texts}",
    "run": "SELECT identity, tasks, fence FROM run {lock}",
    "fence": "SELECT max(fence) FROM tasks",
    "begin": "UPDATE run SET identity = ?, tasks = ?, fence = ?",
    "metadata": "SELECT name, value FROM facts ORDER BY name",
    "discard": "DELETE FROM facts WHERE name {texts}",
}


def statements(dialect: Dialect) -> dict[str, str]:
    """Return the statements by name, in a dialect."""
    words = {name: getattr(dialect, name) for name in ("numbers", "texts", "lock", "skip")}
    return {name: template.format(**words) for name, template in _TEMPLATES.items()}


APPLICATION = 0x6C774C67
"""Marks a ledger in the file's header: "lwLg"."""
FORMAT = 1

TABLES = (
    "CREATE TABLE run (identity TEXT NOT NULL, tasks INTEGER NOT NULL, fence INTEGER NOT NULL) STRICT",
    "INSERT INTO run VALUES ('', 0, 0)",
    """CREATE TABLE tasks (
        task INTEGER PRIMARY KEY, call INTEGER NOT NULL, model INTEGER NOT NULL,
        state INTEGER NOT NULL CHECK (state BETWEEN 0 AND 6), pending INTEGER NOT NULL CHECK (pending >= 0),
        fence INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, not_before_s REAL NOT NULL DEFAULT 0,
        until_s REAL NOT NULL DEFAULT 0, owner TEXT, key TEXT, error BLOB) STRICT""",
    "CREATE INDEX ready ON tasks (model, task) WHERE state = 1",
    "CREATE INDEX leased ON tasks (owner) WHERE state = 2",
    """CREATE TABLE edges (parent INTEGER NOT NULL, child INTEGER NOT NULL, PRIMARY KEY (parent, child))
        STRICT, WITHOUT ROWID""",
    # Outputs are appended; only the index of their random keys is sorted.
    """CREATE TABLE results (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, output BLOB NOT NULL, finish_reason TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL) STRICT""",
    """CREATE TABLE partials (
        key TEXT PRIMARY KEY, output BLOB NOT NULL, prompt_ids BLOB NOT NULL, output_ids BLOB NOT NULL) STRICT""",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT",
    # Counts are updated by a trigger, so that reading them costs nothing for a million tasks.
    """CREATE TABLE tally (
        call INTEGER NOT NULL, state INTEGER NOT NULL, tasks INTEGER NOT NULL CHECK (tasks >= 0),
        PRIMARY KEY (call, state)) STRICT, WITHOUT ROWID""",
    """CREATE TRIGGER moved AFTER UPDATE OF state ON tasks WHEN new.state <> old.state BEGIN
        UPDATE tally SET tasks = tasks - 1 WHERE call = old.call AND state = old.state;
        UPDATE tally SET tasks = tasks + 1 WHERE call = new.call AND state = new.state;
    END""",
)

DIALECT = Dialect(
    numbers="IN (SELECT value FROM json_each(?))",
    texts="IN (SELECT value FROM json_each(?))",
    lock="",
    skip="",
    answers="""INSERT INTO results (key, output, finish_reason, prompt_tokens, output_tokens) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT (key) DO NOTHING""",
    partials="""INSERT INTO partials (key, output, prompt_ids, output_ids) SELECT ?1, ?2, ?3, ?4
        WHERE NOT EXISTS (SELECT 1 FROM results WHERE key = ?1)
        ON CONFLICT (key) DO UPDATE
        SET output = excluded.output, prompt_ids = excluded.prompt_ids, output_ids = excluded.output_ids""",
    metadata="INSERT INTO facts (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
    moving="""UPDATE tasks SET state = ?1, attempts = attempts + ?2, key = ?3, not_before_s = ?5, owner = NULL,
        error = CASE WHEN ?1 = 1 THEN coalesce(?4, error) ELSE ?4 END WHERE task = ?6 AND state = 2""",
    empty=("DELETE FROM edges", "DELETE FROM tasks", "DELETE FROM tally"),
    laid_out=(
        """INSERT INTO tally (call, state, tasks)
        WITH states (state) AS (VALUES (0), (1), (2), (3), (4), (5), (6)),
            counted AS MATERIALIZED (SELECT call, state, count(*) AS tasks FROM tasks GROUP BY call, state),
            calls AS (SELECT DISTINCT call FROM counted)
        SELECT calls.call, states.state, coalesce(counted.tasks, 0)
        FROM calls CROSS JOIN states LEFT JOIN counted ON counted.call = calls.call AND counted.state = states.state""",
    ),
    counts="SELECT call, state, tasks FROM tally WHERE tasks > 0",
)


_MIN_VERSION = (3, 37, 0)  # STRICT tables; RETURNING and UPDATE FROM are older
_NO_LEDGER = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CACHE_KIB = 64 * 1024
_LOG_PAGES = 4_000
_LOG_BYTES = 64 * 1024 * 1024


class SqliteStore:
    """An SQLite file with a write-ahead log (``-wal``, ``-shm``), which all processes must share on one machine."""

    dialect = DIALECT

    def __init__(self, path: Path, *, read_only: bool, timeout_s: float) -> None:
        self.where, self._read_only, self._timeout_s = str(path), read_only, timeout_s
        self._lock = threading.RLock()
        if sqlite3.sqlite_version_info < _MIN_VERSION:
            raise InputError(
                f"a ledger needs SQLite 3.37 or later, this Python has {sqlite3.sqlite_version}: use a newer Python, "
                "or keep the ledger in PostgreSQL (postgresql://...)"
            )
        with self._report():
            self._connection = _connected(path, read_only, timeout_s)
        try:
            with self._report():
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def write(self, work: Callable[[Session], Work]) -> Work:
        """Return the result of ``work`` once its changes are durable."""
        if self._read_only:
            raise InputError(f"{self.where} was opened to be read: open it without read_only to change it")
        with self._lock, self._report(), self._transaction():
            return work(SqliteSession(self._connection))

    def read(self, work: Callable[[Session], Work]) -> Work:
        """Return the result of ``work``."""
        with self._lock, self._report():
            return work(SqliteSession(self._connection))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def _prepare(self) -> None:
        """Create the tables or check them, and set the log."""
        execute = self._connection.execute
        if self._is_empty() and not self._read_only:
            with self._transaction():
                if self._is_empty():  # another process may have created them meanwhile
                    for statement in TABLES:
                        execute(statement)
                    execute(f"PRAGMA application_id = {APPLICATION}")
                    execute(f"PRAGMA user_version = {FORMAT}")
        self._check()
        if not self._read_only:
            # SQLite does not wait here for another process that sets the log at the same moment.
            for _ in range(max(1, int(self._timeout_s / 0.05))):
                with contextlib.suppress(sqlite3.OperationalError):
                    execute("PRAGMA journal_mode = WAL")
                    break
                time.sleep(0.05)
            else:
                execute("PRAGMA journal_mode = WAL")
            # FULL flushes the log at every commit: NORMAL survives a kill, but not a power failure.
            execute("PRAGMA synchronous = FULL")
            execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        execute(f"PRAGMA cache_size = -{_CACHE_KIB}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # IMMEDIATE: a transaction that reads first and then writes fails if another wrote in between.
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _check(self) -> None:
        if self._is_empty():
            raise InputError(
                f"there must be a ledger in {self.where}; it is empty: a run that has just begun makes it in a moment"
            )
        if self._pragma("application_id") != APPLICATION:
            raise InputError(f"{self.where} is no ledger, but the database of another program: name another file")
        if (found := self._pragma("user_version")) > FORMAT:
            raise InputError(
                f"{self.where} has format {found}, this lengthwise knows up to {FORMAT}: install a newer "
                "lengthwise, or name another file"
            )

    def _is_empty(self) -> bool:
        return not (self._pragma("schema_version") or self._pragma("user_version"))

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def _report(self) -> Iterator[None]:
        """Raise errors of files and of SQLite as those of lengthwise."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a closed ledger: not an error of the file
        except sqlite3.IntegrityError as error:
            raise InternalError(f"a law of the ledger {self.where} would be broken: {error}") from error
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _NO_LEDGER:
                raise InputError(f"{self.where} is no ledger, or damaged ({error}): name another file") from error
            if code in _BUSY_CODES:
                raise OutputError(
                    f"the ledger {self.where} must be free to be written within {self._timeout_s:g} s; another process "
                    "holds it for longer: end that process, or go on later with --resume (what was recorded stays)"
                ) from error
            raise OutputError(
                f"cannot keep the ledger in {self.where}: {error}; what was recorded before stays: make room or mend "
                "the disk, and go on with --resume"
            ) from error


class SqliteSession:
    """A transaction in SQLite."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a statement; lists become JSON, one value of any length."""
        plain = [json.dumps(value) if isinstance(value, list) else value for value in values]
        return self._connection.execute(statement, plain).fetchall()

    def changed(self, statement: str, *values: Any) -> int:
        """Run a statement and return the number of rows that it changed."""
        self.rows(statement, *values)
        # A cursor's own rowcount is -1 after WITH ... UPDATE.
        return int(self._connection.execute("SELECT changes()").fetchone()[0])

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """Run an insertion for many rows."""
        self._connection.executemany(statement, rows)

    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Fill a table with numbers."""
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        for chunk in chunks:
            self._connection.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", chunk)  # noqa: S608


def _connected(path: Path, read_only: bool, timeout_s: float) -> sqlite3.Connection:
    """Connect in autocommit mode; the store's lock serializes threads."""
    if read_only and not path.exists():
        raise InputError(f"there must be a ledger at {path}; there is no file: start a run first, or name its place")
    mode = "rwc"
    if read_only:
        # A reader also writes to the files of the log. Where it may not, and there is no log, no process has the ledger
        # open: it can be read as immutable.
        has_log = path.with_name(f"{path.name}-wal").exists()
        mode = "ro" if has_log or os.access(path.parent, os.W_OK) else "ro&immutable=1"
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot keep a ledger in {path}: {error.strerror or error}") from error
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
