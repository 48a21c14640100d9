"""What ``lengthwise schedule watch`` reads, shows and leaves behind."""

from __future__ import annotations

from pathlib import Path

from lengthwise.cli import _records, _workload_page
from lengthwise.cli._outputs import write_answers
from lengthwise.cli._show import console
from lengthwise.report.schedule import watched_said, write_watched_json
from lengthwise.scenario import Live, seconds
from lengthwise.schedule import Terms
from lengthwise.schema.adaptation import Watched
from lengthwise.schema.errors import InputError

DRAWN = 20_000
"""Requests that are drawn from a preset."""


def live_of(records: Path | None, workload: str | None, form: str | None, seed: int) -> Live:
    """The requests to replay: of a file of records, a trace or a preset.

    Raises:
        InputError: None or two were given, or one cannot be read.
    """
    if (records is None) == (workload is None):
        raise InputError("give the requests to replay, either --records FILE or --workload FILE|NAME")
    if workload is not None:
        return Live.of_workload(_workload_page.opened(workload, form, DRAWN, seed))
    assert records is not None
    (measured,) = _records.read_named([records])
    return Live.of_records(measured)


def terms(storage: str, horizon: str, margin: float | None) -> Terms:
    """When a change is worth it, as the options say.

    Raises:
        InputError: One of them is out of its range.
    """
    try:
        horizon_s = float(horizon)
    except ValueError:
        try:
            horizon_s = seconds(horizon)
        except ValueError as error:
            raise InputError(f"--horizon {error}; it is {horizon!r}") from None
    return Terms(storage, horizon_s, margin)


def show(told: Watched) -> None:
    """Prints what was watched and what came of it."""
    out = console()
    for sentence in watched_said(told):
        out.print(sentence)


def write(told: Watched, json: Path | None) -> list[Path]:
    """Writes the file that was asked for, or prints it for "-"; returns it."""
    return write_answers(json, None, lambda path: write_watched_json(path, told), lambda _: None)
