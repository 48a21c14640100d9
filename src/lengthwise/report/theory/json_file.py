"""A study as JSON.

Schema version 1: {"format": "lengthwise.theory", "version": 1, "kind": "multibin" | "queue", "facts": [str],
"answers": [str], and the fields of lengthwise.theory.MultiBinStudy or QueueStudy by their names}. An estimate is
{"value", "half_width"}. Keys are only ever added within a version; what is not known is null.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from lengthwise.report.json_file import plain
from lengthwise.report.theory._answers import answers
from lengthwise.theory import MultiBinStudy, QueueStudy

VERSION = 1


def theory_facts(study: MultiBinStudy | QueueStudy) -> dict[str, Any]:
    """The study as plain values for JSON (see the module)."""
    kind = "multibin" if isinstance(study, MultiBinStudy) else "queue"
    head = {"format": "lengthwise.theory", "version": VERSION, "kind": kind, "answers": answers(study)}
    told: dict[str, Any] = plain(head | _bare(study))
    return told


def _bare(value: Any) -> Any:
    """Dataclasses, arrays and mappings as what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _bare(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _bare(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_bare(item) for item in value]
    return value
