"""The store of a ledger in a schema of a PostgreSQL database, for coordinators on several machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlencode, urlsplit

from lengthwise.apps.ledger.sql_store import FORMAT, Chunk, Store, Work
from lengthwise.schema.errors import InputError, MissingExtraError

MARK = "lengthwise ledger, format "  # the comment of a ledger's schema is this text and the format
SCHEMA = "lengthwise"
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_MAX_ATTEMPTS = 20  # of a transaction that conflicts with others; at each conflict, one of them succeeds


class PostgresStore(Store):
    """A store in a schema of a PostgreSQL database. After a lost connection, the next transaction reconnects."""

    words: ClassVar = {
        "integer": "bigint",
        "real": "float8",
        "text": "text",
        "blob": "bytea",
        "strict": "",
        "sorted": "",
        "key": "key text PRIMARY KEY",
        "numbers": "= ANY (?::bigint[])",
        "texts": "= ANY (?::text[])",
        "lock": "FOR UPDATE",
        "skip": "FOR UPDATE SKIP LOCKED",
        "counts": "count(*) FROM tasks GROUP BY call, state",
    }
    empty: ClassVar = ("TRUNCATE edges, tasks",)
    filled: ClassVar = ("ANALYZE tasks", "ANALYZE edges")

    def __init__(self, url: str, *, read_only: bool, timeout_s: float) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtraError("a ledger in PostgreSQL", "postgres") from error
        self._driver: Any = psycopg
        self._url, self._schema, where = _parts(url)
        super().__init__(where, read_only=read_only, timeout_s=timeout_s)
        self._open: Any = None
        try:
            with self._translate_errors():
                self._prepare(self.connection())
        except BaseException:
            self.close()
            raise

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return all its rows."""
        return list(self._executed(statement, values).fetchall())

    def changed(self, statement: str, *values: Any) -> int:
        """Run a statement and return the number of rows that it changed."""
        return int(self._executed(statement, values).rowcount)

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """Run a batch statement once. The rows are passed as one array per column."""
        if rows:
            self._executed(statement, [list(column) for column in zip(*rows, strict=True)])

    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Insert rows of integers into a table."""
        line = "\t".join(["%d"] * len(columns)) + "\n"
        command = f"COPY {table} ({', '.join(columns)}) FROM STDIN"
        with self._open.cursor() as cursor, cursor.copy(command) as copy:
            for chunk in chunks:
                copy.write("".join([line % row for row in chunk]))

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._open is not None:
                self._open.close()

    def _executed(self, statement: str, values: Any) -> Any:
        # The driver's placeholder is %s; no statement has a ? or % of another meaning.
        return self._open.execute(statement.replace("?", "%s"), values)

    def _transaction(self, work: Callable[[Self], Work]) -> Work:
        errors = self._driver.errors
        for attempt in range(_MAX_ATTEMPTS):
            try:
                with self.connection().transaction():
                    return work(self)
            except (errors.DeadlockDetected, errors.SerializationFailure):
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _batch_sql(self, columns: list[list[str]]) -> str:
        values = ", ".join(f"?::{self.words[kind]}[]" for _, kind in columns)
        return f"unnest({values}) AS came ({', '.join(name for name, _ in columns)})"

    def connection(self) -> Any:
        """Return the open connection, or a new one."""
        if self._open is None or self._open.closed:
            self._open = self._driver.connect(self._url, autocommit=True, connect_timeout=10)
            limit_ms = max(1, int(self._timeout_s * 1000))
            for setting in (
                f'search_path = "{self._schema}"',
                "synchronous_commit = on",
                f"lock_timeout = {limit_ms}",
                # A process that stops within a transaction must not block the others.
                f"idle_in_transaction_session_timeout = {limit_ms}",
                f"default_transaction_read_only = {'on' if self._read_only else 'off'}",
            ):
                self._open.execute(f"SET {setting}")
        return self._open

    def _prepare(self, connection: Any) -> None:
        with connection.transaction():
            if not self._read_only:
                # CREATE SCHEMA IF NOT EXISTS fails if two sessions run it at once.
                connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"{MARK}{self._schema}",))
            found = connection.execute(
                "SELECT coalesce(obj_description(oid, 'pg_namespace'), '') FROM pg_namespace WHERE nspname = %s",
                (self._schema,),
            ).fetchone()
            if found is not None:
                mark = str(found[0])
                if not mark.startswith(MARK):
                    raise InputError(
                        f"{self.where} is no ledger, but a schema of another program: name another with ?schema=NAME"
                    )
                self._check_format(int(mark.removeprefix(MARK)), "another schema with ?schema=NAME")
            elif self._read_only:
                raise InputError(
                    f"there must be a ledger at {self.where}; there is no such schema: start a run first, or name the "
                    "schema of a run"
                )
            else:
                comment = f"COMMENT ON SCHEMA \"{self._schema}\" IS '{MARK}{FORMAT}'"
                for statement in (f'CREATE SCHEMA "{self._schema}"', *self.tables, comment):
                    connection.execute(statement)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except self._driver.IntegrityError as error:
            raise self._violated_constraint(error) from error
        except self._driver.errors.LockNotAvailable as error:
            raise self._locked_out("client") from error
        except self._driver.Error as error:
            raise self._failed(error, "check the server") from error


def _parts(url: str) -> tuple[str, str, str]:
    """Return the URL for the driver, the schema, and the place for messages (without user and password)."""
    split = urlsplit(url)
    query = parse_qsl(split.query, keep_blank_values=True)
    schema = dict(query).get("schema", SCHEMA)
    if not _NAME.fullmatch(schema):
        raise InputError(f"schema must be a name of small letters, digits and _, at most 63 long; it is {schema!r}")
    rest = urlencode([(name, value) for name, value in query if name != "schema"])
    where = f"postgresql://{split.netloc.rpartition('@')[2]}{split.path}?schema={schema}"
    # Not by urlunsplit, which drops the // before a path without a host.
    return f"postgresql://{split.netloc}{split.path}{rest and f'?{rest}'}", schema, where
