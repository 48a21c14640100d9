"""A line of JSON an event, on the logger "lengthwise.gateway.requests". No prompts, no texts, no keys."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from typing import Any, TextIO

from lengthwise.gateway.clock import Clock, monotonic
from lengthwise.gateway.decisions import Phase
from lengthwise.gateway.listener import Listener
from lengthwise.gateway.request import Outcome, Refusal, Request
from lengthwise.gateway.telemetry.row import Row, as_dict

LOGGER = "lengthwise.gateway.requests"
MOST_A_SECOND = 50
"""Refusals told one by one; further ones of that second are only counted."""
_LONGEST = 120
_ITS_REASON = "The engine failed"
"""What follows these is one of the relay's few reasons ("stalled", "http 500")."""
_OWN_WORDS = (Outcome.EXPIRED, Outcome.CLIENT_GONE)
_PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and what ``extra`` it has."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        told |= {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, separators=(",", ":"), default=str)


def json_lines(stream: TextIO | None = None, level: int = logging.INFO) -> logging.Handler:
    """Has all of the gateway's loggers tell JSON lines to a stream (stderr); returns the handler, to be removed."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("lengthwise.gateway")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler


class EventLog(Listener):
    """Tells of requests: refused, back in the queue, over."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock, self._logger = clock, logging.getLogger(LOGGER)
        self._second, self._told, self._untold = 0, 0, 0

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:  # noqa: D102 - as Listener
        second = int(self._clock())
        if second != self._second:
            if self._untold:
                self._logger.info("refused_more", extra={"requests": self._untold})
            self._second, self._told, self._untold = second, 0, 0
        if self._told >= MOST_A_SECOND:
            self._untold += 1
            return
        self._told += 1
        facts = {"reason": reason, "status": refusal.status, "tenant": tenant, "model": model[:128]}
        self._logger.info("refused", extra=facts)

    def returned(self, request: Request, why: str, now_s: float) -> None:  # noqa: D102
        del now_s
        if self._logger.isEnabledFor(logging.INFO):
            facts = {"id": request.id, "why": why, "generated_tokens": request.generated_tokens}
            self._logger.info("returned", extra=facts)

    def phase(self, phase: Phase) -> None:
        """A phase of a worker is over."""
        if self._logger.isEnabledFor(logging.INFO):
            self._logger.info("phase", extra=asdict(phase))

    def over(self, row: Row, detail: str = "") -> None:
        """A request is over."""
        level = logging.WARNING if row.outcome == Outcome.FAILED else logging.INFO
        if not self._logger.isEnabledFor(level):
            return
        facts = as_dict(row)
        del facts["again"]
        facts |= {"jct_s": round(row.jct_s, 6)}
        if why := safe_detail(row.outcome, detail):
            facts["why"] = why
        self._logger.log(level, "request", extra=facts)


def safe_detail(outcome: str, detail: str) -> str:
    """What may be told of why a request ended.

    Engines repeat prompts in their errors: of what an engine may have said only our own words, which stand
    before the first colon, are kept, and of a rejection nothing.
    """
    if outcome in _OWN_WORDS:
        return detail[:_LONGEST]
    if outcome != Outcome.FAILED:
        return ""
    words = detail.split(":")
    return ":".join(words[: 2 if words[0] == _ITS_REASON else 1])[:_LONGEST]
