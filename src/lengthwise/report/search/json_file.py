"""The machine-readable answer of a search.

Schema version 1::

    {"format": "lengthwise.study", "version": 1, "name": str,
     "plans": [the fields of lengthwise.schema.plan.Plan by their names, and "best": the key of the
               winner or null; an estimate is {"value": number | null, "half_width": number | null};
               a limit has "metric", "bound", "at_least"],
     "swaps": [{"optimum_of", "used_for", "objective", "ratio"}]}

Keys are only ever added within a version. What is not known is null.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lengthwise.report.json_file import plain
from lengthwise.report.search._standings import check_study
from lengthwise.schema.files import write_whole
from lengthwise.schema.plan import Plan, Study

VERSION = 1


def write_search_json(path: Path | str, study: Study) -> None:
    """A JSON file with everything that a search found, under stable keys (see the module).

    Raises:
        InputError: There is no plan, or two share a name.
        OutputError: The file cannot be written.
    """
    check_study(study)
    made = {
        "format": "lengthwise.study",
        "version": VERSION,
        "name": study.name,
        "plans": [_plan(plan) for plan in study.plans],
        "swaps": plain([dataclasses.asdict(swap) for swap in study.swaps]),
    }
    text = json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_whole(path, (text + "\n").encode())


def _plan(plan: Plan) -> dict[str, Any]:
    best = plan.best
    fields: dict[str, Any] = plain(dataclasses.asdict(plan))
    return {"name": plan.name, "best": best.key if best else None, **fields}
