"""The Studies page: the differences of two scenarios, and of two JSON answers of the command line.

Stored answers are in the browser alone; the server sees the two texts that are compared.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from lengthwise.report.compare import NAMES
from lengthwise.report.formatting import PLUS_MINUS, UNKNOWN, percent, rounded
from lengthwise.schema.errors import InputError
from lengthwise.schema.metric_names import LATENCIES, QUANTILES
from lengthwise.ui.page import Page, Values, fields_of, require_name
from lengthwise.ui.work import Task

DEFAULTS: dict[str, Any] = {"first_file": None, "second_file": None, "first": "", "second": ""}
MAX_TEXT = 28_000  # as the browser stores
_KEYS = {
    "rates.requests_per_s": "requests_per_s",
    "rates.output_tokens_per_s": "output_tokens_per_s",
    "goodput.requests_per_s": "goodput",
    "goodput.share": "within_slo",
    "prefix_cache.hit_rate": "hit_rate",
}
"""Names of ``lengthwise compare`` by key of a summary, where they differ by more than a unit."""
_SHARES = ("within_slo", "hit_rate")


def diff(values: Values, _: Task) -> dict[str, Any]:
    """Return the keys in which two scenarios differ, with both values. Raises InputError for a text that is no TOML."""
    fields = fields_of(values, {"first": "", "second": ""})
    return differences(*(_table(name, fields[name]) for name in ("first", "second")))


def differences(first: Mapping[str, Any], second: Mapping[str, Any], *, shared: bool = False) -> dict[str, Any]:
    """Return the keys, with dots, in which two tables differ, and how many are equal; or only of those both have."""
    try:
        a, b = (dict(_flat(table)) for table in (first, second))
    except RecursionError:
        raise InputError("the tables are nested too deeply to be compared") from None
    keys = sorted(a.keys() & b.keys() if shared else a.keys() | b.keys())
    rows = [[key, a.get(key, UNKNOWN), b.get(key, UNKNOWN)] for key in keys if a.get(key) != b.get(key)]
    return {"rows": rows, "same": len(keys) - len(rows)}


def _table(name: str, text: Any) -> dict[str, Any]:
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise InputError(
            f"the {name} scenario must be the text of a scenario file with at most {MAX_TEXT:,} characters"
        )
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"the {name} scenario is no TOML: {error}") from None


def _flat(value: Any, keys: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{keys}.{key}" if keys else str(key))
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for at, inner in enumerate(value):
            name = inner.get("name", at) if isinstance(inner, Mapping) else at
            yield from _flat(inner, f"{keys}[{name}]")
    else:
        yield keys, value if isinstance(value, str) else json.dumps(value, default=str)


def compare(values: Values, task: Task) -> dict[str, Any]:
    """Compare two files of ``simulate --json`` or ``search --json`` as ``lengthwise compare`` does: (A - B) / B.

    Intervals follow from those of both sides, as if their noise were independent. Raises InputError for other files.
    """
    fields = fields_of(values, DEFAULTS)
    sides = []
    for name in ("first", "second"):
        if not fields[f"{name}_file"]:
            raise InputError("choose two files that simulate --json or search --json wrote")
        path = task.session.file(fields[f"{name}_file"])
        kind, answers = _answers(path.name, path.read_bytes())
        chosen = require_name("result", fields[name] or next(iter(answers)), answers)
        sides.append((kind, list(answers), chosen, *answers[chosen]))
    (a_format, a_names, a_name, a, a_settings), (b_format, b_names, b_name, b, b_settings) = sides
    rows = [_row(key, a[key], b[key]) for key in a if key in b]
    if not rows:
        raise InputError("the two answers have no number in common")
    return {
        "names": [a_names, b_names],
        "chosen": [a_name, b_name],
        "rows": rows,
        # a choice of a search has only the settings that the search varied
        "settings": differences(a_settings, b_settings, shared=a_format != b_format),
    }


def _answers(name: str, content: bytes) -> tuple[str, dict[str, tuple[dict[str, tuple[float, float]], dict[str, Any]]]]:
    """Return the format of a JSON answer and, for each of its results, numbers (value, half-width) and settings."""
    wrong = InputError(f"{name} is no answer with numbers; choose a file that simulate --json or search --json wrote")
    try:
        document = json.loads(content)
        found = {}
        if document["format"] == "lengthwise.results":
            for one in document["results"]:
                found[str(one["name"])] = _numbers(one["summary"]), _table(name, one.get("scenario") or "")
        elif document["format"] == "lengthwise.study":
            plans = document["plans"]
            for plan in plans:
                for one in plan["choices"]:
                    key = f"{plan['name']}: {one['name']}" if len(plans) > 1 else str(one["name"])
                    if one.get("at"):
                        numbers = _numbers(one["at"]["values"] | {"objective": one["objective"]})
                        found[key] = numbers, dict(one["settings"])
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
        raise wrong from None
    if not found:
        raise wrong
    return document["format"], found


def _numbers(summary: Mapping[str, Any], keys: tuple[str, ...] = ()) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for key, value in summary.items():
        if not isinstance(value, Mapping):
            continue
        if "value" not in value:
            found |= _numbers(value, (*keys, key))
            continue
        name = ".".join((*keys, key))
        name = _KEYS.get(name, name.replace("_s.", "."))
        metric, _, stat = name.partition(".")
        number, half = (_finite(value.get(one)) for one in ("value", "half_width"))
        if not math.isnan(number) and (name == "objective" or (metric in NAMES and stat in ("", "mean", *QUANTILES))):
            found[name] = number, half
    return found


def _finite(value: Any) -> float:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else math.nan


def _row(key: str, a: tuple[float, float], b: tuple[float, float]) -> list[str]:
    metric, _, stat = key.partition(".")
    label = f"{NAMES.get(metric, metric)} {stat}".strip()
    error, half = relative_error(a, b)
    shown = f"{100 * error:+.1f} %" if math.isfinite(error) else UNKNOWN
    interval = "" if not math.isfinite(half) else f"{100 * (error - half):+.1f} to {100 * (error + half):+.1f} %"
    return [label, _text(metric, *a), _text(metric, *b), shown, interval]


def relative_error(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Return (a - b) / b and its half-width, from values with half-widths of independent noise, to first order."""
    if not b[0]:
        return math.nan, math.nan
    return a[0] / b[0] - 1, math.hypot(a[1], a[0] / b[0] * b[1]) / abs(b[0])


def _text(metric: str, value: float, half: float) -> str:
    if metric in _SHARES:
        return percent(value)
    scale, unit = ((1e3, " ms") if abs(value) < 1 else (1, " s")) if metric in LATENCIES else (1, "")
    number, interval = rounded(value * scale, half * scale)
    return f"{number}{f' {PLUS_MINUS} {interval}' if interval not in ('', '0') else ''}{unit}"


PAGE = Page("studies", "Studies", answers={"diff": diff, "compare": compare})
