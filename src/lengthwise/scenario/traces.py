"""Traces by path: formats of lengths and times, and logs of texts that predictors learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lengthwise import workload as w
from lengthwise.predict.served import Served, served
from lengthwise.schema.errors import InputError, TraceError, UnknownNameError
from lengthwise.schema.workload import Workload

LOG = "log"
"""The format of what ``lengthwise predict train`` reads: rows with a prompt, an output or its tokens, a model."""


def read_trace(
    path: Path | str,
    format: str | None = None,  # noqa: A002 - the word users look for
    *,
    time_scale: float = 1.0,
    sort: bool = False,
    replayed: bool = False,
) -> Workload:
    """The requests of a trace of any format, with the texts that it has in ``extra``.

    Args:
        path: The file.
        format: One of ``workload.READABLE``, or "log"; None finds it out.
        time_scale: Factor on the times.
        sort: Put the requests in order of arrival.
        replayed: Whether the arrivals matter: a log may have none.

    Raises:
        InputError: The file cannot be read, or has no arrivals and is to be replayed.
    """
    if format is not None and format not in (*w.READABLE, LOG):
        raise UnknownNameError("trace format", format, (*w.READABLE, LOG))
    found = format or w.detect(path)
    if found not in (None, LOG):
        return w.read(path, format, time_scale=time_scale, sort=sort)
    log = _served(path, sure=found == LOG)
    if replayed and log.arrival_s is None:
        raise TraceError(
            f"{path}: a log without times of arrival cannot be replayed; give workload.request_rate, "
            "workload.concurrency or workload.arrivals, or a column arrival_s"
        )
    return _workload(Path(path), log, time_scale, sort=sort or not replayed)


def _served(path: Path | str, *, sure: bool) -> Served:
    try:
        return served(path)
    except InputError as error:
        if sure or (", row 1 " not in str(error) and ", row 1:" not in str(error)):
            raise
        try:
            w.read(path)
        except TraceError as unknown:
            raise TraceError(f"{unknown}; and not a log of texts either: {error}") from None
        raise


def _workload(path: Path, log: Served, time_scale: float, *, sort: bool) -> Workload:
    at = np.zeros(len(log.output_tokens)) if log.arrival_s is None else log.arrival_s
    if not sort and (np.diff(at) < 0).any():
        row = int(np.flatnonzero(np.diff(at) < 0)[0]) + 2
        raise TraceError(f"{path}, request {row}: arrives before the one above it; pass sort=True")
    order = np.argsort(at, kind="stable")
    try:
        return Workload(
            arrival_s=(at[order] - at[order[0]]) * time_scale,
            prompt_tokens=log.prompt_tokens[order],
            output_tokens=log.output_tokens[order],
            extra={name: column[order] for name, column in log.texts.items()},
            name=_name(path, log),
        )
    except InputError as error:
        raise TraceError(f"{path}: {error}") from error


def _name(path: Path, log: Served) -> str:
    notes = [
        *([f"{log.estimated:,} with tokens estimated"] if log.estimated else []),
        *([f"without {log.left_out:,} failed or empty"] if log.left_out else []),
    ]
    return path.name.partition(".")[0] + (f" ({', '.join(notes)})" if notes else "")
