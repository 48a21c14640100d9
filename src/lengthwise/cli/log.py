"""The log of ``lengthwise serve``: lines for people or for machines, on standard error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_ROOT = "lengthwise.gateway"
_REQUESTS = "lengthwise.gateway.requests"
_OWN = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName"}


class Lines(logging.Formatter):
    """Time, weight, message, and what else the record tells as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        """The line."""
        more = [f"{name}={value}" for name, value in record.__dict__.items() if name not in _OWN]
        return " ".join([super().formatMessage(record), *more])


@contextmanager
def logging_to_stderr(level: str, *, as_json: bool, requests: bool) -> Iterator[None]:
    """Has the gateway's log written, from ``level`` on, for as long as it is open.

    Args:
        level: "debug", "info", "warning" or "error".
        as_json: Lines of JSON.
        requests: A line for every request, too; else only for those that engines failed.
    """
    from lengthwise.gateway.telemetry import json_lines

    number = getattr(logging, level.upper())
    handler = json_lines(level=number)
    if not as_json:
        handler.setFormatter(Lines())
    logging.getLogger(_REQUESTS).setLevel(logging.NOTSET if requests else logging.WARNING)
    try:
        yield
    finally:
        logging.getLogger(_ROOT).removeHandler(handler)
        logging.getLogger(_REQUESTS).setLevel(logging.NOTSET)
