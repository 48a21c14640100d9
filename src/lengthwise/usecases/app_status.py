"""Progress of an application's run, and its cancellation."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from lengthwise.apps.ledger import FINISHED, open_ledger
from lengthwise.apps.run import CANCEL, ModelStatus, RunFolder, live_coordinators, status_of
from lengthwise.report.json_file import json_text
from lengthwise.schema.errors import InputError


@dataclass(frozen=True)
class AppStatus:
    """Progress of a run, read from its ledger."""

    tasks: Counter[str]  # by state, in lower case
    models: tuple[ModelStatus, ...]
    owners: tuple[str, ...]  # coordinators that run it now
    is_cancelled: bool

    @property
    def finished(self) -> int:
        """Return the number of tasks that have finished."""
        return sum(self.tasks[state.name.lower()] for state in FINISHED)


def app_status(folder: Path, store: str | None = None) -> AppStatus:
    """Return the progress of the run in a folder. ``store`` is the location of the ledger, by default the folder."""
    with open_ledger(_ledger(folder, store), read_only=True) as ledger:
        tasks = Counter[str]()
        for (_, state), count in ledger.counts().items():
            tasks[state.name.lower()] += count
        return AppStatus(tasks, status_of(ledger), tuple(live_coordinators(ledger)), CANCEL in ledger.metadata())


def app_status_json(status: AppStatus) -> str:
    """Return the progress as the text of a JSON file."""
    models = [asdict(one) | {"total": one.total, "completed": one.completed} for one in status.models]
    fields = {"tasks": status.tasks, "models": models, "runs_now": status.owners, "cancelled": status.is_cancelled}
    return json_text("app_status", fields)


def cancel_app(folder: Path, store: str | None = None) -> bool:
    """Request the processes that run an application to stop. Return whether there were any such processes."""
    with open_ledger(_ledger(folder, store)) as ledger:
        running = bool(live_coordinators(ledger))
        if running:
            ledger.set_metadata({CANCEL: "1"})
    return running


def _ledger(folder: Path, store: str | None) -> str:
    run = RunFolder(folder, store)
    if run.store is None and not run.has_run:
        raise InputError(f"{folder} must be the folder of a run (app run --out); it has none")
    return run.place
