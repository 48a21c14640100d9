"""An append-only log of administrative actions, with a JSON line for each."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lengthwise.gateway.protocols import Clock

_log = logging.getLogger("lengthwise.gateway.audit")
_MAX_PENDING = 1000
_MAX_TEXT = 200


@dataclass(frozen=True)
class Actor:
    """The origin of an action: the user, the user's role, and the address of the connection."""

    name: str
    role: str = ""
    address: str = ""


SIGNAL = Actor("signal")  # SIGHUP: only the user of the process and root can send it


class AuditLog:
    """Logs each action, and appends a line to the file at ``path`` (None: no file).

    A line is one write, so that processes may share the file. Each write opens the file, so that it can be renamed at
    any time. If the file cannot be written, ``failures`` counts the attempt, and up to 1,000 lines wait for the next
    one. ``wall`` is the clock of the lines.
    """

    def __init__(self, path: str | None, wall: Clock) -> None:
        self._path, self._wall = path, wall
        self.written = self.failures = self.lost = 0
        self._pending: deque[bytes] = deque()
        self._is_torn = self._is_failing = False

    def record(self, actor: Actor, action: str, target: str = "", outcome: str = "ok", **details: Any) -> None:
        """Log an action and its outcome: "ok", "denied" or "failed". Texts are cut to 200 characters."""
        when = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds")
        row = {
            "time": when, "actor": actor.name, "role": actor.role, "address": actor.address, "action": action,
            "target": target, "outcome": outcome, **details,
        }  # fmt: skip
        row = {name: one[:_MAX_TEXT] if isinstance(one, str) else one for name, one in row.items()}
        _log.info("%s %r: %s by %r at %s", action, target[:_MAX_TEXT], outcome, actor.name, actor.address or "-")
        if self._path is None:
            return
        self._pending.append(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        if len(self._pending) > _MAX_PENDING:
            self._pending.popleft()
            self.lost += 1
        self.flush()

    def flush(self) -> None:
        """Write the pending lines."""
        if self._path is None or not self._pending:
            return
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                while self._pending:
                    self._write(file, self._pending[0])
                    self._pending.popleft()
                    self.written += 1
            finally:
                os.close(file)
        except OSError as error:
            if not self._is_failing:
                _log.warning("the audit log %s cannot be written (%s); its lines wait", self._path, error)
            self._is_failing = True
            self.failures += 1
        else:
            self._is_failing = False

    def _write(self, file: int, line: bytes) -> None:
        data = b"\n" + line if self._is_torn else line  # ends a line that a full disk has truncated
        size = os.write(file, data)
        self._is_torn = size < len(data)
        if self._is_torn:
            raise OSError(f"only {size} of {len(data)} bytes fit")
