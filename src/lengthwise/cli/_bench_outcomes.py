"""What became of the requests of ``lengthwise bench``: by outcome, with the server's own words, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.cli._show import print_table
from lengthwise.measure import INTERRUPTED
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured
from lengthwise.schema.records import Status

_COLUMNS = ("outcome", "requests", "server says")
_TOLD_AS_FINISHED = "lied usage"

_ADVICE = {
    "http 401": "give the right --api-key",
    "http 403": "give the right --api-key",
    "http 404": "check the address and --model",
    "http 408": "lower the load (--request-rate, --concurrency)",
    "http 429": "lower the load (--request-rate, --concurrency)",
    "http 503": "lower the load (--request-rate, --concurrency), or wait until the server is ready",
    "http 4": "send what it takes: lengths (--isl, --osl) within its limits, or no exact lengths (--no-exact)",
    "http 5": "look into the server's log",
    "server error": "look into the server's log",
    "malformed": "check that the address is that of an OpenAI-compatible server",
    "stalled": "lower the load, or wait longer for a byte (--stall)",
    "timed out": "lower the load, or wait longer for an answer (--timeout)",
    "empty answer": "look at what the server streams, in which no token is, and into its log",
}
_ENDED_AT_ONCE = "ask for exact lengths (without --no-exact)"
"""Of an empty answer where the model may end it as it likes."""
SERVER_FAILED = 3
"""The exit code of a run that a server's failures ended, though some requests had finished."""
_REFUSED = "refused"
"""What a request fails of where nobody listens."""
_GONE = "see whether the server still runs, and look into its log"


def show(measured: Measured) -> None:
    """Prints a row an outcome, where not all requests finished as they should."""
    if measured.errors or (measured.records.requests.status != Status.FINISHED).any():
        print_table(_COLUMNS, list(_rows(measured)))


def end(measured: Measured, kept: Path | None) -> None:
    """Nothing, where requests finished.

    Raises:
        InputError: None did; it says of what they failed, what to do and where the records are.
    """
    if (measured.records.requests.status == Status.FINISHED).any():
        return
    failures = _failures(measured)
    said = "; ".join(_said(one) for one in failures[:3])
    why = said or ("; ".join(measured.doubts) or "the run was too short")
    exact = bool(measured.facts["arguments"]["exact"])
    todo = "; ".join(dict.fromkeys(_advice(one["reason"], exact=exact) for one in failures[:3]))
    raise InputError(
        f"no request finished: {why}. To do: {todo or 'let it run longer (--time-limit)'}"
        + (f". What there is was kept in {kept}, marked as partial" if kept else "")
    )


def words(measured: Measured) -> str:
    """Failures in one line; empty where there are none."""
    return "; ".join(_said(one) for one in _failures(measured))


def was_interrupted(measured: Measured) -> bool:
    """Whether Ctrl-C ended the run."""
    return any(f"ended by {INTERRUPTED}" in doubt for doubt in measured.doubts)


def was_given_up(measured: Measured) -> bool:
    """Whether failures in a row ended the run before its requests had ended."""
    return any(
        "a partial run, ended by" in doubt and "failures in a row" in doubt for doubt in measured.doubts
    )


def was_left(measured: Measured) -> bool:
    """Whether nobody listened any more at the run's end: the last requests were refused, too few to give up for."""
    refused = measured.errors.get(_REFUSED, 0)
    if not refused:
        return False
    by_arrival = np.argsort(measured.records.requests.arrival_s, kind="stable")
    last = measured.records.requests.status[by_arrival[-refused:]]
    return bool((last != Status.FINISHED).all())


def _rows(measured: Measured) -> Iterator[list[str]]:
    status, failures = measured.records.requests.status, _failures(measured)
    finished = int(np.count_nonzero(status == Status.FINISHED))
    yield ["finished", f"{finished:,}", ""]
    for one in failures:
        of_these = "of these: " if one["reason"] == _TOLD_AS_FINISHED else ""
        yield [of_these + one["reason"], f"{one['count']:,}", one["message"]]
    failed = sum(one["count"] for one in failures if one["reason"] != _TOLD_AS_FINISHED)
    if left := len(status) - finished - failed:
        yield ["cut off, or never due, at the run's end", f"{left:,}", ""]


def _failures(measured: Measured) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = measured.facts["failures"]
    return found


def _said(one: dict[str, Any]) -> str:
    message = f' ("{one["message"]}")' if one["message"] else ""
    return f"{one['reason']}: {one['count']:,}{message}"


def _advice(reason: str, *, exact: bool) -> str:
    if reason == "empty answer" and not exact:
        return _ENDED_AT_ONCE
    return next((_ADVICE[key] for key in (reason, reason[:6]) if key in _ADVICE), _GONE)
