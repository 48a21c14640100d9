"""The ledger's store in a schema of a PostgreSQL database, for coordinators on several machines."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from lengthwise.apps.ledger.sql_store import Chunk, Dialect, Session, Work
from lengthwise.schema.errors import InputError, InternalError, MissingExtraError, OutputError

FORMAT = 1
MARK = "lengthwise ledger, format "
"""Prefix of the comment of a ledger's schema, before the format."""

TABLES = (
    "CREATE TABLE run (identity text NOT NULL, tasks bigint NOT NULL, fence bigint NOT NULL)",
    "INSERT INTO run VALUES ('', 0, 0)",
    """CREATE TABLE tasks (
        task bigint PRIMARY KEY, call int NOT NULL, model int NOT NULL,
        state smallint NOT NULL CHECK (state BETWEEN 0 AND 6), pending int NOT NULL CHECK (pending >= 0),
        fence bigint NOT NULL, attempts int NOT NULL DEFAULT 0, not_before_s float8 NOT NULL DEFAULT 0,
        until_s float8 NOT NULL DEFAULT 0, owner text, key text, error bytea)""",
    "CREATE INDEX ready ON tasks (model, task) WHERE state = 1",
    "CREATE INDEX leased ON tasks (owner) WHERE state = 2",
    "CREATE TABLE edges (parent bigint NOT NULL, child bigint NOT NULL, PRIMARY KEY (parent, child))",
    """CREATE TABLE results (
        key text PRIMARY KEY, output bytea NOT NULL, finish_reason text NOT NULL, prompt_tokens bigint NOT NULL,
        output_tokens bigint NOT NULL)""",
    """CREATE TABLE partials (
        key text PRIMARY KEY, output bytea NOT NULL, prompt_ids bytea NOT NULL, output_ids bytea NOT NULL)""",
    "CREATE TABLE facts (name text PRIMARY KEY, value bytea NOT NULL)",
)

DIALECT = Dialect(
    numbers="= ANY (?::bigint[])",
    texts="= ANY (?::text[])",
    lock="FOR UPDATE",
    skip="FOR UPDATE SKIP LOCKED",
    answers="""INSERT INTO results (key, output, finish_reason, prompt_tokens, output_tokens)
        SELECT * FROM unnest(?::text[], ?::bytea[], ?::text[], ?::bigint[], ?::bigint[])
        ON CONFLICT (key) DO NOTHING""",
    partials="""INSERT INTO partials (key, output, prompt_ids, output_ids)
        SELECT * FROM unnest(?::text[], ?::bytea[], ?::bytea[], ?::bytea[])
            AS came (key, output, prompt_ids, output_ids)
        WHERE NOT EXISTS (SELECT 1 FROM results WHERE results.key = came.key)
        ON CONFLICT (key) DO UPDATE
        SET output = excluded.output, prompt_ids = excluded.prompt_ids, output_ids = excluded.output_ids""",
    metadata="""INSERT INTO facts (name, value) SELECT * FROM unnest(?::text[], ?::bytea[])
        ON CONFLICT (name) DO UPDATE SET value = excluded.value""",
    moving="""UPDATE tasks SET state = came.state, attempts = attempts + came.counts, key = came.key,
        not_before_s = came.not_before_s, owner = NULL,
        error = CASE WHEN came.state = 1 THEN coalesce(came.error, tasks.error) ELSE came.error END
        FROM unnest(?::smallint[], ?::int[], ?::text[], ?::bytea[], ?::float8[], ?::bigint[])
            AS came (state, counts, key, error, not_before_s, task)
        WHERE tasks.task = came.task AND tasks.state = 2""",
    empty=("TRUNCATE edges, tasks",),
    laid_out=("ANALYZE tasks", "ANALYZE edges"),
    counts="SELECT call, state, count(*) FROM tasks GROUP BY call, state",
)


if TYPE_CHECKING:
    import psycopg

SCHEMA = "lengthwise"
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_MAX_ATTEMPTS = 20
"""Of a transaction that conflicts with others; at least one of them succeeds each time."""


