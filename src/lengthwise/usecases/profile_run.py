"""The file in which a measurement of operators stores its points, so that it can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lengthwise.schema.errors import InputError

RESUME = "give --resume to continue it with the same options (only --budget may be larger)"


def points_file(profile: Path, *, resume: bool) -> Path:
    """Return the path of a profile's measured points. Raises InputError if the file exists and ``resume`` is False."""
    points = profile.with_name(profile.name + ".points.jsonl")
    if points.exists() and not resume:
        raise InputError(f"{points} has the points of an interrupted run: {RESUME}, or delete it")
    return points


@contextmanager
def naming_points_file(points: Path, on_interrupt: Callable[[str], None]) -> Iterator[None]:
    """Add the file of measured points to the message of an interrupt or an error in this context.

    The measurement can be resumed from that file. A file without points is deleted instead.
    """
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
