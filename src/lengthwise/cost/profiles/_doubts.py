"""What a reader should doubt in a profile's numbers: times that no device can keep, or that nobody measures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.cost.profiles._work import row_work
from lengthwise.schema.profile import Profile

SHORTEST_S, LONGEST_S = 1e-8, 60.0
ABOVE_PEAK = 10


def doubts(profile: Profile) -> list[str]:
    """Notes on absurd rows: shorter than 10 ns, longer than a minute, or ten times the device's peak."""
    seconds = profile["seconds"]
    found = [
        _note(profile, seconds < SHORTEST_S, "take less than 10 ns: is the unit right?"),
        _note(profile, seconds > LONGEST_S, "take more than a minute: is the unit right?"),
    ]
    work = row_work(profile)
    if work is not None:
        with np.errstate(invalid="ignore"):
            fast = (seconds >= SHORTEST_S) & (work.least_s() > ABOVE_PEAK * seconds)
        found.append(_note(profile, fast, f"are more than {ABOVE_PEAK} times faster than the device's peak"))
    return [note for note in found if note]


def _note(profile: Profile, rows: npt.NDArray[np.bool_], what: str) -> str:
    count = int(rows.sum())
    if not count:
        return ""
    first = int(np.flatnonzero(rows)[0])
    names = ", ".join(sorted(set(profile["operator"][rows].tolist())))
    return f"{count:,} rows {what} ({names}; the first: row {first}, {profile['seconds'][first]:.3g} s)"
