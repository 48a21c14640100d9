"""The database of tenants, keys and usage: an SQLite file or a PostgreSQL database, shared by gateways.

All amounts are integers (costs in billionths of the currency), so that sums are exact. A request is a row of
``lengthwise_open`` from its admission to its end. One transaction deletes this row and adds its tokens to
``lengthwise_usage``, so that each request is counted once, whenever a process is killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lengthwise.schema.errors import InputError, MissingExtraError

Work = TypeVar("Work")
POSTGRES = ("postgresql://", "postgres://")
_TIMEOUT_S = 5.0
INTERRUPT_S = 1.2 * _TIMEOUT_S  # limit of a transaction that PostgreSQL's own limit has not ended
_FORMAT = 1
_LOCK = 0x6C77_7473  # number of PostgreSQL's lock that one transaction at a time has: "lwts"
_TABLES = (
    "CREATE TABLE IF NOT EXISTS lengthwise_version (format BIGINT NOT NULL, changes BIGINT NOT NULL)",
    f"INSERT INTO lengthwise_version SELECT {_FORMAT}, 0 WHERE NOT EXISTS (SELECT 1 FROM lengthwise_version)",  # noqa: S608
    "CREATE TABLE IF NOT EXISTS lengthwise_tenants (name TEXT PRIMARY KEY, settings TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS lengthwise_keys (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE, created_s DOUBLE PRECISION NOT NULL,
        previous_sha256 TEXT NOT NULL, previous_until_s DOUBLE PRECISION NOT NULL, settings TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS lengthwise_usage (
        subject TEXT NOT NULL, period TEXT NOT NULL, start_s BIGINT NOT NULL, requests BIGINT NOT NULL,
        prompt_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, cost BIGINT NOT NULL,
        reserved_tokens BIGINT NOT NULL, reserved_cost BIGINT NOT NULL, PRIMARY KEY (subject, period, start_s))""",
    """CREATE TABLE IF NOT EXISTS lengthwise_open (
        gateway TEXT NOT NULL, number BIGINT NOT NULL, tenant TEXT NOT NULL, key_id TEXT NOT NULL,
        admitted_s DOUBLE PRECISION NOT NULL, tokens BIGINT NOT NULL, cost BIGINT NOT NULL,
        input_price DOUBLE PRECISION NOT NULL, output_price DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (gateway, number))""",
)


class StoreError(Exception):
    """The database cannot be used at the moment. If ``is_unknown``, it may still have committed the changes."""

    def __init__(self, message: str, *, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown


class Transaction:
    """Runs statements of one transaction. Statements have ``?`` as placeholder and no other question mark."""

    def __init__(self, connection: Any, *, postgres: bool) -> None:
        self._connection, self._postgres = connection, postgres

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement. Return its rows, or [] if it has none."""
        cursor = self._connection.execute(self._sql(statement), values)
        return list(cursor.fetchall()) if cursor.description else []

    def many(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run a statement once for each row of values."""
        with contextlib.closing(self._connection.cursor()) as cursor:
            cursor.executemany(self._sql(statement), rows)

    def _sql(self, statement: str) -> str:
        return statement.replace("?", "%s") if self._postgres else statement


class Store:
    """A connection that runs transactions one at a time, also among processes. After an error it connects again."""

    def __init__(self, place: str) -> None:
        self._place, self._postgres = place, place.startswith(POSTGRES)
        self._driver: Any = sqlite3
        self._connection: Any = None
        if self._postgres:
            try:
                import psycopg
            except ImportError as error:
                raise MissingExtraError("a store of tenants in PostgreSQL", "postgres") from error
            self._driver = psycopg
        elif not Path(place).absolute().parent.is_dir():
            raise InputError(f"tenants.store must be a file in an existing folder; it is {place}")

    def prepare(self) -> None:
        """Create missing tables. Raises InputError if a newer lengthwise wrote the database, or StoreError."""

        def work(transaction: Transaction) -> int:
            for statement in _TABLES:
                transaction.rows(statement)
            return int(transaction.rows("SELECT format FROM lengthwise_version")[0][0])

        if (found := self.transaction(work)) > _FORMAT:
            raise InputError(f"the store of tenants has format {found}, and this lengthwise knows up to {_FORMAT}")

    def transaction(self, work: Callable[[Transaction], Work]) -> Work:
        """Return the result of ``work``, whose changes are committed all or not at all. Raises StoreError."""
        try:
            if self._connection is None:
                self._connection = self._connected()
            with self._in_transaction():
                return work(Transaction(self._connection, postgres=self._postgres))
        except self._driver.Error as error:
            is_unknown = self._connection is not None
            self.close()
            raise StoreError(str(error).strip(), is_unknown=is_unknown) from error

    def interrupt(self) -> None:
        """Break the connection of a transaction on another thread, because a hung PostgreSQL never answers."""
        connection = self._connection
        with contextlib.suppress(OSError, self._driver.Error):
            if self._postgres and connection is not None:
                with socket.socket(fileno=os.dup(connection.fileno())) as copy:
                    copy.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(self._driver.Error):
                connection.close()

    @contextlib.contextmanager
    def _in_transaction(self) -> Iterator[None]:
        if self._postgres:
            with self._connection.transaction():
                self._connection.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
                yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _connected(self) -> Any:
        if not self._postgres:
            connection = sqlite3.connect(self._place, timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing, a power cut may
            return connection
        limit_ms = int(_TIMEOUT_S * 1000)
        options = f"-c statement_timeout={limit_ms} -c idle_in_transaction_session_timeout={limit_ms}"
        return self._driver.connect(self._place, autocommit=True, connect_timeout=int(_TIMEOUT_S), options=options)
