"""Answers of the planner's page: numbers, curves over the rate, and the command and scenario that give the same."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import catalog, policy, workload
from lengthwise.report.binding import bottleneck_of
from lengthwise.report.json_file import plain
from lengthwise.report.summary_table import rows
from lengthwise.schema.errors import InputError, TraceError
from lengthwise.schema.estimate import Estimate
from lengthwise.ui.page import (
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
from lengthwise.usecases import short_options, simulate
from lengthwise.usecases.requests import workload_by_seed
from lengthwise.usecases.simulate import VariantOutcome
from lengthwise.usecases.variants import build

SHORT = ("model", "gpu", "workload", "rate", "tp")
SETTINGS = {
    "pp": "deployment.pp",
    "dp": "deployment.dp",
    "replicas": "deployment.replicas",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "policy": "scheduler.policy",
    "ttft": "slo.ttft",
    "tpot": "slo.tpot",
}
"""By field of the page: the key of the scenario."""
DEFAULTS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "weights": "",  # their dtype; "": as published
    "gpu": "H100",
    "usd_per_hour": 0,  # price of a GPU; 0: the catalog's
    "workload": "chat-1m",
    "rate": 20.0,
    "tp": None,
    "pp": 1,
    "dp": 1,
    "replicas": 1,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "policy": "vllm_v1",
    "ttft": "500ms",
    "tpot": "50ms",
    "model_file": None,
    "trace_file": None,
    "trace_columns": [],
    "replay": False,
    "turns": 1.0,
    "think": 10.0,
}
MAX_TRACE_REQUESTS = 5000  # of a trace that a simulation replays
ARRIVALS = {"dates": "arrival_date", "seconds": "arrival_s", "milliseconds": "arrival_ms"}
"""By unit: the name of the arrivals in ``--column``."""
UNITS_S = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
ROLES = {
    "arrival": "time|arriv|stamp|start|created|when|date",
    "prompt": "prompt|input|prefill|context|^in",
    "output": "output|decode|gener|compl|resp|^out",
}
"""Words by which the column of each role is guessed."""
Files = Callable[[Any], Path]
"""The path of an uploaded file by its identity."""
CURVE = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0)  # rates of the curves, in multiples of the chosen one
CARDS = (
    "ttft_s.p50",
    "ttft_s.p90",
    "tpot_s.p50",
    "jct_s.p50",
    "rates.slo",
    "rates.output",
    "cost.output",
    "hardware.busy",
)
CHARTS: dict[str, tuple[str, str, Callable[[Any], Estimate]]] = {
    "ttft": ("TTFT, p90", "s", lambda s: s.ttft_s.p90),
    "tpot": ("TPOT, p50", "s", lambda s: s.tpot_s.p50),
    "jct": ("JCT, p50", "s", lambda s: s.jct_s.p50),
    "goodput": ("Goodput", "requests/s", lambda s: s.goodput.requests_per_s),
}


def choices() -> dict[str, Any]:
    """Return the names that the page's lists offer, and the defaults of its fields."""
    schedulers = sorted({name.partition("(")[0] for axis, name, _ in policy.catalog() if axis == "scheduler"})
    return {
        "models": sorted(catalog.models()),
        "gpus": {name: gpu.price_per_hour_usd for name, gpu in sorted(catalog.gpus().items())},
        "workloads": list(workload.presets()),
        "policies": schedulers,
        "defaults": DEFAULTS,
    }


def _no_files(_: Any) -> Path:
    raise InputError("files are uploaded in a browser")


def answer(
    values: Mapping[str, Any], *, complete: bool, check: Callable[[], None] = lambda: None, files: Files = _no_files
) -> dict[str, Any]:
    """Simulate the page's settings, at the chosen rate and at the rates of the curves.

    Args:
        values: The fields of the page (DEFAULTS); others are refused.
        complete: With the seeds and the cost model's error of ``lengthwise simulate``, so that the numbers have
            intervals; otherwise one seed, which takes a tenth of the time.
        check: Called between simulations; it may raise.
        files: Paths of uploaded files.

    Raises InputError for unknown fields and names and for wrong values. Names of files are not accepted.
    """
    fields = _checked(values)
    paths = {name: files(fields[name]) for name in ("model_file", "trace_file") if fields[name] is not None}
    prices_usd = {fields["gpu"]: fields["usd_per_hour"]} if fields["usd_per_hour"] else {}
    with priced_gpus(prices_usd) as made:
        paths |= {"gpu_file": made[fields["gpu"]]} if made else {}
        return _simulated(fields, paths, complete=complete, check=check)


