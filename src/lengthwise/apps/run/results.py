"""Answers as files, in the order of the inputs: JSONL and Parquet, the dead apart, and a manifest."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.apps.ledger import FILE, TableLedger, open_ledger
from lengthwise.apps.ledger.contracts import Ledger, State
from lengthwise.apps.run.job import Ints, Job, Layout
from lengthwise.apps.run.progress import RunResult
from lengthwise.schema.errors import InputError, OutputError, UnknownNameError
from lengthwise.schema.files import write_whole

OUTPUTS, PARQUET, DEAD, MANIFEST = "outputs.jsonl", "outputs.parquet", "dead.jsonl", "manifest.json"
FORMS = ("jsonl", "parquet")
_PAGE = 5_000
COLUMNS = {
    "id": str, "call": str, "round": int, "index": int, "model": str, "text": str, "finish_reason": str,
    "prompt_tokens": int, "output_tokens": int,
}  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: Names in the folder, with their SHA-256.
        answers: Lines of outputs.
        dead: Lines of the dead, with their errors.
    """

    files: Mapping[str, str]
    answers: int
    dead: int


def export(
    ledger: Ledger,
    layout: Layout,
    folder: Path,
    *,
    ids: Callable[[int], str] | None = None,
    calls: Collection[str] | None = None,
    forms: Sequence[str] = ("jsonl",),
) -> Exported:
    """Writes what was answered, a line a task, rows in the order of the inputs, each file whole or not at all.

    Tasks of a row stand in the application's order: by call, round and index. Skipped ones have no line. Nothing of it
    depends on when or in which order engines answered. Where nobody is dead there is no file of the dead.

    Args:
        ledger: Of the run.
        layout: Of its tasks.
        folder: Where the files go; made where it is missing.
        ids: A row's id by its number; None: the number.
        calls: Names of the calls to be written; None: all.
        forms: Of FORMS.

    Raises:
        UnknownNameError: There is no such call, or no such form.
        OutputError: A file cannot be written.
    """
    _check(layout, calls, forms)
    folder.mkdir(parents=True, exist_ok=True)
    order = _order(layout, calls)
    named = ids or str
    files: dict[str, str] = {}
    write_whole(folder / OUTPUTS, lambda path: _write(path, _answers(ledger, layout, order, named)))
    files[OUTPUTS] = sha256(folder / OUTPUTS)
    answers = _lines(folder / OUTPUTS)
    if "parquet" in forms:
        write_whole(folder / PARQUET, lambda path: _parquet(folder / OUTPUTS, path))
        files[PARQUET] = sha256(folder / PARQUET)
    if "jsonl" not in forms:
        (folder / OUTPUTS).unlink()
        del files[OUTPUTS]
    write_whole(folder / DEAD, lambda path: _write(path, _dead(ledger, layout, order, named)))
    dead = _lines(folder / DEAD)
    if dead:
        files[DEAD] = sha256(folder / DEAD)
    else:
        (folder / DEAD).unlink()  # of a run before, too
    return Exported(files, answers, dead)


