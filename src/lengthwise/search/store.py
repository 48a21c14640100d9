"""Stores evaluations in an append-only SQLite file: results, keyed by the content of their questions."""

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
from typing import Any, Self

from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.estimate import DrawnEstimate, Estimate
from lengthwise.schema.plan import Bottleneck, Bounds, Choice, Exclusion, Point, Status

FILE = "evaluations.sqlite"
SCHEMA_VERSION = 1
TIMEOUT_S = 30.0

DECIDING = (
    "_jit.py", "_native.py", "_compiler.py", "statistics.py", "schema", "catalog", "workload", "cost", "policy",
    "predict", "theory", "engine", "metrics", "search", "config", "usecases",
)  # fmt: skip
"""Modules and packages that determine a result. config and usecases are among them, because a key contains the text of
the scenario, from which they build deployments. cli and report only present numbers, and backend runs real engines."""


class Store:
    """Results by key, in one SQLite file that several processes may read and append to at the same time.

    A stored result never changes: the first one under a key remains. SQLite's write-ahead log (``-wal``, ``-shm``)
    needs memory that all processes share, so these processes must run on one machine. On a cluster, only the driver
    writes.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection, self.path = connection, path

    @classmethod
    def open(cls, folder: Path | str) -> Store:
        """Open the store in a folder, and create the folder and the file if they do not exist.

        Raises InputError if the file is not a store or a newer lengthwise wrote it, and OutputError if the folder
        cannot be written.
        """
        path = Path(folder) / FILE
        with _translated_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Autocommit: a put is one statement, and a read leaves no old transaction open.
            connection = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None)
        try:
            with _translated_errors(path):
                _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
        return cls(connection, path)

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the value of a key; None if the key has no value."""
        with _translated_errors(self.path):
            row = self.connection.execute("SELECT value FROM evaluations WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store JSON values, including NaN and infinities, unless the key (see ``content_key``) already has some.

        When this returns, the values are on the disk; floats are stored exactly. Raises OutputError if the values
        cannot be written: the disk is full, the file is read-only, or a lock is not released.
        """
        text = json.dumps(value, separators=(",", ":"))
        statement = "INSERT INTO evaluations (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING"
        with _translated_errors(self.path):
            self.connection.execute(statement, (key, text))

    def __len__(self) -> int:
        with _translated_errors(self.path):
            return int(self.connection.execute("SELECT count(*) FROM evaluations").fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create the table, or check that the file is a store; then set the journal mode."""

    def schema_version() -> int:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])

    if (found := schema_version()) > SCHEMA_VERSION:
        raise InputError(
            f"{path} has format {found}, this lengthwise knows up to {SCHEMA_VERSION}: "
            "install a newer lengthwise, or name another folder"
        )
    if found == 0:
        connection.execute("BEGIN IMMEDIATE")  # other processes may create the table at the same time
        try:
            if schema_version() == 0:
                if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise InputError(f"{path} is the database of another program: name another folder")
                columns = "id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value TEXT NOT NULL"
                connection.execute(f"CREATE TABLE evaluations ({columns})")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
    # A write-ahead log lets readers and a writer work at once. SQLite's timeout does not cover this statement, so it is
    # retried while another process sets the mode.
    for attempt in range(int(TIMEOUT_S / 0.05), -1, -1):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or not attempt:
                raise
            time.sleep(0.05)
    # FULL flushes the log at every put. NORMAL would survive a kill but not a power failure, and is five times as fast
    # (0.04 ms against 0.2 ms on a cloud disk), which is negligible next to an evaluation of many milliseconds.
    connection.execute("PRAGMA synchronous = FULL")


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot store evaluations in {path}: {error.strerror or error}") from error
    except sqlite3.ProgrammingError:
        raise  # a closed store, or one of another thread: an error of the caller
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise InputError(f"{path} is no store of evaluations, or damaged ({error}): name another folder") from error
        raise OutputError(f"cannot store evaluations in {path}: {error}") from error


def content_key(*parts: object) -> str:
    """Return the SHA-256 of ``parts`` in hexadecimal, which is the same on every machine.

    Parts are JSON values; other types raise TypeError. The order of keys does not matter, and tuples equal lists.
    Floats are exact and may be NaN or infinite, and 1 and 1.0 differ.
    """

    def check_keys(part: object) -> None:  # JSON would write the keys 1 and "1" alike
        if isinstance(part, dict):
            if invalid := [key for key in part if not isinstance(key, str)]:
                raise TypeError(f"the keys of a mapping must be texts, not {invalid[0]!r}")
            part = list(part.values())
        if isinstance(part, list | tuple):
            for item in part:
                check_keys(item)

    check_keys(parts)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@lru_cache
def code_version() -> str:
    """Return the SHA-256 of all code that determines a result, because other code may give other results.

    It covers the sources and data files of ``DECIDING``, and the versions of lengthwise, NumPy, Numba and SciPy.
    """

    def installed(library: str) -> str | None:
        try:
            return version(library)
        except PackageNotFoundError:
            return None

    root = Path(__file__).parents[1]
    libraries = [installed(library) for library in ("lengthwise", "numba", "numpy", "scipy")]
    digest = hashlib.sha256(repr(libraries).encode())
    roots = [root / name for name in DECIDING]
    contents = [path for one in roots for kind in ("*.py", "*.toml", "*.lwp") for path in one.rglob(kind)]
    for path in sorted({path for path in [*roots, *contents] if path.is_file()}):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def to_dict(choice: Choice) -> dict[str, Any]:
    """Return a choice as JSON values."""
    return dataclasses.asdict(choice) | {"status": str(choice.status)}


def from_dict(values: dict[str, Any]) -> Choice:
    """Return the choice from the values of ``to_dict``."""
    estimates = {name: _estimate(values[name]) for name in ("objective", "capacity_rps")}
    at = None if values["at"] is None else _point(values["at"])
    points = tuple(map(_point, values["points"]))
    kinds = {"exclusion": Exclusion, "bounds": Bounds, "bottleneck": Bottleneck}
    groups = {name: kind(**values[name]) for name, kind in kinds.items()}
    return Choice(**values | estimates | groups | {"status": Status(values["status"]), "at": at, "points": points})


def _estimate(values: dict[str, Any]) -> Estimate:
    is_drawn = "draws" in values
    return DrawnEstimate(**values | {"draws": tuple(values["draws"])}) if is_drawn else Estimate(**values)


def _point(values: dict[str, Any]) -> Point:
    estimates = {name: _estimate(estimate) for name, estimate in values["values"].items()}
    return Point(values["rate_rps"], estimates, values["satisfied"], values["usage"])