def _simulated(
    fields: Mapping[str, Any], paths: Mapping[str, Path], *, complete: bool, check: Callable[[], None]
) -> dict[str, Any]:
    short, settings = _inputs(fields, paths)

    def shown(text: str) -> str:
        for path in paths.values():
            text = text.replace(str(path), path.name)
        return text

    columns = short_options.columns(fields["trace_columns"])
    full = short_options.scenario_of(None, [*columns, *settings], **short)
    chosen = full if complete else full.with_run(seeds=1, model_draws=0)
    variants = build(chosen)
    outcome = simulate.run(chosen, variants=variants, jobs=1, progress=lambda *_: check())[0]
    text = full.to_toml()
    result = simulate.result_of(outcome, text)
    table = {row.metric.key: row for row in rows([result])}
    deployed = outcome.variant.deployment
    degrees = {name: getattr(deployed.parallel, name) for name in ("tp", "pp", "dp")}
    points = []
    for factor in CURVE:
        check()
        rate = fields["rate"] * factor
        curve = outcome
        if factor != 1:
            key, value = _rate(fields, rate, paths)
            rated = chosen.updated({"workload": {key: value}, "run": {"model_draws": 0}})
            same = replace(variants[0], scenario=rated, workload=workload_by_seed(rated))  # on the same deployment
            curve = simulate.run(rated, variants=[same], jobs=1)[0]
        points.append((rate, curve))
    return {
        "complete": complete,
        "deployment": f"{deployed.gpus} x {deployed.gpu.name}, "
        + "".join(f"{name} {degree}, " for name, degree in degrees.items() if degree > 1 or name == "tp")
        + f"{deployed.price_per_hour_usd:.2f} $/h",
        "cards": [_card(table[key]) for key in CARDS if key in table],
        "charts": {key: _chart(key, points) for key in CHARTS},
        "shares": _shares(outcome),
        "bottleneck": plain(bottleneck_of(result)),
        "notes": [shown(note) for note in outcome.notes],
        "gpu_files": {path.name: path.read_text("utf-8") for name, path in paths.items() if name == "gpu_file"},
        "command": shown(_command(short, fields["trace_columns"], settings)),
        "scenario": shown(text),
    }


