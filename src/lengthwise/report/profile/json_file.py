"""What is in a profile, and what moved in it, machine-readable.

Schema version 1::

    {"format": "lengthwise.profile_view", "version": 1, "facts": the profile's facts, "rows": number,
     "operators": [{"operator", "tp", "dtype", "points", "axes": {name: [lowest, highest]},
                    "seconds": [shortest, longest], "spread": number | null,
                    "gaps": [{axis: [lowest, highest]}],
                    "median", "best": null | {"flops", "bandwidth", "roofline"}}]}

    {"format": "lengthwise.profile_check", "version": 1, "tolerance", "moved": number of rows that moved,
     "rows": [the fields of lengthwise.cost.profiles.Moved], "unmatched", "only_new", "only_old", "notes"}

Keys are only ever added within a version. What is not known is null; seconds are seconds.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lengthwise.cost.profiles import OperatorView, ProfileCheck, ProfileView
from lengthwise.report.json_file import plain

VERSION = 1


def profile_json(view: ProfileView) -> str:
    """The text of a JSON file of what is in a profile."""
    made = {
        "format": "lengthwise.profile_view",
        "version": VERSION,
        "facts": dataclasses.asdict(view.profile.facts),
        "rows": len(view.profile),
        "operators": [_operator(one) for one in view.operators],
    }
    return _text(made)


def check_json(found: ProfileCheck) -> str:
    """The text of a JSON file of what was compared and what moved."""
    made = {
        "format": "lengthwise.profile_check",
        "version": VERSION,
        "moved": len(found.moved),
        **dataclasses.asdict(found),
    }
    return _text(made)


def _operator(view: OperatorView) -> dict[str, Any]:
    return {
        "operator": view.operator,
        "tp": view.tp,
        "dtype": view.dtype,
        "points": len(view.rows),
        "axes": view.axes,
        "seconds": view.seconds,
        "spread": view.spread,
        "gaps": [{name: [low, high] for name, low, high in gap.axes} for gap in view.gaps],
        "median": None if view.median is None else dataclasses.asdict(view.median),
        "best": None if view.best is None else dataclasses.asdict(view.best),
    }


def _text(made: dict[str, Any]) -> str:
    return json.dumps(plain(made), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
