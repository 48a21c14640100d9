"""The machine-readable answer of a choice of schedule.

Schema version 1: {"format": "lengthwise.schedule", "version": 1, "answer": [str], and the fields of
lengthwise.schema.schedule.SchedulePlan by their names}; "front" is a list of {"strategy", "points"}. Keys are only ever
added within a version; what is not known, and what is infinite, is null.

A replay of requests to a schedule that follows lengths is {"format": "lengthwise.schedule_watch", "version": 1,
"answer": [str], "late", and the fields of lengthwise.schema.adaptation.Watched}.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from lengthwise.report.json_file import plain
from lengthwise.report.schedule._watched import watched_said
from lengthwise.report.schedule._words import sentences
from lengthwise.schema.adaptation import Watched
from lengthwise.schema.files import write_whole
from lengthwise.schema.schedule import SchedulePlan

VERSION = 1


def write_schedule_json(path: Path | str, plan: SchedulePlan, answer: Sequence[str] | None = None) -> None:
    """A JSON file with everything that is known of a choice, under stable keys (see the module).

    Args:
        path: Where it shall stand.
        plan: The choice.
        answer: It in sentences; None: as the command prints it.

    Raises:
        OutputError: The file cannot be written.
    """
    told = dataclasses.asdict(plan)
    told["front"] = [{"strategy": strategy, "points": list(points)} for strategy, points in told["front"]]
    head = {
        "format": "lengthwise.schedule",
        "version": VERSION,
        "answer": sentences(plan) if answer is None else list(answer),
    }
    text = json.dumps(plain(head | told), indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())


def write_watched_json(path: Path | str, told: Watched) -> None:
    """A JSON file with everything that a replay came to, under stable keys (see the module).

    Raises:
        OutputError: The file cannot be written.
    """
    head = {"format": "lengthwise.schedule_watch", "version": VERSION, "answer": watched_said(told)}
    tree = plain(head | dataclasses.asdict(told) | {"late": told.late})
    text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())