def _inputs(fields: Mapping[str, Any], paths: Mapping[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """Return the short options and the settings of the command that simulates the fields."""
    short = {name: fields[name] for name in SHORT}
    settings = [f"{key}={fields[name]}" for name, key in SETTINGS.items()]
    key, value = _rate(fields, fields["rate"], paths)
    short |= {name: str(paths[f"{name}_file"]) for name in ("model", "gpu") if f"{name}_file" in paths}
    if "trace_file" in paths:
        short["workload"] = str(paths["trace_file"])
        trace = _trace(paths["trace_file"], tuple(fields["trace_columns"]))
        settings.append(f"workload.num_requests={min(trace.requests, MAX_TRACE_REQUESTS)}")
        settings += trace.settings
    elif key == "session_rate":
        settings.append(f"workload.sessions.turns={fields['turns']:g}")
        settings.append(f"workload.sessions.think_time={fields['think']:g}s")
        settings.append("engine.enable_prefix_caching=true")
    if key != "request_rate":
        settings.append(f"workload.{key}={value:.15g}")
    if key == "time_scale":
        short["rate"] = None
    return short, settings


def _rate(fields: Mapping[str, Any], rate_rps: float, paths: Mapping[str, Path]) -> tuple[str, float]:
    """Return the key of [workload] that sets the rate, and its value. Raises InputError if nothing can be replayed."""
    if "trace_file" not in paths:
        return ("session_rate", rate_rps / fields["turns"]) if fields["turns"] > 1 else ("request_rate", rate_rps)
    if not fields["replay"]:
        return "request_rate", rate_rps
    return "time_scale", _trace(paths["trace_file"], tuple(fields["trace_columns"])).time_scale(rate_rps)


@dataclass(frozen=True)
class _Trace:
    requests: int
    rate_rps: float  # infinite if all requests arrive at once
    prompt_tokens: float  # means
    output_tokens: float
    first_rps: float  # of the first MAX_TRACE_REQUESTS, which a simulation replays
    settings: tuple[str, ...]  # what else the command needs to read it

    def time_scale(self, rate_rps: float) -> float:
        """Return the factor on its times at which it has a rate. Raises InputError if nothing can be replayed."""
        if not math.isfinite(self.first_rps):
            raise InputError("the trace has no arrivals to replay: all its requests arrive at once")
        return self.first_rps / rate_rps


@lru_cache(maxsize=64)
def _trace(path: Path, columns: tuple[str, ...]) -> _Trace:
    """Return the facts of a trace, read as by ``--column`` with these texts. Raises InputError without its folder."""
    by_name = dict(one.split("=", 1) for one in columns) or None
    settings: tuple[str, ...] = ()
    try:
        try:
            found = workload.read(path, format=by_name)
        except TraceError:
            found, settings = workload.read(path, format=by_name, sort=True), ("workload.sort=true",)
    except TraceError as error:
        raise InputError(str(error).replace(str(path), path.name)) from None
    means = float(found.prompt_tokens.mean()), float(found.output_tokens.mean())
    rates_rps = (_rate_rps(found.arrival_s[:most]) for most in (None, MAX_TRACE_REQUESTS))
    return _Trace(len(found), next(rates_rps), *means, next(rates_rps), settings)


def _rate_rps(arrival_s: Any) -> float:
    span_s = float(arrival_s[-1] - arrival_s[0])
    return (len(arrival_s) - 1) / span_s if span_s > 0 else math.inf


def require_columns(fields: Values) -> list[str]:
    """Return the texts of ``--column`` for an uploaded trace."""
    given = fields["trace_columns"]
    if not isinstance(given, list) or not all(isinstance(one, str) and "=" in one for one in given):
        raise InputError(f"trace_columns must be a list of texts NAME=COLUMN; it is {given!r}")
    return given if fields["trace_file"] is not None else []


def trace_settings(path: Path, columns: Sequence[str], replayed_rps: float | None = None) -> list[str]:
    """Return the settings with which a command reads an uploaded trace.

    With ``replayed_rps``, its first requests arrive as in the trace, at this mean rate. Raises InputError if it cannot
    be read, or has no arrivals to replay.
    """
    found = _trace(path, tuple(columns))
    settings = list(found.settings)
    if replayed_rps is not None:
        settings.append(f"workload.num_requests={min(found.requests, MAX_TRACE_REQUESTS)}")
        settings.append(f"workload.time_scale={found.time_scale(replayed_rps):.15g}")
    return settings


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with their defaults. Raises InputError for fields and values that the page does not have."""
    fields = fields_of(dict(values), DEFAULTS)
    if fields["model_file"] is None:
        fields["model"] = require_model(fields["model"], fields["weights"])
    require_name("GPU", fields["gpu"], catalog.gpus())
    require_name("scheduler", fields["policy"], choices()["policies"])
    require_workload(fields["workload"])
    for name in ("rate", "tp", "pp", "dp", "replicas", "max_num_seqs", "max_num_batched_tokens", "turns", "think"):
        if name != "tp" or fields[name] is not None:
            require_number(name, fields[name])
    if fields["usd_per_hour"] != 0:
        require_number("usd_per_hour", fields["usd_per_hour"])
    fields["replay"] = fields["replay"] is True
    fields["trace_columns"] = require_columns(fields)
    for name in ("ttft", "tpot"):
        require_time(name, fields[name])
    return fields


def _card(row: Any) -> dict[str, str]:
    cell = row.cells[0]
    return {
        "label": row.metric.label,
        "unit": row.unit,
        "value": cell.text,
        "interval": cell.interval,
        "model": cell.model,
    }


def _chart(key: str, points: list[tuple[float, VariantOutcome]]) -> dict[str, Any]:
    label, unit, read = CHARTS[key]
    estimates: list[Estimate] = [read(outcome.summary) for _, outcome in points]
    return {
        "label": label,
        "unit": unit,
        "rates": [rate for rate, _ in points],
        "values": [_number(one.value) for one in estimates],
        "half_widths": [_number(one.half_width) for one in estimates],
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _shares(outcome: VariantOutcome) -> list[dict[str, Any]]:
    """Return the mean seconds of a finished request in the queue, in prefill, and in decode, for the first seed."""
    r = outcome.records.requests
    done = np.isfinite(r.finished_s)
    if not done.any():
        return []
    parts = [("queue", r.arrival_s, r.scheduled_s), ("prefill", r.scheduled_s, r.first_token_s)]
    parts.append(("decode", r.first_token_s, r.finished_s))
    return [{"part": name, "mean_s": float((end[done] - start[done]).mean())} for name, start, end in parts]


def _command(short: Mapping[str, Any], columns: Sequence[str], settings: Sequence[str]) -> str:
    """Return the command that gives the complete answer."""
    words = ["lengthwise", "simulate"]
    for name, value in short.items():
        if value is not None and not (name == "workload" and value == DEFAULTS["workload"]):
            words += [f"--{name}", f"{value:.15g}" if isinstance(value, float) else str(value)]
    words += [word for one in columns for word in ("--column", one)]
    same = {f"{key}={DEFAULTS[name]}" for name, key in SETTINGS.items() if not key.startswith("slo.")}
    for setting in settings:
        if setting not in same:  # the other defaults are those of a scenario
            words += ["--set", setting]
    return shlex.join(words)


def columns(values: Values, task: Task) -> dict[str, Any]:
    """Return what an uploaded trace has: its format if it is known, else its columns and a guess of their roles."""
    path = task.session.file(values.get("file"))
    if workload.detect(path) is not None:
        return _described(path, values["file"], [])
    rows = list(itertools.islice(_rows(path), 3))
    if not rows:
        raise InputError("the trace must be CSV with a header, or JSONL, and have at least one row")
    names = list(rows[0])
    guesses = {
        role: next((name for name in names if re.search(words, name, re.IGNORECASE)), names[0])
        for role, words in ROLES.items()
    }
    words = re.split(r"[^a-z]+", guesses["arrival"].lower())
    named = (unit for word, unit in zip(("ms", "us", "ns"), [*UNITS_S][1:], strict=True) if word in words)
    is_number = re.fullmatch(r"[-+.\deE]+", str(rows[0][guesses["arrival"]]).strip())
    unit = next(named, "seconds") if is_number else "dates"
    return {"columns": names, "sample": rows, "guesses": guesses, "units": ["dates", *UNITS_S], "unit": unit}


def trace(values: Values, task: Task) -> dict[str, Any]:
    """Describe an uploaded trace with the columns that the fields map.

    What the option ``--column`` does not read (JSON lines, other units of time) is stored again as a CSV file that it
    does.
    """
    path = task.session.file(values.get("file"))
    names = {role: str(values.get(role)) for role in ROLES}
    unit = require_name("unit of time", values.get("unit"), ["dates", *UNITS_S])
    with path.open("rb") as file:
        is_csv = file.read(1) != b"{"
    if is_csv and unit in ARRIVALS:
        own = zip(("prompt_tokens", "output_tokens", ARRIVALS[unit]), ("prompt", "output", "arrival"), strict=True)
        return _described(path, values["file"], [f"{name}={names[role]}" for name, role in own])
    made = io.StringIO()
    out = csv.writer(made, lineterminator="\n")
    form = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    out.writerow(form if unit == "dates" else ("arrived_at", "num_prefill_tokens", "num_decode_tokens"))
    found: list[tuple[Any, Any, Any]] = []
    for number, row in enumerate(_rows(path), 1):
        if number % 1000 == 0:
            task.check()
        if missing := [name for name in names.values() if name not in row]:
            raise InputError(f"row {number} of the trace must have a column {missing[0]!r}; it has {', '.join(row)}")
        arrival, prompt, output = (row[name] for name in names.values())
        if unit != "dates":
            try:
                arrival = float(arrival) * UNITS_S[unit]
            except (TypeError, ValueError):
                raise InputError(
                    f"column {names['arrival']!r} must have numbers of {unit}; row {number} has {arrival!r}"
                ) from None
        found.append((arrival, prompt, output))
    found.sort(key=lambda one: str(one[0]) if unit == "dates" else one[0])
    out.writerows(found)
    identity = task.session.store(f"{path.stem}-converted.csv", made.getvalue().encode())
    return _described(task.session.file(identity), identity, []) | {"text": made.getvalue()}


def _described(path: Path, identity: str, columns: list[str]) -> dict[str, Any]:
    found = _trace(path, tuple(columns))
    return {
        "file": identity,
        "name": path.name,
        "columns_by_name": columns,
        "text": None,
        "requests": found.requests,
        "rate": found.rate_rps if math.isfinite(found.rate_rps) else None,
        "prompt": found.prompt_tokens,
        "output": found.output_tokens,
    }


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file or of JSON lines. Raises InputError for others."""
    for number, row in enumerate(_lines(path), 1):
        if not isinstance(row, dict) or None in row:
            raise InputError(f"row {number} of {path.name} must have names, and no more cells than the header")
        yield row


def _lines(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            yield from (json.loads(line) for line in file if line.strip()) if is_json else csv.DictReader(file)
    except (UnicodeDecodeError, csv.Error, ValueError, RecursionError) as error:
        raise InputError(f"{path.name} must be CSV with a header, or JSONL: {error}") from None


def _answer(values: Values, task: Task) -> dict[str, Any]:
    return answer(values, complete=values.pop("complete", False) is True, check=task.check, files=task.session.file)


PAGE = Page("plan", "Plan", choices, {"answer": _answer, "columns": columns, "trace": trace})
