"""Files of a run's results in the order of the inputs (outputs, dead tasks, manifest), and the folder of a run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.apps.inputs import write_lines
from lengthwise.apps.ledger.contracts import State
from lengthwise.apps.ledger.table_ledger import FILE, Ledger, open_ledger
from lengthwise.apps.run.job import Job, Layout
from lengthwise.apps.run.progress import RunResult
from lengthwise.schema.app import Ints
from lengthwise.schema.errors import InputError, OutputError, UnknownNameError
from lengthwise.schema.files import write_atomic

OUTPUTS, PARQUET, DEAD, MANIFEST = "outputs.jsonl", "outputs.parquet", "dead.jsonl", "manifest.json"
LOCK = "run.lock"
FORMS = ("jsonl", "parquet")
_PAGE = 5_000
COLUMNS = {
    "id": str, "call": str, "round": int, "index": int, "model": str, "text": str, "finish_reason": str,
    "prompt_tokens": int, "output_tokens": int,
}  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """The SHA-256 of each written file by name, and the numbers of outputs and of dead or blocked tasks."""

    files: Mapping[str, str]
    answers: int
    dead: int


def export(
    ledger: Ledger,
    layout: Layout,
    folder: Path,
    *,
    ids: Callable[[int], str] = str,
    calls: Collection[str] | None = None,
    forms: Sequence[str] = ("jsonl",),
) -> Exported:
    """Write the outputs of a run, one line per task, with rows in the order of the inputs.

    Tasks of a row are in the application's order; those of a loop are ordered by round before call. Skipped
    tasks have no line. The files do not depend on when or in which order engines answered. Dead tasks have a file of
    their own, if there are any. Each file is replaced atomically.

    Args:
        ids: Returns a row's id from its number.
        calls: Names of the calls to write. None means all calls.
        forms: Formats of the outputs, from FORMS.

    Raises:
        UnknownNameError: There is no such call or form.
        OutputError: A file cannot be written.
    """
    for form in forms:
        if form not in FORMS:
            raise UnknownNameError("form of outputs", form, FORMS)
    for call in calls or ():
        if call not in layout.tasks.calls:
            raise UnknownNameError("call", call, layout.tasks.calls)
    if not forms:
        raise InputError(f"outputs must have a form, one or both of {', '.join(FORMS)}")
    folder.mkdir(parents=True, exist_ok=True)
    tasks, place_of = layout.tasks, layout.place_of
    order = place_of[np.argsort(tasks.row[place_of], kind="stable")]
    if calls is not None:
        chosen = np.array([tasks.calls[call] in calls for call, _ in layout.pairs])
        order = order[chosen[tasks.call[order]]]
    files: dict[str, str] = {}
    answers = write_lines(folder / OUTPUTS, _answers(ledger, layout, order, ids))
    if "parquet" in forms:
        write_atomic(folder / PARQUET, lambda path: _write_parquet(folder / OUTPUTS, path))
        files[PARQUET] = sha256(folder / PARQUET)
    if "jsonl" in forms:
        files[OUTPUTS] = sha256(folder / OUTPUTS)
    else:
        (folder / OUTPUTS).unlink()
    dead = write_lines(folder / DEAD, _dead(ledger, layout, order, ids))
    if dead:
        files[DEAD] = sha256(folder / DEAD)
    else:
        (folder / DEAD).unlink()  # also that of an earlier run
    return Exported(files, answers, dead)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _answers(ledger: Ledger, layout: Layout, order: Ints, ids: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    for first in range(0, len(order), _PAGE):
        places = order[first : first + _PAGE].tolist()
        found = ledger.outputs(places)
        for place in places:
            if (output := found.get(place)) is not None:
                yield {**_task_columns(layout, place, ids), **asdict(output)}


def _dead(ledger: Ledger, layout: Layout, order: Ints, ids: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    found = {
        row.task: {"state": row.state.name.lower(), "attempts": row.attempts, "error": row.error}
        for first in range(0, len(layout.tasks), _PAGE)
        for row in ledger.rows(first, _PAGE)
        if row.state in (State.DEAD, State.BLOCKED)
    }
    for place in order.tolist() if found else ():
        if place in found:
            yield {**_task_columns(layout, place, ids), **found[place]}


def _task_columns(layout: Layout, place: int, ids: Callable[[int], str]) -> dict[str, Any]:
    tasks = layout.tasks
    call, model = layout.pairs[int(tasks.call[place])]
    columns = {"id": ids(int(tasks.row[place])), "call": tasks.calls[call], "round": int(tasks.round[place])}
    return {**columns, "index": int(tasks.index[place]), "model": tasks.models[model]}


def _write_parquet(lines: Path, path: Path) -> None:
    import polars as pl

    kinds = {name: pl.String if kind is str else pl.Int64 for name, kind in COLUMNS.items()}
    try:
        pl.scan_ndjson(lines, schema=kinds).sink_parquet(path)
    except pl.exceptions.ComputeError as error:
        if "os error" not in str(error):
            raise
        raise OSError(str(error)) from error  # a full disk, which polars reports as a failed computation


def recorded(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of written outputs and of output tokens, by model name. Without a file, both are empty."""
    answers: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    path = folder / OUTPUTS
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                answers[row["model"]] += 1
                tokens[row["model"]] += row["output_tokens"]
    return dict(answers), dict(tokens)


def manifest(
    job: Job, completed: RunResult, exported: Exported, *, app: str, inputs: str, models: Mapping[str, str]
) -> dict[str, Any]:
    """Return counts, hashes, versions, the plan and the events of a run.

    ``app`` and ``inputs`` are SHA-256 sums. ``models`` holds the revision or weights of each model.
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
        "engines": {names[model]: list(engines) for model, engines in completed.engines.items()},
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
    """Return the number of tasks by call and state. The entry "all" has the sums over all calls."""
    found: dict[str, dict[str, int]] = {"all": Counter()}
    for (call, _, state), tasks in sorted(completed.counts.items()):
        for name in (job.layout.tasks.calls[call], "all"):
            found.setdefault(name, Counter())[State(state).name.lower()] += tasks
    return {name: dict(states) for name, states in found.items()}


def write_manifest(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write a manifest as sorted JSON."""
    text = json.dumps(metadata, indent=2, sort_keys=True, ensure_ascii=False, default=_plain)
    write_atomic(folder / MANIFEST, text.encode() + b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | set | frozenset):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(type(value).__name__)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. ``store`` is the place of a ledger elsewhere, which coordinators can share."""

    path: Path
    store: str | None = None

    @property
    def place(self) -> str:
        """Return the place of the ledger: ``store``, or otherwise a file in the folder."""
        return self.store or str(self.path / FILE)

    @property
    def has_run(self) -> bool:
        """Return whether the folder contains a run."""
        return (self.path / LOCK).exists()

    def require_free(self, *, resume: bool) -> None:
        """Raise InputError if the folder contains a run, unless the run is to be resumed."""
        if self.has_run and not resume:
            raise InputError(f"{self.path} holds a run already: go on with it by --resume, or name another folder")

    @contextmanager
    def locked(self, *, resume: bool) -> Iterator[Ledger]:
        """Lock the folder for this process and yield its ledger. With ``resume``, an earlier run may continue.

        Raises:
            InputError: The folder contains a run that is not to be resumed, or another process runs in it.
        """
        self.require_free(resume=resume)
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
            with open_ledger(self.place) as ledger:
                yield ledger
