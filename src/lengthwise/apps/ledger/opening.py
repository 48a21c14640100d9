"""A place becomes a ledger."""

from __future__ import annotations

from pathlib import Path

from lengthwise.apps.ledger._postgres import PostgresStore
from lengthwise.apps.ledger._sql import Store
from lengthwise.apps.ledger._sqlite import SqliteStore
from lengthwise.apps.ledger.tables import TableLedger
from lengthwise.schema.errors import InputError

FILE = "ledger.sqlite"
"""The ledger's name in a folder."""
PATIENCE_S = 30.0


def open_ledger(place: str | Path, *, read_only: bool = False, patience_s: float = PATIENCE_S) -> TableLedger:
    """The ledger at a place; made where there is none, unless it is opened to be read.

    Args:
        place: A file, a folder (``ledger.sqlite`` in it), or ``postgresql://user@host/database?schema=NAME``
            for several coordinators; each run has a schema of its own ("lengthwise" by default), which is made.
        read_only: For a look from beside while another process runs.
        patience_s: How long to wait for others who write.

    Raises:
        InputError: What is there is no ledger, a newer lengthwise's, or another program's; or nothing is there
            to be read.
        OutputError: It cannot be written or reached.
        MissingExtraError: A PostgreSQL URL without the extra ``postgres``.
    """
    return TableLedger(_store(str(place), read_only, patience_s))


def _store(place: str, read_only: bool, patience_s: float) -> Store:
    if place.startswith(("postgresql://", "postgres://")):
        return PostgresStore(place, read_only=read_only, patience_s=patience_s)
    if "://" in place:
        raise InputError(
            f"a ledger is kept in a file or at postgresql://...; {place.rpartition('@')[2]!r} came: name one of these"
        )
    path = Path(place)
    return SqliteStore(path / FILE if path.is_dir() else path, read_only=read_only, patience_s=patience_s)
