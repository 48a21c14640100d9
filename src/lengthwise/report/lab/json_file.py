"""The machine-readable answer of a laboratory.

Schema version 1::

    {"format": "lengthwise.lab", "version": 1, "name": str, "facts": {str: str},
     "unit": "capacity" | "alone" | "rps", "seeds": int, "requests": int, "level": number,
     "answer": [str], "verdicts": [the fields of lengthwise.schema.lab.Verdict],
     "cells": [{"policy", "predictor", "batch", "load", "rate_rps",
                "values": {metric: {"value": number | null, "half_width": number | null}}}]}

Keys are only ever added within a version. What is not known is null.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from lengthwise.report.json_file import plain
from lengthwise.report.lab._words import check_table
from lengthwise.schema.files import write_whole
from lengthwise.schema.lab import LabTable

VERSION = 1


def write_lab_json(path: Path | str, table: LabTable) -> None:
    """A JSON file with everything that a laboratory found, under stable keys (see the module).

    Raises:
        InputError: There is no cell.
        OutputError: The file cannot be written.
    """
    check_table(table)
    made = {"format": "lengthwise.lab", "version": VERSION, **plain(dataclasses.asdict(table))}
    text = json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())
