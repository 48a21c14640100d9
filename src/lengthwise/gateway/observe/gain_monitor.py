"""Looks back from time to time while the gateway runs, in a process of its own, so that nobody is held up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.ordering_gain import MIN_REQUESTS, TOO_LITTLE, Gain, as_json
from lengthwise.gateway.observe.trace import Trace, of_rows
from lengthwise.gateway.telemetry import Row, Trips, as_dict

RETAINED = 5000


class Record(Trips):
    """A listener of its own; or, where ``telemetry.trips`` follows requests already, subscribe ``over`` to those.

    Args:
        retained: So many requests, the last ones.
    """

    def __init__(self, retained: int = RETAINED) -> None:
        super().__init__()
        self.rows: deque[Row] = deque(maxlen=retained)
        self.subscribe(self.over)

    def over(self, row: Row) -> None:
        """A request is over."""
        self.rows.append(row)

    def trace(self) -> Trace:
        """Its columns now."""
        return of_rows(self.rows)


EVERY_S = 300.0
LIMIT_S = 240.0
_POLL_INTERVAL_S = 5.0
_log = logging.getLogger("lengthwise.gateway")


class Monitor:
    """An async context manager with the last finding.

    Args:
        record: What passed.
        order: The settings that would be used.
        every_s: Between two looks.

    Attributes:
        order: The settings that would be used; the next look takes them.
        found: As ``as_json`` tells it; None before the first look.
    """

    def __init__(self, record: Record, order: Order = Order(), *, every_s: float = EVERY_S) -> None:  # noqa: B008
        self._record, self.order, self._every_s = record, order, every_s
        self.found: dict[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begins."""
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends, a look under way included."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def poll(self) -> dict[str, Any]:
        """A finding of what has passed so far."""
        rows = list(self._record.rows)
        if sum(row.output_tokens >= 1 for row in rows) < MIN_REQUESTS:
            few = f"{len(rows)} requests so far; at least {MIN_REQUESTS} are needed."
            return as_json(Gain(TOO_LITTLE, few, len(rows), 0.0))
        if self.found is not None and self.found["decision"] == TOO_LITTLE:
            self.found = None  # no longer true
        return await _disaggregated(rows, self.order)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LIMIT_S):
                    self.found = await self.poll()
            except (OSError, ValueError, TimeoutError) as error:
                _log.warning("a look back at the traffic failed: %s", error or type(error).__name__)
            few = self.found is None or self.found["decision"] == TOO_LITTLE
            await asyncio.sleep(min(_POLL_INTERVAL_S, self._every_s) if few else self._every_s)


def _last_line(message: bytes) -> str:
    """What a process that failed said last: of a traceback the error."""
    lines = message.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


async def _disaggregated(rows: Sequence[Row], order: Order) -> dict[str, Any]:
    """The finding, made by another process."""
    lines = [json.dumps(asdict(order)), *(json.dumps(as_dict(row)) for row in rows)]
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "lengthwise.gateway.observe")
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        out, said = await child.communicate("\n".join(lines).encode())
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode:
        raise ChildProcessError(_last_line(said) or f"its process ended with {child.returncode}")
    found: dict[str, Any] = json.loads(out)
    return found
