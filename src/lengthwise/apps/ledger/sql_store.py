"""SQL statements of the ledger, the interface of its databases, and the store in an SQLite file.

The statements are the same for all databases except for some words. States are literal numbers, so that the database's
planner can use partial indices: 0 waiting, 1 ready, 2 leased, 3 done, 4 skipped, 5 dead, 6 blocked.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from lengthwise.schema.app import Tasks
from lengthwise.schema.errors import InputError, InternalError, OutputError

Chunk = list[tuple[int, ...]]
CHUNK = 20_000
FORMAT = 1
Work = TypeVar("Work")

TABLES = (
    "CREATE TABLE run (identity {text} NOT NULL, tasks {integer} NOT NULL, fence {integer} NOT NULL) {strict}",
    "INSERT INTO run VALUES ('', 0, 0)",
    """CREATE TABLE tasks (
        task {integer} PRIMARY KEY, call {integer} NOT NULL, model {integer} NOT NULL,
        state {integer} NOT NULL CHECK (state BETWEEN 0 AND 6), pending {integer} NOT NULL CHECK (pending >= 0),
        fence {integer} NOT NULL, attempts {integer} NOT NULL DEFAULT 0, not_before_s {real} NOT NULL DEFAULT 0,
        until_s {real} NOT NULL DEFAULT 0, owner {text}, key {text}, error {blob}) {strict}""",
    "CREATE INDEX ready ON tasks (model, task) WHERE state = 1",
    "CREATE INDEX leased ON tasks (owner) WHERE state = 2",
    "CREATE TABLE edges (parent {integer} NOT NULL, child {integer} NOT NULL, PRIMARY KEY (parent, child)) {sorted}",
    """CREATE TABLE results (
        {key}, output {blob} NOT NULL, finish_reason {text} NOT NULL, prompt_tokens {integer} NOT NULL,
        output_tokens {integer} NOT NULL) {strict}""",
    """CREATE TABLE partials (
        key {text} PRIMARY KEY, output {blob} NOT NULL, prompt_ids {blob} NOT NULL,
        output_ids {blob} NOT NULL) {strict}""",
    "CREATE TABLE facts (name {text} PRIMARY KEY, value {blob} NOT NULL) {strict}",
)

_STATEMENTS = {
    "lease": """
WITH picked AS MATERIALIZED (
    SELECT task FROM tasks WHERE model = ? AND state = 1 AND not_before_s <= ? ORDER BY task LIMIT ? {skip})
UPDATE tasks SET state = 2, fence = fence + 1, owner = ?, until_s = ?
WHERE task IN (SELECT task FROM picked) RETURNING task, fence, attempts""",
    "heartbeat": "UPDATE tasks SET until_s = ? WHERE state = 2 AND owner = ?",
    "expire": """
WITH picked AS MATERIALIZED (SELECT task FROM tasks WHERE state = 2 AND until_s <= ? {skip})
UPDATE tasks SET state = 1, owner = NULL WHERE state = 2 AND task IN (SELECT task FROM picked)""",
    "leased": "SELECT task, fence FROM tasks WHERE state = 2 AND task {numbers} ORDER BY task {lock}",
    "children": """
SELECT task FROM tasks WHERE task IN (SELECT child FROM edges WHERE parent {numbers}) ORDER BY task {lock}""",
    "free_children": """
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
    "drop_partials": "DELETE FROM partials WHERE key {texts}",
    "run": "SELECT identity, tasks, fence FROM run {lock}",
    "fence": "SELECT max(fence) FROM tasks",
    "set_run": "UPDATE run SET identity = ?, tasks = ?, fence = ?",
    "counts": "SELECT call, state, {counts}",
    "metadata": "SELECT name, value FROM facts ORDER BY name",
    "remove_metadata": "DELETE FROM facts WHERE name {texts}",
}

