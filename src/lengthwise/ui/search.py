"""The Search page: the cheapest deployments within limits, with their front of cost and latency, and their files."""

from __future__ import annotations

import io
import json
import shlex
import tempfile
import weakref
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lengthwise import catalog, search, workload
from lengthwise.config.scenario import Scenario
from lengthwise.report import search_json, write_search_html
from lengthwise.report.search import search_columns
from lengthwise.schema.errors import InputError
from lengthwise.schema.plan import Choice, Status, Study
from lengthwise.ui import plan
from lengthwise.ui.page import (
    Download,
    Outcome,
    Page,
    Values,
    fields_of,
    priced_gpus,
    require_model,
    require_name,
    require_number,
    require_time,
    require_workload,
)
from lengthwise.ui.work import Task
from lengthwise.usecases import search as usecase
from lengthwise.usecases import short_options

DEFAULTS: dict[str, Any] = {
    "model": "llama-3.1-70b",
    "weights": "",  # their dtype; "": as published
    "gpus": ["H100", "L40S"],
    "prices": {},  # of a GPU in dollars an hour, by name; others: the catalog's
    "workload": "chat-1m",
    "rate": 5.0,
    "tp": ["1", "2", "4", "8"],
    "ttft.p90": "2000ms",
    "tbt.p99": "200ms",
    "max_usd_per_hour": 0,
    "num_requests": 1000,
    "seeds": 5,
    "trace_file": None,
    "trace_columns": [],
    "replay": False,
}
LIMITS = ("ttft.p90", "tbt.p99")
MAX_GPUS = 8


def choices() -> dict[str, Any]:
    """Return the names that the page's lists offer, and the defaults of its fields."""
    return {
        "models": sorted(catalog.models()),
        "gpus": {name: gpu.price_per_hour_usd for name, gpu in sorted(catalog.gpus().items())},
        "workloads": list(workload.presets()),
        "defaults": DEFAULTS,
    }


def run(values: Values, task: Task) -> Outcome:
    """Search with the fields of the page. Raises InputError for unknown fields and names and for wrong values."""
    fields = _checked(values)
    with ExitStack() as end:
        own = {name: price for name, price in fields["prices"].items() if name in fields["gpus"]}
        outcome = _searched(fields, end.enter_context(priced_gpus(own)), task)
        weakref.finalize(outcome, end.pop_all().close)  # its downloads read the files of the prices
    return outcome


