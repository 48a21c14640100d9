"""Reads the axes and the limits of a search from a file's tables, and checks every value before anything runs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lengthwise import search
from lengthwise.config.files import Table, merged
from lengthwise.config.sections import (
    DecodeSection,
    DeploymentSection,
    EngineSection,
    KVOffloadingTable,
    SchedulerSection,
    SearchSection,
    SpeculationTable,
)
from lengthwise.config.validation import Problem, validated
from lengthwise.config.values import Section, seconds
from lengthwise.schema import metric_names
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.schema.plan import Limit

_SECTIONS: dict[str, type[Section]] = {"deployment": DeploymentSection, "engine": EngineSection}
_SECTIONS |= {"scheduler": SchedulerSection}
VARIABLE = {f"{name}.{key}": section for name, section in _SECTIONS.items() for key in section.model_fields}
VARIABLE |= {f"engine.kv_offloading.{key}": KVOffloadingTable for key in KVOffloadingTable.model_fields}
VARIABLE |= {f"deployment.speculation.{key}": SpeculationTable for key in SpeculationTable.model_fields}
VARIABLE |= {f"deployment.decode.{key}": DecodeSection for key in DecodeSection.model_fields}
"""The settings that may be an axis: section class by dotted key."""
_AXES = {
    "engine": "engine.name",
    "scheduler": "scheduler.policy",
    "batch": "engine.max_num_seqs",
    "chunk": "engine.max_num_batched_tokens",
}
_WITHOUT_DEFAULT = ("deployment.model", "deployment.gpu")
_PLAUSIBLE_S = {
    "ttft": 60, "queueing_delay": 60, "tpot": 5, "tbt": 5, "jct": 600, "latency_bound": 600,
    "latency": 5, "kv_transfer": 5,
}  # fmt: skip
"""By key, the seconds above which a number without unit is probably milliseconds."""
LOWER_BOUNDED = ("within_slo", "served", "requests_per_s", "output_tokens_per_s", "mfu", "mbu", "batch_seqs")
"""Metrics on which a limit is a lower bound; on all others it is an upper bound."""


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Return nested tables as one table with dotted keys, in which "-" becomes "_"."""
    out: Table = {}
    for key, value in table.items():
        name = f"{prefix}{str(key).replace('-', '_')}"
        out |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return out


def nested(key: str, value: Any) -> Table:
    """Return nested tables with a value at a dotted key, such as {"a": {"b": value}} for "a.b"."""
    head, dot, rest = key.partition(".")
    return {head: nested(rest, value) if dot else value}


def value_at(tables: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys in nested tables; None if there is none."""
    for key in path:
        tables = tables.get(key) if isinstance(tables, dict) else None
    return tables


def axis_name(text: str, aliases: Mapping[str, Mapping[str, str]]) -> str:
    """Return the dotted key of a setting for an alias or a short name ("tp"). An unknown name does not change."""
    section, dot, key = text.rpartition(".")
    if section == "kv_offloading":
        return f"engine.{text}"
    if section == "speculation":
        return f"deployment.{text}"
    if section == "decode":
        return f"deployment.decode.{aliases.get('deployment', {}).get(key, key)}"
    if dot:
        return f"{section}.{aliases.get(section, {}).get(key, key)}"
    names = (f"{name}.{aliases.get(name, {}).get(text, text)}" for name in _SECTIONS)
    return _AXES.get(text) or next((name for name in names if name in VARIABLE), text)


def limit_names(table: Mapping[str, Any]) -> Table:
    """Return limits by metric and statistic: ``e2e = { p99 = "9s" }`` becomes "jct.p99"."""
    out: Table = {}
    for text, value in flat(table).items():
        out[".".join(filter(None, metric_names.split(text)))] = value
    return out


def unit_notes(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a warning of each number without unit that is a long time in seconds and is thus probably milliseconds."""
    return [
        f'{prefix}{key} = {value:g} is {value:g} s; write "{value:g}ms" if you mean milliseconds'
        for key, values in flat(table).items()
        for value in _values(values)
        if type(value) in (int, float) and math.isfinite(value)
        for part in key.split(".")
        if value > _PLAUSIBLE_S.get(part, math.inf)
    ]


def space_of(section: SearchSection) -> search.Space:
    """Return the search space of [search]. A value that is no list is an axis with one value."""

    def axes(table: Table) -> dict[str, tuple[Any, ...]]:
        return {key: tuple(_values(values)) for key, values in table.items()}

    return search.Space(axes(section.space), tuple(map(axes, section.any_of)))


def limits_of(section: SearchSection) -> tuple[Limit, ...]:
    """Return the limits of [search]. Raises InputError or UnknownNameError if a limit is not valid."""
    return tuple(_limit(metric, bound) for metric, bound in section.limits.items())


def with_first_values(settings: Table) -> Table:
    """Return the settings, where each missing setting that has an axis gets the axis's first value.

    Two settings stay missing, and thus have their defaults: one that only some tables of ``any_of`` vary, because the
    other tables search with its default (if it has one), and ``disaggregate`` beside a table ``deployment.decode`` of
    the scenario or of a variant, from which it gets its value.
    """
    out, given = settings, settings.get("variants")
    decode = ("deployment", "decode")
    has_decode = any(
        value_at(one, decode) is not None for one in (settings, *(given if isinstance(given, list) else ()))
    )
    spaces = _spaces(settings)
    parts = [axes for path, axes in spaces if path[1] == "any_of"]
    for path, axes in spaces:
        for key, values in axes.items():
            first = _values(values)[:1]
            takes_first = key != search.REPLICAS and VARIABLE.get(key) not in (None, DecodeSection)
            takes_first &= not (has_decode and key == "deployment.disaggregate")
            takes_first &= path[1] == "space" or key in _WITHOUT_DEFAULT or all(key in part for part in parts)
            if takes_first and first and value_at(out, key.split(".")) is None:
                out = merged(out, nested(key, first[0]))
    return out


def space_problems(settings: Table) -> list[Problem]:
    """Return the problems of the axes and of the limits of a search."""
    found: list[Problem] = []
    for path, axes in _spaces(settings):
        for key, values in axes.items():
            if key not in VARIABLE:
                leaves = {name.rpartition(".")[2]: name for name in VARIABLE}
                near = difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.6)
                known = "it may be a key of [deployment], [engine], [engine.kv_offloading] or [scheduler], such as tp"
                hint = f"did you mean {leaves[near[0]]}?" if near else known
                found.append(Problem((*path, key), f"is no setting that a search can vary; {hint}"))
            elif not _values(values):
                found.append(Problem((*path, key), "must have at least one value; it has none"))
            else:
                reasons = [text for value in _values(values) for text in _reasons_against(key, value)]
                found += [Problem((*path, key), text) for text in reasons]
    section = settings.get("search")
    limits = section.get("limits") if isinstance(section, dict) else None
    for metric, bound in limits.items() if isinstance(limits, dict) else ():
        try:
            _limit(metric, bound)
        except (InputError, ValueError) as error:
            found.append(Problem(("search", "limits", metric), str(error)))
    return found


def _spaces(settings: Table) -> list[tuple[tuple[str, ...], Table]]:
    section = settings.get("search")
    if not isinstance(section, dict):
        return []
    parts = section.get("any_of")
    spaces: list[tuple[tuple[str, ...], Any]] = [(("search", "space"), section.get("space"))]
    listed = parts if isinstance(parts, list) else []
    spaces += [(("search", "any_of", str(at)), part) for at, part in enumerate(listed)]
    return [(path, axes) for path, axes in spaces if isinstance(axes, dict)]


def _reasons_against(key: str, value: Any) -> list[str]:
    """Return why the setting ``key`` cannot have the value, apart from rules that involve other keys."""
    section, leaf = VARIABLE[key], key.rpartition(".")[2]
    if key in (search.REPLICAS, search.DECODE_REPLICAS) and value in ("fill", "auto"):
        return []
    required: Table = {"model": "any", "gpu": "any"} if section is DeploymentSection else {}
    if section is SpeculationTable:
        required = {"method": "ngram", "num_speculative_tokens": 1, "acceptance": 0.5}
    return [problem.text for problem in validated(section, {**required, leaf: value})[1]]


def _limit(metric: str, bound: Any) -> Limit:
    from lengthwise.schema.plan import Limit

    value = seconds(bound)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'must be a number or a text with a unit ("200ms"); it is {bound!r}')  # noqa: TRY004
    return search.check_limit(Limit(metric, float(value), at_least=metric in LOWER_BOUNDED))


def _values(axis: Any) -> list[Any]:
    return list(axis) if isinstance(axis, list | tuple) else [axis]