_BATCHES = {
    "add_results": (
        "key text, output blob, finish_reason text, prompt_tokens integer, output_tokens integer",
        """INSERT INTO results (key, output, finish_reason, prompt_tokens, output_tokens)
        SELECT * FROM {came} WHERE true ON CONFLICT (key) DO NOTHING""",
    ),
    "save_partials": (
        "key text, output blob, prompt_ids blob, output_ids blob",
        """INSERT INTO partials (key, output, prompt_ids, output_ids)
        SELECT * FROM {came} WHERE NOT EXISTS (SELECT 1 FROM results WHERE results.key = came.key)
        ON CONFLICT (key) DO UPDATE
        SET output = excluded.output, prompt_ids = excluded.prompt_ids, output_ids = excluded.output_ids""",
    ),
    "set_metadata": (
        "name text, value blob",
        """INSERT INTO facts (name, value) SELECT * FROM {came} WHERE true
        ON CONFLICT (name) DO UPDATE SET value = excluded.value""",
    ),
    "end_leases": (
        "state integer, counts integer, key text, error blob, not_before_s real, task integer",
        """UPDATE tasks SET state = came.state, attempts = attempts + came.counts, key = came.key,
        not_before_s = came.not_before_s, owner = NULL,
        error = CASE WHEN came.state = 1 THEN coalesce(came.error, tasks.error) ELSE came.error END
        FROM {came} WHERE tasks.task = came.task AND tasks.state = 2""",
    ),
}
"""Statements for a batch of rows, after the columns of these rows with types. ``{came}`` is a table of the rows."""


