"""Writes plain tables as TOML."""

from __future__ import annotations

import json
import re
from typing import Any

Table = dict[str, Any]
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml(table: Table) -> str:
    """TOML of nested dicts of texts, numbers, booleans and lists; empty tables are left out."""
    return "\n".join(_lines(table, "")).lstrip("\n") + "\n"


def _lines(table: Table, path: str) -> list[str]:
    tables = {key: value for key, value in table.items() if isinstance(value, dict) and not _inline(key)}
    lists = {key: value for key, value in table.items() if _is_tables(value)}
    plain = {key: value for key, value in table.items() if key not in tables and key not in lists}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items() if value != {}]
    for key, value in tables.items():
        inner = _lines(value, f"{path}{_key(key)}.")
        lines += ["", f"[{path}{_key(key)}]", *inner] if inner else []
    for key, values in lists.items():
        for value in values:
            lines += ["", f"[[{path}{_key(key)}]]", *_lines(value, f"{path}{_key(key)}.")]
    return lines


def _inline(key: str) -> bool:
    """Tables of one thought stay on one line."""
    return key in ("prompt", "output", "arrivals")


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
