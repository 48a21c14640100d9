"""Files of records that commands read: lengthwise's own, and results of other benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lengthwise.schema.records import RunResult

_GZIP = b"\x1f\x8b"


def read_named(paths: Sequence[Path]) -> list[RunResult]:
    """Read runs and name them after their files, or after the complete paths if two files share a name.

    A text file (JSON or lines of JSON, compressed or not) is the result of another program.
    """
    from lengthwise import measure

    unique = len({path.name for path in paths}) == len(set(paths))
    runs = [measure.read_external_results(path) if _is_text(path) else measure.read_records(path) for path in paths]
    names = [path.name if unique else str(path) for path in paths]
    return [replace(run, records=replace(run.records, name=name)) for run, name in zip(runs, names, strict=True)]


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:  # read_records reports it
        return False
    return start.startswith(_GZIP) or start.lstrip()[:1] in (b"{", b"[")
