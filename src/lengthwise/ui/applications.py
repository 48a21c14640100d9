"""The Applications page: the plan of several models on one cluster, its graph and chart, and the progress of runs."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import tempfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.config.files import allowed
from lengthwise.schema.errors import InputError
from lengthwise.ui.page import Download, Outcome, Page, Values, fields_of, require_name, require_number
from lengthwise.ui.work import Session, Task

if TYPE_CHECKING:
    from lengthwise.schema.app import AppPlan, Tasks
    from lengthwise.usecases.app_plan import PlanSettings
    from lengthwise.usecases.app_setup import AppRequest

OWN = "uploaded application"
DEFAULTS: dict[str, Any] = {
    "app": "apps/ensemble.toml",
    "app_file": None,
    "rows_file": None,
    "rows": None,  # as many as the file says
    "nodes": "8xA100-80GB@pairs",
    "method": "lengthwise",
    "draws": 3,
    "true_draws": 12,
    "what_if": True,
}
_FILES = (".toml", ".json", ".jsonl", ".csv", ".yaml", ".yml", ".py", ".parquet")


def page(examples: Path, runs: Sequence[Path] = ()) -> Page:
    """Return the page.

    Args:
        examples: The folder with the applications that its list offers.
        runs: Folders of ``app run`` whose progress the page shows.
    """
    return Page(
        "applications",
        "Applications",
        partial(choices, examples, runs),
        answers={"progress": partial(_progress, runs)},
        jobs={"plan": partial(run, examples)},
        downloads={"report": _report, "plan": _plan_file, "files": _archive},
    )


def choices(examples: Path, runs: Sequence[Path]) -> dict[str, Any]:
    """Return the names that the page's lists offer, and the defaults of its fields."""
    from lengthwise.apps.plan import DEFAULT, METHODS

    return {
        "apps": [*_examples(examples), OWN],
        "rows": {name: _rows(examples / name) for name in _examples(examples)},
        "methods": [DEFAULT, *METHODS],
        "runs": [str(folder) for folder in runs],
        "defaults": DEFAULTS,
    }


def _rows(path: Path) -> int:
    """Return the number of rows that an application file uses without a setting."""
    inputs = tomllib.loads(path.read_text("utf-8"))["inputs"]
    with (path.parent / inputs["file"]).open(encoding="utf-8", newline="") as file:
        rows = (
            sum(1 for _ in csv.DictReader(file))
            if inputs["file"].endswith(".csv")
            else sum(1 for line in file if line.strip())
        )
    return min(rows, int(inputs.get("rows", rows)))


def _examples(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.glob("apps/*.toml")
        if "calls" in tomllib.loads(path.read_text("utf-8"))
    )


@dataclass(frozen=True)
class _Planned:
    plan: AppPlan
    details: Any
    files: dict[str, bytes]  # by the name in the archive: the application and its inputs


def run(examples: Path, values: Values, task: Task) -> Outcome:
    """Plan an application. Raises InputError for unknown fields and names, and for wrong values and files."""
    fields = _checked(values, examples)
    nodes = [one.strip() for one in fields["nodes"].split(",")]
    if fields["app"] == OWN:
        path, own = uploaded(task.session, fields)
    else:
        path, own = examples / fields["app"], []
    rows = [] if fields["rows"] is None else [f"inputs.rows={fields['rows']}"]
    task.report("reading the application", 0, 0)
    from lengthwise.usecases.app_plan import PlanSettings
    from lengthwise.usecases.app_setup import load_app_request

    table = tomllib.loads(path.read_text("utf-8"))
    inputs = {re.sub(r"^\d+x", "", value) for _, value in _texts(table) if len(value) < 256}
    files = {path.name: path}
    files |= {one: path.parent / one for one in sorted(inputs) if _is_inside(one) and (path.parent / one).is_file()}
    if own:
        rows_file = task.session.file(fields["rows_file"])
        name = str(table.get("inputs", {}).get("file", ""))
        files[name if _is_inside(name) else rows_file.name] = rows_file
    requested = load_app_request(path, [*rows, *own], nodes)
    numbers = {name: fields[name] for name in ("draws", "true_draws")}
    shown_path = path.name if fields["app"] == OWN else f"examples/{fields['app']}"
    settings = PlanSettings(fields["method"], **numbers, what_ifs=fields["what_if"])
    task.report("planning", 0, 0)
    return _planned(requested, settings, fields, shown_path, files)


