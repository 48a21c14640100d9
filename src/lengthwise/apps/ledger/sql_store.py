"""The ledger's statements, told once for all stores; what stores say in their own way is a ``Dialect``.

States stand as numbers, so that partial indices can be chosen: 0 waiting, 1 ready, 2 leased, 3 done, 4 skipped, 5 dead,
6 blocked.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lengthwise.schema.app import Tasks
from lengthwise.schema.errors import InputError, InternalError, OutputError

Ints = npt.NDArray[np.int64]
Chunk = list[tuple[int, ...]]
CHUNK = 20_000

TASK_COLUMNS = ("task", "call", "model", "state", "pending", "fence")
EDGE_COLUMNS = ("parent", "child")


def edges(tasks: Tasks) -> tuple[Ints, Ints]:
    """(parents, children), each pair once, in the order of parents: a table in the order of its key only grows."""
    children = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    pairs = np.unique(tasks.parent * max(1, len(tasks)) + children)
    return pairs // max(1, len(tasks)), pairs % max(1, len(tasks))


def task_rows(tasks: Tasks, children: Ints, fence: int) -> Iterator[Chunk]:
    """Rows of ``TASK_COLUMNS``: ready (1) without parents, else waiting (0) for so many.

    Args:
        tasks: All of them.
        children: Of the pairs of ``edges``.
        fence: Above those of all leases that there were, so that no old one fits a new task.
    """
    pending = np.bincount(children, minlength=len(tasks))
    for first in range(0, len(tasks), CHUNK):
        part = slice(first, min(first + CHUNK, len(tasks)))
        size = part.stop - part.start
        columns = (np.arange(part.start, part.stop), tasks.call[part], tasks.model[part], pending[part] == 0)
        numbers = [column.astype(np.int64).tolist() for column in (*columns, pending[part])]
        yield list(zip(*numbers, [fence] * size, strict=True))


def edge_rows(parents: Ints, children: Ints) -> Iterator[Chunk]:
    """Rows of ``EDGE_COLUMNS``."""
    for first in range(0, len(parents), CHUNK):
        part = slice(first, first + CHUNK)
        yield list(zip(parents[part].tolist(), children[part].tolist(), strict=True))


Work = TypeVar("Work")


@dataclass(frozen=True)
class Dialect:
    """What differs.

    Attributes:
        numbers: After a column: is one of a list of numbers.
        texts: The same of texts.
        lock: Holds rows that were read until the end of the transaction.
        skip: The same, leaving out what another holds.
        answers: Inserts into ``results``, by column; the first of a key stays.
        partials: Inserts into ``partials``, by column, unless the key has a result; the last of a key stays.
        metadata: Inserts into ``metadata``; the last of a name stays.
        moving: Ends leases, by the columns of ``Writes.moved``.
        empty: Empties tasks and edges.
        laid_out: What to do when tasks were inserted.
        counts: (call, state, tasks).
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
    """Inside one transaction."""

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a statement returns, all of it."""
        ...

    def changed(self, statement: str, *values: Any) -> int:
        """How many rows a statement changed."""
        ...

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """One of the dialect's statements by column, for many rows."""
        ...

    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Fills a table with numbers."""
        ...


class Store(Protocol):
    """A database: transactions that happen whole or not at all, and errors in the words of lengthwise."""

    dialect: Dialect
    where: str

    def write(self, work: Callable[[Session], Work]) -> Work:
        """What the work returns, when all that it changed is durable. It may be called again from its start."""
        ...

    def read(self, work: Callable[[Session], Work]) -> Work:
        """What the work returns; it holds nobody up."""
        ...

    def close(self) -> None:
        """Lets go."""
        ...


_LEASE = """
WITH picked AS MATERIALIZED (
    SELECT task FROM tasks WHERE model = ? AND state = 1 AND not_before_s <= ? ORDER BY task LIMIT ? {skip})
UPDATE tasks SET state = 2, fence = fence + 1, owner = ?, until_s = ?
WHERE task IN (SELECT task FROM picked) RETURNING task, fence, attempts"""

_BEAT = "UPDATE tasks SET until_s = ? WHERE state = 2 AND owner = ?"

_EXPIRE = """
WITH picked AS MATERIALIZED (SELECT task FROM tasks WHERE state = 2 AND until_s <= ? {skip})
UPDATE tasks SET state = 1, owner = NULL WHERE state = 2 AND task IN (SELECT task FROM picked)"""

_LEASED_TASKS = "SELECT task, fence FROM tasks WHERE state = 2 AND task {numbers} ORDER BY task {lock}"

_CHILDREN = """
SELECT task FROM tasks WHERE task IN (SELECT child FROM edges WHERE parent {numbers}) ORDER BY task {lock}"""

_FREE = """
UPDATE tasks SET pending = pending - freed.parents,
    state = CASE WHEN state = 0 AND pending = freed.parents THEN 1 ELSE state END
FROM (SELECT child, count(*) AS parents FROM edges WHERE parent {numbers} GROUP BY child) AS freed
WHERE tasks.task = freed.child"""

# Behind what is blocked all is blocked already, so that only waiting tasks are gone through.
_BLOCK = """
WITH RECURSIVE behind (task) AS (
    SELECT child FROM edges JOIN tasks ON tasks.task = child WHERE state = 0 AND parent {numbers}
    UNION
    SELECT child FROM behind JOIN edges ON parent = behind.task JOIN tasks ON tasks.task = child WHERE state = 0)