class PostgresStore:
    """A schema of a database; a lost connection is replaced at the next transaction."""

    dialect = DIALECT

    def __init__(self, url: str, *, read_only: bool, timeout_s: float) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtraError("a ledger in PostgreSQL", "postgres") from error
        self._driver: Any = psycopg
        self._url, self._schema, self.where = _parts(url)
        self._read_only, self._timeout_s = read_only, timeout_s
        self._lock = threading.RLock()
        self._open: psycopg.Connection | None = None
        try:
            with self._report():
                self._prepare(self._connection())
        except BaseException:
            self.close()
            raise

    def write(self, work: Callable[[Session], Work]) -> Work:
        """Return the result of ``work`` once its changes are durable."""
        if self._read_only:
            raise InputError(f"{self.where} was opened to be read: open it without read_only to change it")
        return self.read(work)

    def read(self, work: Callable[[Session], Work]) -> Work:
        """Return the result of ``work``."""
        errors = self._driver.errors
        with self._lock, self._report():
            for attempt in range(_MAX_ATTEMPTS):
                connection = self._connection()
                try:
                    with connection.transaction():
                        return work(PostgresSession(connection))
                except (errors.DeadlockDetected, errors.SerializationFailure):
                    if attempt == _MAX_ATTEMPTS - 1:
                        raise
            raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._open is not None:
                self._open.close()

    def _connection(self) -> psycopg.Connection:
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

    def _prepare(self, connection: psycopg.Connection) -> None:
        """Create the tables or check them."""
        with connection.transaction():
            if not self._read_only:
                # CREATE SCHEMA IF NOT EXISTS fails if two sessions run it at once.
                connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"{MARK}{self._schema}",))
            found = connection.execute(
                "SELECT coalesce(obj_description(oid, 'pg_namespace'), '') FROM pg_namespace WHERE nspname = %s",
                (self._schema,),
            ).fetchone()
            if found is not None:
                self._check(str(found[0]))
            elif self._read_only:
                raise InputError(
                    f"there must be a ledger at {self.where}; there is no such schema: start a run first, or name its "
                    "place"
                )
            else:
                connection.execute(f'CREATE SCHEMA "{self._schema}"')
                for statement in TABLES:
                    connection.execute(statement)
                connection.execute(f"COMMENT ON SCHEMA \"{self._schema}\" IS '{MARK}{FORMAT}'")

    def _check(self, mark: str) -> None:
        """Raise InputError unless the comment of a schema marks a ledger of a known format."""
        if not mark.startswith(MARK):
            raise InputError(
                f"{self.where} is no ledger, but a schema of another program: name another with ?schema=NAME"
            )
        if (found := int(mark.removeprefix(MARK))) > FORMAT:
            raise InputError(
                f"{self.where} has format {found}, this lengthwise knows up to {FORMAT}: install a newer "
                "lengthwise, or name another schema with ?schema=NAME"
            )

    @contextmanager
    def _report(self) -> Iterator[None]:
        """Raise errors of PostgreSQL as those of lengthwise."""
        errors = self._driver.errors
        try:
            yield
        except self._driver.IntegrityError as error:
            raise InternalError(f"a law of the ledger {self.where} would be broken: {error}") from error
        except errors.LockNotAvailable as error:
            raise OutputError(
                f"the ledger {self.where} must be free to be written within {self._timeout_s:g} s; another client "
                "holds it for longer: end that client, or go on later with --resume (what was recorded stays)"
            ) from error
        except self._driver.Error as error:
            raise OutputError(
                f"cannot keep the ledger in {self.where}: {str(error).strip()}; what was recorded before stays: see "
                "to the server, and go on with --resume"
            ) from error


class PostgresSession:
    """A transaction in PostgreSQL."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a statement."""
        return self._connection.execute(_marked(statement), values).fetchall()

    def changed(self, statement: str, *values: Any) -> int:
        """Run a statement and return the number of rows that it changed."""
        return self._connection.execute(_marked(statement), values).rowcount

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """Run an insertion for many rows, passed as columns."""
        if rows:
            columns = [list(column) for column in zip(*rows, strict=True)]
            self._connection.execute(_marked(statement), columns)

    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Fill a table with numbers."""
        line = "\t".join(["%d"] * len(columns)) + "\n"
        with (
            self._connection.cursor() as cursor,
            cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy,
        ):
            for chunk in chunks:
                copy.write("".join([line % row for row in chunk]))


def _marked(statement: str) -> Any:
    """Return a statement with the driver's placeholders; no statement has a ? or % of another meaning."""
    return statement.replace("?", "%s")


def _parts(url: str) -> tuple[str, str, str]:
    """Return the driver's URL, the schema, and the place for messages, without user and password."""
    split = urlsplit(url)
    query = parse_qsl(split.query, keep_blank_values=True)
    schema = dict(query).get("schema", SCHEMA)
    if not _NAME.fullmatch(schema):
        raise InputError(f"schema must be a name of small letters, digits and _, at most 63 long; {schema!r} came")
    rest = urlencode([(name, value) for name, value in query if name != "schema"])
    where = f"postgresql://{split.netloc.rpartition('@')[2]}{split.path}?schema={schema}"
    # Not by urlunsplit, which drops the // before a path without a host.
    return f"postgresql://{split.netloc}{split.path}{rest and f'?{rest}'}", schema, where
