"""A run's folder: its ledger, its engines' logs, what it says in the end; one coordinator at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lengthwise.apps.ledger import FILE, TableLedger, open_ledger
from lengthwise.schema.errors import InputError, OutputError

LOCK, LOGS = "run.lock", "logs"


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what is its own.

    Attributes:
        path: Of the folder.
        store: Where the ledger is; None: in the folder. Several coordinators have a folder each, and one store.
    """

    path: Path
    store: str | None = None

    @property
    def place(self) -> str:
        """Where the ledger is."""
        return self.store or str(self.path / FILE)

    @property
    def logs(self) -> Path:
        """Of engines."""
        return self.path / LOGS

    @property
    def is_begun(self) -> bool:
        """Whether a run has been here."""
        return (self.path / LOCK).exists()

    def require_free(self, *, resume: bool) -> None:
        """Raises InputError where a run was here that is not to be gone on with."""
        if self.is_begun and not resume:
            raise InputError(
                f"{self.path} holds a run already: go on with it by --resume, or name another folder"
            )

    @contextmanager
    def taken(self, *, resume: bool) -> Iterator[TableLedger]:
        """The ledger, while nobody else runs in this folder.

        Args:
            resume: Whether a run that was here before is gone on with.

        Raises:
            InputError: A run was here and is not to be gone on with, or one runs here now.
            OutputError: The folder cannot be written.
        """
        self.require_free(resume=resume)
        with self._locked(), open_ledger(self.place) as ledger:
            yield ledger

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+", encoding="ascii")
        except OSError as error:
            raise OutputError(f"cannot run in {self.path}: {error.strerror or error}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                raise InputError(
                    f"one coordinator at a time runs in a folder; process {file.read().strip() or '?'} runs in "
                    f"{self.path}: wait for it, end it, or use a folder of your own with the same PostgreSQL store"
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield
