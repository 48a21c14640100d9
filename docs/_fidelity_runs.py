"""The page of details: every value that the results hold, as lines and narrow tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _fidelity_overview import figure

TOLD = {"interval", "range"}
WIDEST = 12
"""Columns that a table may have; wider ones are told as lines."""
LEAST_PAIRS = 5
"""Of fewer groups drawn anew an interval says next to nothing: a dash stands for it."""
ENDS = ("value", "low", "high")
LABELS = {
    ("fidelity.calibrated.", 4): ("before", "after", "low", "high"),
    ("fidelity.calibrated.", 3): ENDS,
    ("fidelity.live", 4): ("measured", "message", "low", "high"),
}
"""Names of the numbers of a list, by a figure's first words and their count."""

HEAD = """\
# Fidelity: every run and every point

The details behind [fidelity](fidelity.md), generated from benchmarks/results/fidelity.json in the same go: look here for a
run, a model, a GPU or a parameter, not to read it through. Headlines are in percent; in details errors are shares (0.1 is
10 %, negative where the simulation says less than was measured), names that end in s are seconds, in ms milliseconds. Kept: when
a row was written into that file, whose rows are of version 1 (so is one that names none). Campaigns that newer ones
replaced lie whole in benchmarks/results/fidelity-earlier.json.
"""


def runs_page(rows: Sequence[Mapping[str, Any]], sections: Sequence[tuple[str, tuple[str, ...], str]]) -> str:
    """The whole page: the sections of the other one, each row of them with its details."""
    parts = [HEAD]
    for title, prefixes, _ in sections:
        mine = [row for row in rows if row["name"].startswith(prefixes)]
        if mine:
            parts.append("\n".join([f"## {title}\n", *(line for row in mine for line in _row(row))]))
    return "\n".join(parts)


def _row(row: Mapping[str, Any]) -> Iterator[str]:
    told = "" if row.get("value") is None else f": {figure(row)}"
    kept = f" (kept {row['retained'][:10]})" if row.get("retained") else ""
    yield f"**`{row['name']}`**{told}{kept}\n"
    rest = {key: one for key, one in (row.get("details") or {}).items() if key not in TOLD}
    yield from _details(_labelled(rest, row["name"]), ())


def _labelled(of: Any, name: str) -> Any:
    """Lists of numbers that have names as mappings."""
    if isinstance(of, Mapping):
        few = isinstance(of.get("pairs"), int) and of["pairs"] < LEAST_PAIRS
        return {key: None if few and key == "ci" else _labelled(value, name) for key, value in of.items()}
    if isinstance(of, list) and of and all(isinstance(one, int | float) for one in of):
        for (first, count), labels in LABELS.items():
            if name.startswith(first) and len(of) == count:
                return dict(zip(labels, of, strict=True))
    return of


def _details(details: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Plain values as one line, texts as a list, mappings of like mappings as a table, and so on downwards."""
    plain = {key: value for key, value in details.items() if _is_plain(value)}
    where = f"{', '.join(path)}: " if path else ""
    if plain:
        yield f"{where}{', '.join(f'{_words(key)} {_plain(value)}' for key, value in plain.items())}.\n"
    texts = {key: value for key, value in details.items() if _is_texts(value)}
    for key, value in texts.items():
        yield from (f"- {where}{_words(key)}: {_plain(one)}" for one in value)
    if texts:
        yield ""
    nested = {key: value for key, value in details.items() if isinstance(value, Mapping) and value}
    flat = {key: value for key, value in nested.items() if all(map(_is_plain, value.values()))}
    tables = flat if _matching(flat) else {}
    if tables:
        yield from _table(tables, path)
    for key, value in nested.items():
        if key not in tables:
            yield from _details(value, (*path, _words(key)))
    for key, value in details.items():
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            yield from _table({str(at + 1): one for at, one in enumerate(value)}, (*path, _words(key)))


def _matching(rows: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether they share their columns, and few enough of them."""
    columns = {key for row in rows.values() for key in row}
    filled = sum(map(len, rows.values()))
    return len(rows) > 1 and len(columns) <= WIDEST and filled > 0.5 * len(columns) * len(rows)


def _table(rows: Mapping[str, Mapping[str, Any]], path: tuple[str, ...]) -> Iterator[str]:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    yield f"| {', '.join(path) or ' '} | {' | '.join(map(_words, columns))} |"
    yield f"|---|{'---|' * len(columns)}"
    for name, row in rows.items():
        cells = [_plain(row[column]) if column in row else "" for column in columns]
        yield f"| {name.replace('|', '/')} | {' | '.join(cells)} |"
    yield ""


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return not _is_texts(value) and not any(isinstance(one, Mapping | list) for one in value)
    return not isinstance(value, Mapping)


def _is_texts(value: Any) -> bool:
    """A list of sentences, not of names."""
    return isinstance(value, list) and any(isinstance(one, str) and len(one) > 60 for one in value)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) and abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")
