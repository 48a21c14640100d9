"""The gateway's log on standard error, as text or as JSON."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_STANDARD_FIELDS = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {
    "message", "asctime", "taskName"
}  # fmt: skip
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class KeyValueFormatter(logging.Formatter):
    """Formats a record as time, level, message, and its extra fields as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        """Return the log line of a record."""
        extra = (f"{name}={value}" for name, value in record.__dict__.items() if name not in _STANDARD_FIELDS)
        # Names from clients must not start new lines or move the terminal's cursor.
        return " ".join([super().formatMessage(record), *extra]).translate(_ESCAPES)


@contextmanager
def logging_to_stderr(level: str, *, as_json: bool, requests: bool) -> Iterator[None]:
    """Write the gateway's log at ``level`` ("debug", "info", ...) and above to standard error in this context.

    Failed requests are warnings. If ``requests``, all others are logged, too, at level "info".
    """
    from lengthwise.gateway.telemetry import json_lines

    handler = json_lines(level=getattr(logging, level.upper()))
    if not as_json:
        handler.setFormatter(KeyValueFormatter())
    request_log = logging.getLogger("lengthwise.gateway.requests")
    request_log.setLevel(logging.NOTSET if requests else logging.WARNING)
    try:
        yield
    finally:
        logging.getLogger("lengthwise.gateway").removeHandler(handler)
        request_log.setLevel(logging.NOTSET)