def _searched(fields: Values, priced: dict[str, Path], task: Task) -> Outcome:
    limits = {name: fields[name] for name in LIMITS if fields[name]}
    short = {"model": fields["model"], "gpus": ",".join(str(priced.get(name, name)) for name in fields["gpus"])}
    trace = None if fields["trace_file"] is None else task.session.file(fields["trace_file"])
    replayed_rps = fields["rate"] if trace is not None and fields["replay"] is True else None
    short |= {"rate": fields["rate"] if replayed_rps is None else None}
    short |= {"workload": fields["workload"] if trace is None else str(trace)}
    settings = _settings(fields if replayed_rps is None else fields | {"num_requests": DEFAULTS["num_requests"]})
    if trace is not None:
        settings += plan.trace_settings(trace, fields["trace_columns"], replayed_rps)
    given = [f"{name}={bound}" for name, bound in limits.items()]
    columns = short_options.columns(fields["trace_columns"])
    scenario = short_options.scenario_of(None, [*columns, *short_options.limits(given), *settings], **short)
    words = ["lengthwise", "search", "--model", fields["model"], "--gpu", short["gpus"]]
    words += ["--rate", f"{fields['rate']:.15g}"] if replayed_rps is None else []
    words += ["--workload", fields["workload"] if trace is None else trace.name]
    words += [word for column in fields["trace_columns"] for word in ("--column", column)]
    words += [word for limit in given for word in ("--limit", limit)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--report", "report.html", "--deploy", "launch"]
    with search.threads(task.threads) as workers:
        study = usecase.plan(scenario, workers, progress=task.report)
    paths = [*([] if trace is None else [trace]), *priced.values()]
    columns_text = json.dumps(search_columns(study.plans[0]))
    for name, path in priced.items():
        columns_text = columns_text.replace(str(path), name)
    found = json.loads(_named(columns_text, paths))
    found |= {"command": _named(shlex.join(words), paths), "scenario": _named(scenario.to_toml(), paths)}
    found["gpu_files"] = {path.name: path.read_text("utf-8") for path in priced.values()}
    return Outcome(found, (scenario, study, paths))


def _named(text: str, paths: Sequence[Path]) -> str:
    """Return a text with the names of the browser's files instead of their places on the server."""
    for path in paths:
        text = text.replace(str(path), path.name)
    return text


def _checked(values: Values) -> Values:
    fields = fields_of(values, DEFAULTS)
    fields["model"] = require_model(fields["model"], fields["weights"])
    require_workload(fields["workload"])
    fields["trace_columns"] = plan.require_columns(fields)
    for name, known in (("gpus", catalog.gpus()), ("tp", ["1", "2", "4", "8", "16"])):
        if not isinstance(fields[name], list) or not 0 < len(fields[name]) <= MAX_GPUS:
            raise InputError(f"{name} must be a list of 1 to {MAX_GPUS} names; it is {fields[name]!r}")
        for one in fields[name]:
            require_name("GPU" if name == "gpus" else "tp", one, known)
    for name, most in (("rate", 1e6), ("num_requests", 20_000), ("seeds", 50)):
        require_number(name, fields[name], most)
    if fields["max_usd_per_hour"]:
        require_number("max_usd_per_hour", fields["max_usd_per_hour"])
    if not isinstance(fields["prices"], dict):
        raise InputError(f"prices must be a table of dollars an hour by GPU; it is {fields['prices']!r}")
    for name, price in fields["prices"].items():
        require_number(f"the price of {require_name('GPU', name, catalog.gpus())}", price)
    for name in LIMITS:
        if fields[name]:
            require_time(name, fields[name])
    return fields


def _settings(fields: Values) -> list[str]:
    """Return the settings that the short options of the command do not have."""
    settings = []
    if fields["tp"] != DEFAULTS["tp"]:
        settings.append(f"search.space.tp=[{', '.join(fields['tp'])}]")
    if fields["max_usd_per_hour"]:
        settings.append(f"search.max_usd_per_hour={fields['max_usd_per_hour']:.15g}")
    for name, key in (("num_requests", "workload.num_requests"), ("seeds", "search.seeds")):
        if fields[name] != DEFAULTS[name]:
            settings.append(f"{key}={fields[name]:g}")
    return settings


def _report(outcome: Outcome, _: Values) -> Download:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "report.html"
        write_search_html(place, outcome.source[1])
        text = _named(place.read_text("utf-8"), outcome.source[2])
        return Download("search.html", "text/html", text.encode())


def _json(outcome: Outcome, _: Values) -> Download:
    text = _named(search_json(outcome.source[1]), outcome.source[2])
    return Download("search.json", "application/json", text.encode())


def _chosen(outcome: Outcome, values: Values) -> tuple[Scenario, Study, Choice]:
    scenario, study, _ = outcome.source
    ranked = {choice.name: choice for choice in study.plans[0].choices if choice.status is Status.RANKED}
    return scenario, study, ranked[require_name("ranked configuration", values.get("choice"), ranked)]


def _choice_scenario(outcome: Outcome, values: Values) -> Download:
    scenario, _, choice = _chosen(outcome, values)
    text = usecase.scenario_of_choice(usecase.questions(scenario)[0], choice).to_toml()
    text = _named(text, outcome.source[2])
    return Download("scenario.toml", "application/toml", text.encode())


def _launch(outcome: Outcome, values: Values) -> Download:
    """Return the files of ``--deploy`` for one configuration as a ZIP archive."""
    scenario, study, choice = _chosen(outcome, values)
    alone = Study(study.name, (replace(study.plans[0], choices=(choice,)),))
    made = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        usecase.write_launches(scenario, alone, Path(folder) / "launch")
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    text = _named(path.read_text("utf-8"), outcome.source[2])
                    archive.writestr(path.relative_to(folder).as_posix(), text)
    return Download("launch.zip", "application/zip", made.getvalue())


PAGE = Page(
    "search",
    "Search",
    choices,
    jobs={"run": run},
    downloads={"report": _report, "json": _json, "scenario": _choice_scenario, "launch": _launch},
)
