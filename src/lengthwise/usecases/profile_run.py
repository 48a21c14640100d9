"""Measurement of operators; an interrupted one can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lengthwise.schema.errors import InputError

RESUME = "give --resume to continue it (same options, a larger --budget at most)"


def points_file(profile: Path, *, resume: bool) -> Path:
    """Return the file of points next to a profile."""
    points = profile.with_name(profile.name + ".points.jsonl")
    if points.exists() and not resume:
        raise InputError(f"{points} has the points of an interrupted run: {RESUME}, or delete it")
    return points


@contextmanager
def keeping(points: Path, on_interrupt: Callable[[str], None]) -> Iterator[None]:
    """Add the file of points to the error of an interrupted measurement; remove the file if it has none."""
    try:
        yield
    except (InputError, KeyboardInterrupt) as error:
        if not (points.is_file() and points.read_bytes().count(b"\n") > 1):  # the first line has no point
            points.unlink(missing_ok=True)
            raise
        note = f"The measured points are kept in {points}; {RESUME}, or delete it to measure other points"
        if isinstance(error, KeyboardInterrupt):
            on_interrupt(note)
            raise
        if type(error) is not InputError:  # points of another measurement, or not writable: its message is complete
            raise
        raise InputError(f"{error} {note}") from error
