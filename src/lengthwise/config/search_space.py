"""The space of a search, as a file writes it: checked value by value before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lengthwise.config.files import merged
from lengthwise.config.sections import DeploymentSection, EngineSection, SchedulerSection
from lengthwise.config.validation import Problem
from lengthwise.config.values import seconds
from lengthwise.schema.errors import InputError
from lengthwise.schema.plan import Limit
from lengthwise.search import Space, check_limit

SearchTable = dict[str, Any]

VARIABLE = {
    f"{name}.{key}": section
    for name, section in (("deployment", DeploymentSection), ("engine", EngineSection), ("scheduler", SchedulerSection))
    for key in section.model_fields
}
"""Settings that may be an axis."""

_METRICS = {"itl": "tbt", "e2e": "jct", "e2el": "jct", "delay": "queueing_delay", "queueing": "queueing_delay"}
_OWN = {"scheduler": "scheduler.policy", "batch": "engine.max_num_seqs", "chunk": "engine.max_num_batched_tokens"}


def flat(table: Mapping[str, Any], local: str = "") -> SearchTable:
    """Nested tables as one with dotted keys."""
    out: SearchTable = {}
    for key, value in table.items():
        name = f"{local}{str(key).replace('-', '_')}"
        if isinstance(value, dict):
            out |= flat(value, f"{name}.")
        else:
            out[name] = value
    return out


def axis_name(text: str, aliases: Mapping[str, Mapping[str, str]]) -> str:
    """The dotted key of a setting by any of its names; an unknown one comes back as it is."""
    section, dot, key = text.rpartition(".")
    if dot:
        return f"{section}.{aliases.get(section, {}).get(key, key)}"
    if text in _OWN:
        return _OWN[text]
    for name in ("deployment", "engine", "scheduler"):
        whole = f"{name}.{aliases.get(name, {}).get(text, text)}"
        if whole in VARIABLE:
            return whole
    return text


def limit_names(table: Mapping[str, Any]) -> SearchTable:
    """``ttft.p90 = "2s"`` and ``e2e = { p99 = "9s" }`` by the metric's one spelling."""
    out: SearchTable = {}
    for text, value in flat(table).items():
        metric, dot, statistic = text.partition(".")
        out[f"{_METRICS.get(metric, metric)}{dot}{statistic}"] = value
    return out


Table = dict[str, Any]

REPLICAS = "deployment.replicas"
FILL, AUTO = "fill", "auto"
LEAST = ("goodput", "served", "requests_per_s", "output_tokens_per_s", "mfu", "mbu", "batch_seqs")
"""Metrics of which there must be enough; of all others there may be too much."""


def space_of(section: Any) -> Space:
    """The axes of [search]; a single value is an axis of one."""
    return Space(_tuples(section.space), tuple(_tuples(own) for own in section.any_of))


def limits_of(section: Any) -> tuple[Limit, ...]:
    """The limits of [search]; raises InputError where a metric or a bound makes no sense."""
    return tuple(check_limit(_limit(metric, bound)) for metric, bound in section.limits.items())


def with_first_values(settings: Table) -> Table:
    """The settings, what they leave out filled with the first value of its axis."""
    search = settings.get("search")
    if not isinstance(search, dict):
        return settings
    filled = settings
    for axes in (search.get("space"), *_tables(search.get("any_of"))):
        for key, values in (axes or {}).items() if isinstance(axes, dict) else ():
            section, _, leaf = key.rpartition(".")
            first = _entries(values)[:1]
            if key in VARIABLE and first and key != REPLICAS and leaf not in _table(filled, section):
                filled = merged(filled, {section: {leaf: first[0]}})
    return filled


def space_problems(settings: Table) -> list[Problem]:
    """What is wrong with the limits and axes of whole settings."""
    search = settings.get("search")
    if not isinstance(search, dict):
        return []
    here = ("search", "space")
    found = _axis_problems(search.get("space"), here)
    for at, own in enumerate(_tables(search.get("any_of"))):
        found += _axis_problems(own, ("search", "any_of", str(at)))
    return found + _limit_problems(search.get("limits"))


def _axis_problems(axes: Any, local: tuple[str, ...]) -> list[Problem]:
    if not isinstance(axes, dict):
        return []
    found: list[Problem] = []
    for key, values in axes.items():
        if key not in VARIABLE:
            hint = _nearest(key)
            found.append(Problem((*local, key), f"is no setting that a search can vary; {hint}"))
        elif not _entries(values):
            found.append(Problem((*local, key), "must have at least one value; it has none"))
        else:
            found += [p for value in _entries(values) for p in _value_problems(key, value, local)]
    return found


def _nearest(key: str) -> str:
    leaves = {name.rpartition(".")[2]: name for name in VARIABLE}
    near = difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.6)
    return f"did you mean {leaves[near[0]]}?" if near else f"it may be one of {', '.join(VARIABLE)}"


def _value_problems(key: str, value: Any, local: tuple[str, ...]) -> list[Problem]:
    """Whether a section takes the value, alone: what it asks of other keys is seen when it is built."""
    from lengthwise.config.validation import findings

    section, leaf = VARIABLE[key], key.rpartition(".")[2]
    if key == REPLICAS and value in (FILL, AUTO):
        return []
    try:
        section.model_validate({**_REQUIRED.get(section.__name__, {}), leaf: value})
    except ValidationError as error:
        return [Problem((*local, key), problem.text) for problem in findings(error, section)]
    return []


def _limit_problems(limits: Any) -> list[Problem]:
    if not isinstance(limits, dict):
        return []
    found = []
    for metric, bound in limits.items():
        try:
            check_limit(_limit(metric, bound))
        except (InputError, ValueError) as error:
            found.append(Problem(("search", "limits", metric), str(error)))
    return found


def _limit(metric: str, bound: Any) -> Limit:
    value = seconds(bound)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'must be a number or a text with a unit ("200ms"); it is {bound!r}')  # noqa: TRY004
    return Limit(metric, float(value), at_least=metric in LEAST)


_REQUIRED: dict[str, Table] = {"DeploymentSection": {"model": "any", "gpu": "any"}}


def _tuples(axes: Table) -> dict[str, tuple[Any, ...]]:
    return {key: tuple(_entries(values)) for key, values in axes.items()}


def _entries(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _tables(values: Any) -> list[Any]:
    return values if isinstance(values, list) else []


def _table(settings: Table, section: str) -> Table:
    found = settings.get(section)
    return found if isinstance(found, dict) else {}