def _planned(
    requested: AppRequest, settings: PlanSettings, fields: Values, shown_path: str, files: dict[str, Path]
) -> Outcome:
    from lengthwise.report import apps
    from lengthwise.usecases.app_report import facts_of

    planned = requested.planned(settings)
    plan = planned.plan
    assert plan is not None
    details = facts_of(requested, planned, Path(fields["app"]).stem)
    tables = apps.plan_tables(plan, details)
    heads = {"stages": apps.STAGE_HEADS, "methods": apps.METHOD_HEADS, "what_ifs": apps.WHAT_IF_HEADS}
    answer = {
        "name": details.name,
        "facts": details.metadata,
        "cards": [
            {"label": label, "value": value, "unit": "", "interval": note, "model": ""}
            for label, value, note in apps.cards(plan, details)
        ],
        "chart": apps.figures(plan, plan.models, details),
        "graph": graph(planned.expanded.tasks),
        "tables": {name: {"heads": head, "rows": tables[name]} for name, head in heads.items()},
        "idle": tables["idle"],
        "notes": list(plan.notes),
        "command": _command(fields, shown_path),
        "scenario": next(iter(files.values())).read_text("utf-8"),
    }
    return Outcome(answer, _Planned(plan, details, {name: path.read_bytes() for name, path in files.items()}))


def graph(tasks: Tasks) -> dict[str, Any]:
    """Return the calls of an application as nodes, and how many outputs pass from one call to another as edges.

    A node's column is the length of the longest way to it from calls that wait for nothing. A loop's rounds are one
    node: an edge to an earlier or the same call is marked as ``back``.
    """
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    pairs = zip(tasks.call[tasks.parent].tolist(), tasks.call[child].tolist(), strict=True)
    counts = Counter(pairs)
    first = {call: int(np.flatnonzero(tasks.call == call)[0]) for call in set(tasks.call.tolist())}
    forward = [(a, b) for a, b in counts if first[a] < first[b] and a != b]
    column = dict.fromkeys(first, 0)
    for call in sorted(first, key=lambda one: first[one]):  # parents come before their children
        column[call] = max((column[a] + 1 for a, b in forward if b == call), default=0)
    models = {call: sorted(set(tasks.model[tasks.call == call].tolist())) for call in first}
    return {
        "nodes": [
            {
                "call": tasks.calls[call],
                "column": column[call],
                "tasks": int((tasks.call == call).sum()),
                "models": [tasks.models[one] for one in models[call]],
            }
            for call in sorted(first, key=lambda one: (column[one], first[one]))
        ],
        "edges": [
            {"from": tasks.calls[a], "to": tasks.calls[b], "outputs": count, "back": (a, b) not in forward}
            for (a, b), count in sorted(counts.items())
        ],
    }


def uploaded(session: Session, fields: Values) -> tuple[Path, list[str]]:
    """Return the path of an uploaded application, and settings that replace its input rows by the uploaded ones.

    Raises InputError if the application names any other file of this machine.
    """
    if not fields["app_file"]:
        raise InputError("an uploaded application needs its TOML file; choose one")
    path = session.file(fields["app_file"])
    if path.suffix != ".toml":
        raise InputError(f"the application must be a .toml file; it is {path.name}")
    rows = session.file(fields["rows_file"]) if fields["rows_file"] else None
    return path, _settings(path, rows)


def _settings(path: Path, rows: Path | None) -> list[str]:
    """Return settings that replace the input rows of an application by those of the file ``rows``, unless it is None.

    Raises InputError if the application names any other file of this machine.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path.name}: {error}") from None
    for keys, value in (*_texts(table), *_models(table)):
        key = keys[-1]
        if keys[0] in ("calls", "name", "description") or (rows is not None and keys == ("inputs", "file")):
            continue  # prompts; and the rows, which the uploaded ones replace
        is_path = value.startswith(("/", "~", ".", "\\")) or ".." in value or value.lower().endswith(_FILES)
        is_path = is_path or (keys[0] == "models" and Path(value).exists())
        if is_path or key in ("file", "openai_batch", "store") or (key == "cost" and ":" in value):
            remedy = "; choose the file with its rows" if keys == ("inputs", "file") else ""
            raise InputError(f"an uploaded application may name no file, but {'.'.join(keys)} = {value!r} does{remedy}")
    return [] if rows is None else [f"inputs.file={json.dumps(str(rows))}"]


def planner(examples: Path) -> Callable[..., dict[str, Any]]:
    """Return ``plan`` of ``lengthwise mcp`` for the JSON API: the application comes as a text instead of a file."""

    def plan(application: str, nodes: list[str], rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Plan how several models of an application share GPUs: stages, makespan with its interval, idle GPUs.

        Args:
            application: Text of an application file (TOML), or an example such as apps/ensemble.toml.
            nodes: GPUs, such as ["8xA100-80GB"].
            rows: Input rows instead of those of the file, each an object.
        """
        from lengthwise.apps.plan import plan_json
        from lengthwise.usecases.app_plan import PlanSettings
        from lengthwise.usecases.app_setup import load_app_request

        if is_example := "\n" not in application:
            require_name("application", application, _examples(examples))
        _checked({"nodes": ",".join(nodes)}, examples)
        with tempfile.TemporaryDirectory(prefix="lengthwise-") as folder, allowed(Path(folder)):
            path, file = Path(folder) / "application.toml", None
            path.write_text((examples / application).read_text("utf-8") if is_example else application, "utf-8")
            if rows is not None:
                file = path.with_name("rows.jsonl")
                file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            settings = _settings(path, file) if file is not None or not is_example else []
            requested = load_app_request(examples / application if is_example else path, settings, nodes)
            planned = requested.planned(PlanSettings()).plan
        assert planned is not None  # GPUs are given
        found: dict[str, Any] = json.loads(plan_json(planned))
        return found

    return plan