def write_manifest(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Writes what a run was: counts, hashes, versions, plan, times; as sorted JSON."""
    text = json.dumps(metadata, indent=2, sort_keys=True, ensure_ascii=False, default=_plain)
    write_whole(folder / MANIFEST, text.encode() + b"\n")


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(layout: Layout, calls: Collection[str] | None, forms: Sequence[str]) -> None:
    for form in forms:
        if form not in FORMS:
            raise UnknownNameError("form of outputs", form, FORMS)
    for call in calls or ():
        if call not in layout.tasks.calls:
            raise UnknownNameError("call", call, layout.tasks.calls)
    if not forms:
        raise InputError(f"outputs must have a form, one or both of {', '.join(FORMS)}")


def _order(layout: Layout, calls: Collection[str] | None) -> Ints:
    """Places in the order of rows, within a row in the application's."""
    tasks, place_of = layout.tasks, layout.place_of
    rows = tasks.row[place_of]
    order = place_of[np.argsort(rows, kind="stable")]
    if calls is None:
        return order
    wanted = np.array([tasks.calls[call] in calls for call, _ in layout.pairs])
    chosen: Ints = order[wanted[tasks.call[order]]]
    return chosen


def _answers(ledger: Ledger, layout: Layout, order: Ints, ids: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    for first in range(0, len(order), _PAGE):
        places = order[first : first + _PAGE].tolist()
        found = ledger.outputs(places)
        for place in places:
            if (output := found.get(place)) is not None:
                yield {**_head(layout, place, ids), **asdict(output)}


def _dead(ledger: Ledger, layout: Layout, order: Ints, ids: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    """The dead with their errors, then those that never came to their turn behind them, in the same order."""
    found: dict[int, tuple[str, int, str | None]] = {}
    for first in range(0, len(layout.tasks), _PAGE):
        for row in ledger.rows(first, _PAGE):
            if row.state in (State.DEAD, State.BLOCKED):
                found[row.task] = (row.state.name.lower(), row.attempts, row.error)
    for place in order.tolist() if found else ():
        if place in found:
            state, attempts, error = found[place]
            yield {**_head(layout, place, ids), "state": state, "attempts": attempts, "error": error}


def _head(layout: Layout, place: int, ids: Callable[[int], str]) -> dict[str, Any]:
    tasks = layout.tasks
    call, model = layout.pairs[int(tasks.call[place])]
    return {
        "id": ids(int(tasks.row[place])),
        "call": tasks.calls[call],
        "round": int(tasks.round[place]),
        "index": int(tasks.index[place]),
        "model": tasks.models[model],
    }


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _parquet(lines: Path, path: Path) -> None:
    import polars as pl

    kinds = {name: pl.String if kind is str else pl.Int64 for name, kind in COLUMNS.items()}
    try:
        pl.scan_ndjson(lines, schema=kinds).sink_parquet(path)
    except pl.exceptions.ComputeError as error:
        if "os error" not in str(error):
            raise
        raise OSError(str(error)) from error  # a full disk, which polars tells so


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _plain(value: Any) -> Any:
    """What JSON does not know."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | set | frozenset):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(type(value).__name__)


def recorded(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """(answers, output tokens) that were written, by model's name; empty where there is no file of answers."""
    answers: dict[str, int] = {}
    tokens: dict[str, int] = {}
    path = folder / OUTPUTS
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                told = json.loads(line)
                name = told["model"]
                answers[name] = answers.get(name, 0) + 1
                tokens[name] = tokens.get(name, 0) + told["output_tokens"]
    return answers, tokens


def manifest(
    job: Job, completed: RunResult, exported: Exported, *, app: str, inputs: str, models: Mapping[str, str]
) -> dict[str, Any]:
    """Counts, hashes, versions, the plan and how long it took.

    Args:
        job: That ran.
        completed: How.
        exported: What was written.
        app: SHA-256 of the application.
        inputs: SHA-256 of its inputs.
        models: Revision or weights of each model, by name.
    """
    names = job.layout.tasks.models
    return {
        "how": completed.how,
        "error": completed.error or None,
        "resumed": completed.resumed,
        "reused": None if completed.reused is None else asdict(completed.reused),
        "counts": counts(job, completed),
        "answers": exported.answers,
        "dead": exported.dead,
        "sha256": {"app": app, "inputs": inputs, **exported.files},
        "identity": job.identity,
        "versions": {"lengthwise": version("lengthwise"), "python": platform.python_version()},
        "models": dict(models),
        "engines": {names[model]: list(abouts) for model, abouts in completed.engines.items()},
        "plan": [[{**asdict(plan), "model": names[plan.model]} for plan in stage] for stage in job.run_plan.stages],
        "seconds": round(completed.seconds, 3),
        "silent": [
            {**asdict(one), "model": names[one.model], "words": one.words(names[one.model])} for one in completed.silent
        ],
        "events": [
            {**asdict(event), "model": names[event.model] if event.model >= 0 else None} for event in completed.events
        ],
    }


def counts(job: Job, completed: RunResult) -> dict[str, dict[str, int]]:
    """Tasks by call and state, with all of them under "all"."""
    found: dict[str, dict[str, int]] = {"all": {}}
    for (call, _, state), tasks in sorted(completed.counts.items()):
        for name in (job.layout.tasks.calls[call], "all"):
            states = found.setdefault(name, {})
            states[State(state).name.lower()] = states.get(State(state).name.lower(), 0) + tasks
    return found


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
            raise InputError(f"{self.path} holds a run already: go on with it by --resume, or name another folder")

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