UPDATE tasks SET state = 6 WHERE state = 0 AND task IN (SELECT task FROM behind)"""

_OUTPUTS = """
SELECT task, state, output, finish_reason, prompt_tokens, output_tokens
FROM tasks LEFT JOIN results ON results.key = tasks.key WHERE state IN (3, 4) AND task {numbers}"""

_ROWS = """
SELECT task, state, attempts, tasks.key, error, output, finish_reason, prompt_tokens, output_tokens
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3
WHERE task >= ? ORDER BY task LIMIT ?"""

_LENGTHS = """
SELECT task, state, coalesce(prompt_tokens, 0), coalesce(output_tokens, 0)
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3 WHERE state >= 3 ORDER BY task"""

_SUMS = """
SELECT call, sum(attempts), coalesce(sum(output_tokens), 0)
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3 GROUP BY call ORDER BY call"""

_RESULTS = """
SELECT key, output, finish_reason, prompt_tokens, output_tokens FROM results WHERE key {texts}"""

_PARTIALS = """
SELECT key, output, prompt_ids, output_ids FROM partials
WHERE key {texts} AND NOT EXISTS (SELECT 1 FROM results WHERE results.key = partials.key)"""

_TEMPLATES = {
    "lease": _LEASE,
    "heartbeat": _BEAT,
    "expire": _EXPIRE,
    "reserved": _LEASED_TASKS,
    "children": _CHILDREN,
    "free": _FREE,
    "block": _BLOCK,
    "outputs": _OUTPUTS,
    "rows": _ROWS,
    "lengths": _LENGTHS,
    "sums": _SUMS,
    "results": _RESULTS,
    "partials": _PARTIALS,
    "effort": "DELETE FROM partials WHERE key {texts}",
    "run": "SELECT identity, tasks, fence FROM run {lock}",
    "fence": "SELECT max(fence) FROM tasks",
    "begin": "UPDATE run SET identity = ?, tasks = ?, fence = ?",
    "metadata": "SELECT name, value FROM facts ORDER BY name",
    "discard": "DELETE FROM facts WHERE name {texts}",
}


def statements(dialect: Dialect) -> dict[str, str]:
    """Statements by name, as a store says them."""
    words = {name: getattr(dialect, name) for name in ("numbers", "texts", "lock", "skip")}
    return {name: template.format(**words) for name, template in _TEMPLATES.items()}


def pages(values: Iterable[Any], most: int) -> Iterator[list[Any]]:
    """Lists of at most so many: no statement is told a million values at once."""
    page: list[Any] = []
    for value in values:
        page.append(value)
        if len(page) == most:
            yield page
            page = []
    if page:
        yield page


APPLICATION = 0x6C774C67
"""In the file's head, so that another program's database is not taken for ours: "lwLg"."""
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
    # Answers are appended; only their keys, which are random, are put in order.
    """CREATE TABLE results (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, output BLOB NOT NULL, finish_reason TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL) STRICT""",
    """CREATE TABLE partials (
        key TEXT PRIMARY KEY, output BLOB NOT NULL, prompt_ids BLOB NOT NULL, output_ids BLOB NOT NULL) STRICT""",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT",
    # Counts are kept along, so that looking at a run of a million tasks costs nothing.
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


_OLDEST = (3, 37, 0)  # STRICT tables; RETURNING and UPDATE FROM are older
_NO_LEDGER = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CACHE_KIB = 64 * 1024
_LOG_PAGES = 4_000
_LOG_BYTES = 64 * 1024 * 1024


class SqliteStore:
    """A file, with its log beside it (``-wal``, ``-shm``): memory that all who have it open must share."""

    dialect = DIALECT

    def __init__(self, path: Path, *, read_only: bool, timeout_s: float) -> None:
        self.where, self._read_only, self._timeout_s = str(path), read_only, timeout_s
        self._lock = threading.RLock()
        if sqlite3.sqlite_version_info < _OLDEST:
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
        """What the work returns, when all that it changed is on the disk."""
        if self._read_only:
            raise InputError(f"{self.where} was opened to be read: open it without read_only to change it")
        with self._lock, self._report():
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
        with self._lock, self._report():
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
            raise InputError(f"{self.where} is no ledger, but the database of another program: name another file")
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
        for _ in range(max(1, int(self._timeout_s / 0.05))):
            with contextlib.suppress(sqlite3.OperationalError):
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            time.sleep(0.05)
        self._connection.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def _report(self) -> Iterator[None]:
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
        if code in _BUSY_CODES:
            return OutputError(
                f"the ledger {self.where} must be free to be written within {self._timeout_s:g} s; another process "
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


def _connected(path: Path, read_only: bool, timeout_s: float) -> sqlite3.Connection:
    """Autocommit: transactions are begun and ended in words. Threads take turns by a lock of ours."""
    if read_only and not path.exists():
        raise InputError(f"there must be a ledger at {path}; there is no file: start a run first, or name its place")
    try:
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot keep a ledger in {path}: {error.strerror or error}") from error
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={_mode(path, read_only)}",
        uri=True,
        timeout=timeout_s,
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
