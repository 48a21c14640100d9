"""What of a log may have been meant otherwise than it was read."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lengthwise.predict._rows import CUT, FAILED, NAMES, Row

ENDED = frozenset(
    {"stop", "end_turn", "eos", "eos_token", "end", "stop_sequence", "complete", "completed", "finished", "tool_calls",
     "tool_use", "function_call"}
)  # fmt: skip
"""Reasons to end that mean: by itself."""


def doubts(rows: Sequence[Row], keys: Iterable[str]) -> dict[str, Any]:
    """Facts of rows with outputs: how many have no prompt, which reasons to end are unknown, likely misspelt keys."""
    ends = Counter(r.finish for r in rows if r.finish and r.finish not in CUT | FAILED | ENDED)
    told: dict[str, Any] = {
        "no_prompt": sum(not r.prompt for r in rows),
        "unknown_finish": dict(ends.most_common(5)),
        "misspelt": misspelt(keys),
    }
    return {name: value for name, value in told.items() if value}


def misspelt(keys: Iterable[str]) -> dict[str, str]:
    """Keys that nothing reads, and what each is near to, of what no other key tells."""
    flat = {key.strip().lower().replace(" ", "_") for key in keys}
    known = {name: column for column, names in NAMES.items() for name in names}
    absent = [name for name, column in known.items() if not flat & {*NAMES[column]}]
    near = {key: difflib.get_close_matches(key, absent, n=1, cutoff=0.75) for key in sorted(flat - {*known})}
    return {key: found[0] for key, found in near.items() if found}


def hint(raw: Mapping[str, Any]) -> str:
    """A sentence's end about misspelt keys of a row; empty where there is none."""
    near = [f"{key} (did you mean {name}?)" for key, name in misspelt(map(str, raw)).items()]
    return f"; not understood: {', '.join(near)}" if near else ""