def _models(table: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of models, which stand for ``model`` where it is missing."""
    models = table.get("models")
    yield from ((("models", name, "model"), name) for name in (models if isinstance(models, Mapping) else ()))


def _texts(table: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(table, Mapping):
        for key, value in table.items():
            yield from _texts(value, (*keys, key))
    elif isinstance(table, list):
        for value in table:
            yield from _texts(value, keys)
    elif isinstance(table, str):
        yield keys, table


def _progress(runs: Sequence[Path], _: Values, task: Task) -> dict[str, Any]:
    """Return the progress of the runs that the page shows."""
    from lengthwise.usecases.app_status import app_status

    found: list[dict[str, Any]] = []
    for folder in runs:
        task.check()
        try:
            status = app_status(folder)
        except InputError as error:
            found.append({"folder": str(folder), "error": str(error)})
            continue
        found.append(
            {
                "folder": str(folder),
                "finished": status.finished,
                "total": sum(status.tasks.values()),
                "tasks": dict(sorted(status.tasks.items())),
                "runs_now": bool(status.owners),
                "cancelled": status.is_cancelled,
                "models": [[one.name, f"{one.completed:,}", f"{one.total:,}"] for one in status.models],
            }
        )
    return {"runs": found}


def _checked(values: Values, examples: Path) -> Values:
    fields = fields_of(values, DEFAULTS)
    require_name("application", fields["app"], [*_examples(examples), OWN])
    if not isinstance(fields["nodes"], str) or "/" in fields["nodes"] or ".toml" in fields["nodes"].lower():
        raise InputError(
            f'nodes must be GPUs such as "8xA100-80GB@pairs", with commas between; it is {fields["nodes"]!r}'
        )
    for name, most in {"rows": 20_000, "draws": 20, "true_draws": 100}.items():
        if name != "rows" or fields["rows"] is not None:
            fields[name] = int(require_number(name, fields[name], most))
    if not isinstance(fields["what_if"], bool):
        raise InputError(f"what_if must be true or false; it is {fields['what_if']!r}")
    return fields


def _command(fields: Values, path: str) -> str:
    words = ["lengthwise", "app", "plan", path]
    for node in fields["nodes"].split(","):
        words += ["--node", node.strip()]
    for name in ("method", "draws", "true_draws"):
        if fields[name] != DEFAULTS[name]:
            words += [f"--{name.replace('_', '-')}", str(fields[name])]
    if not fields["what_if"]:
        words.append("--no-what-if")
    if fields["rows"] is not None:
        words += ["--set", f"inputs.rows={fields['rows']}"]
    return shlex.join(words)


def _report(outcome: Outcome, _: Values) -> Download:
    from lengthwise.report.apps import write_app_html

    made: _Planned = outcome.source
    content = _written(lambda path: write_app_html(path, made.plan, made.details))
    return Download("plan.html", "text/html", content)


def _plan_file(outcome: Outcome, _: Values) -> Download:
    from lengthwise.apps.plan import write_plan

    return Download("plan.json", "application/json", _written(lambda path: write_plan(path, outcome.source.plan)))


def _is_inside(name: str) -> bool:
    return bool(name.strip()) and not Path(name).is_absolute() and ".." not in Path(name).parts


def _archive(outcome: Outcome, _: Values) -> Download:
    """Return the application file with its inputs beside it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in outcome.source.files.items():
            archive.writestr(name, content)
    return Download("application.zip", "application/zip", made.getvalue())


def _written(write: Callable[[Path], Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        return path.read_bytes()