class Store(ABC):
    """A database with atomic transactions, whose errors are those of lengthwise."""

    # Words of statements that differ between databases, among them ``numbers`` and ``texts`` (conditions that a column
    # is in a list of such values), ``lock`` (locks selected rows until the end of the transaction), and ``skip`` (locks
    # selected rows, but omits rows that another transaction has locked).
    words: ClassVar[Mapping[str, str]]
    empty: ClassVar[tuple[str, ...]]  # statements that delete all tasks and edges
    filled: ClassVar[tuple[str, ...]]  # statements that run after tasks were inserted

    def __init__(self, where: str, *, read_only: bool, timeout_s: float) -> None:
        self.where = where  # place of the database for messages, without a password
        self._read_only, self._timeout_s = read_only, timeout_s
        self._lock = threading.RLock()
        self.tables = [statement.format(**self.words) for statement in TABLES]
        self.sql = {name: statement.format(**self.words) for name, statement in _STATEMENTS.items()}
        for name, (columns, statement) in _BATCHES.items():
            self.sql[name] = statement.format(came=self._batch_sql([column.split() for column in columns.split(", ")]))

    def write(self, work: Callable[[Self], Work]) -> Work:
        """Run ``work`` in a transaction, again after a conflict. Return its result once the changes are durable."""
        if self._read_only:
            raise InputError(f"{self.where} was opened for reading: open it without read_only to change it")
        with self._lock, self._translate_errors():
            return self._transaction(work)

    def read(self, work: Callable[[Self], Work]) -> Work:
        """Run ``work``, which must only read, and return its result. Writers need not wait for it."""
        with self._lock, self._translate_errors():
            return self._transaction(work)

    @abstractmethod
    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return all its rows. Only ``work`` calls this, ``changed``, ``many`` and ``load``."""

    @abstractmethod
    def changed(self, statement: str, *values: Any) -> int:
        """Run a statement and return the number of rows that it changed."""

    @abstractmethod
    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """Run a statement of ``_BATCHES`` on these rows."""

    @abstractmethod
    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Insert rows of integers into a table."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def _transaction(self, work: Callable[[Self], Work]) -> Work: ...
    @abstractmethod
    def _batch_sql(self, columns: list[list[str]]) -> str:
        """Return the SQL of a table ``came`` with the rows of a batch, whose columns have these names and types."""

    @abstractmethod
    def _translate_errors(self) -> AbstractContextManager[None]:
        """Raise errors of the database as errors of lengthwise."""

    def _check_format(self, found: int, another: str) -> None:
        if found > FORMAT:
            raise InputError(
                f"{self.where} has format {found}, this lengthwise knows up to {FORMAT}: install a newer "
                f"lengthwise, or name {another}"
            )

    def _violated_constraint(self, error: Exception) -> InternalError:
        return InternalError(f"the ledger {self.where} would violate a constraint: {error}")

    def _locked_out(self, other: str) -> OutputError:
        return OutputError(
            f"the ledger {self.where} must be free for writing within {self._timeout_s:g} s; another {other} "
            f"has locked it for longer: end that {other}, or continue later with --resume (all records remain)"
        )

    def _failed(self, error: Exception, remedy: str) -> OutputError:
        return OutputError(
            f"cannot use the ledger {self.where}: {str(error).strip()}; recorded outputs remain: {remedy}, and "
            "continue with --resume"
        )


def load_tasks(store: Store, tasks: Tasks, fence: int) -> None:
    """Insert tasks with this fence, and their edges. Tasks without parents are ready (1), all others wait (0)."""
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
        store.load(table, names, chunks)


APPLICATION = 0x6C774C67  # marks a ledger in the file's header: "lwLg"

_TALLY = (
    # Counts are updated by a trigger, so that reading them costs nothing for a million tasks.
    """CREATE TABLE tally (
        call INTEGER NOT NULL, state INTEGER NOT NULL, tasks INTEGER NOT NULL CHECK (tasks >= 0),
        PRIMARY KEY (call, state)) STRICT, WITHOUT ROWID""",
    """CREATE TRIGGER moved AFTER UPDATE OF state ON tasks WHEN new.state <> old.state BEGIN
        UPDATE tally SET tasks = tasks - 1 WHERE call = old.call AND state = old.state;
        UPDATE tally SET tasks = tasks + 1 WHERE call = new.call AND state = new.state;
    END""",
)
_MIN_VERSION = (3, 37, 0)  # STRICT tables; RETURNING and UPDATE FROM are older
_NO_LEDGER = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CACHE_KIB = 64 * 1024
_LOG_PAGES = 4_000
_LOG_BYTES = 64 * 1024 * 1024


class SqliteStore(Store):
    """A store in an SQLite file with a write-ahead log (``-wal``, ``-shm``). All processes must be on one machine."""

    words: ClassVar = {
        "integer": "INTEGER",
        "real": "REAL",
        "text": "TEXT",
        "blob": "BLOB",
        "strict": "STRICT",
        "sorted": "STRICT, WITHOUT ROWID",
        # Outputs are appended; only the index of their random keys is sorted.
        "key": "id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE",
        "numbers": "IN (SELECT value FROM json_each(?))",
        "texts": "IN (SELECT value FROM json_each(?))",
        "lock": "",
        "skip": "",
        "counts": "tasks FROM tally WHERE tasks > 0",
    }
    empty: ClassVar = ("DELETE FROM edges", "DELETE FROM tasks", "DELETE FROM tally")
    filled: ClassVar = (
        """INSERT INTO tally (call, state, tasks)
        WITH states (state) AS (VALUES (0), (1), (2), (3), (4), (5), (6)),
            counted AS MATERIALIZED (SELECT call, state, count(*) AS tasks FROM tasks GROUP BY call, state),
            calls AS (SELECT DISTINCT call FROM counted)
        SELECT calls.call, states.state, coalesce(counted.tasks, 0)
        FROM calls CROSS JOIN states LEFT JOIN counted ON counted.call = calls.call AND counted.state = states.state""",
    )

    def __init__(self, path: Path, *, read_only: bool, timeout_s: float) -> None:
        super().__init__(str(path), read_only=read_only, timeout_s=timeout_s)
        if sqlite3.sqlite_version_info < _MIN_VERSION:
            raise InputError(
                f"a ledger needs SQLite 3.37 or later, this Python has {sqlite3.sqlite_version}: use a newer Python, "
                "or a ledger in PostgreSQL (postgresql://...)"
            )
        with self._translate_errors():
            self.connection = _connected(path, read_only, timeout_s)
        try:
            with self._translate_errors():
                self._prepare()
        except BaseException:
            self.connection.close()
            raise

    def read(self, work: Callable[[Self], Work]) -> Work:
        """Run ``work`` and return the result. Each statement sees the changes that were committed before it ran."""
        with self._lock, self._translate_errors():
            return work(self)

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return all its rows. A list is passed as one JSON value, and can have any length."""
        plain = [json.dumps(value) if isinstance(value, list) else value for value in values]
        return self.connection.execute(statement, plain).fetchall()

    def changed(self, statement: str, *values: Any) -> int:
        """Run a statement and return the number of rows that it changed."""
        self.rows(statement, *values)
        # A cursor's own rowcount is -1 after WITH ... UPDATE.
        return int(self.connection.execute("SELECT changes()").fetchone()[0])

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """Run a statement for many rows."""
        self.connection.executemany(statement, rows)

    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Insert rows of integers into a table."""
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        for chunk in chunks:
            self.connection.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", chunk)  # noqa: S608

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self.connection.close()

    def _transaction(self, work: Callable[[Self], Work]) -> Work:
        # IMMEDIATE: a transaction that reads first and then writes fails if another wrote in between.
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(self)
            self.connection.execute("COMMIT")
            return result
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def _batch_sql(self, columns: list[list[str]]) -> str:
        return f"(SELECT {', '.join(f'? AS {name}' for name, _ in columns)}) AS came"

    def _prepare(self) -> None:
        execute = self.connection.execute
        if self._is_empty() and not self._read_only:
            self._transaction(lambda _: self._create())
        if self._is_empty():
            raise InputError(
                f"there must be a ledger in {self.where}; the file is empty: if a run has just started, wait a moment"
            )
        if self._pragma("application_id") != APPLICATION:
            raise InputError(f"{self.where} is no ledger, but the database of another program: name another file")
        self._check_format(self._pragma("user_version"), "another file")
        if not self._read_only:
            # SQLite does not wait here for another process that sets the journal mode at the same moment.
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

    def _create(self) -> None:
        if self._is_empty():  # another process may have created the tables meanwhile
            marks = (f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {FORMAT}")
            for statement in (*self.tables, *_TALLY, *marks):
                self.connection.execute(statement)

    def _is_empty(self) -> bool:
        return not (self._pragma("schema_version") or self._pragma("user_version"))

    def _pragma(self, name: str) -> int:
        return int(self.connection.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a closed ledger: not an error of the file
        except sqlite3.IntegrityError as error:
            raise self._violated_constraint(error) from error
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _NO_LEDGER:
                raise InputError(f"{self.where} is no ledger, or damaged ({error}): name another file") from error
            if code in _BUSY_CODES:
                raise self._locked_out("process") from error
            raise self._failed(error, "free space or repair the disk") from error


def _connected(path: Path, read_only: bool, timeout_s: float) -> sqlite3.Connection:
    """Return a connection in autocommit mode. Threads share it, because the store's lock serializes them."""
    if read_only and not path.exists():
        raise InputError(f"there must be a ledger at {path}; there is no file: start a run first, or name its file")
    mode = "rwc"
    if read_only:
        # A reader also writes to the log's files. If it may not, and there is no log, no process has the ledger open:
        # it can be read as immutable.
        has_log = path.with_name(f"{path.name}-wal").exists()
        mode = "ro" if has_log or os.access(path.parent, os.W_OK) else "ro&immutable=1"
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot create a ledger in {path}: {error.strerror or error}") from error
    url = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(url, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
