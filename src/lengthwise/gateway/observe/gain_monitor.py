"""Estimate the gain of ordering periodically, in a separate process so that it delays no request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from dataclasses import asdict
from typing import Any, Self

from lengthwise.gateway.background import background
from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.ordering_gain import BAD_FIT, MIN_REQUESTS, TOO_FEW, Gain, as_json
from lengthwise.gateway.telemetry import RequestTimelines, Row, as_dict

MAX_ROWS = 5000


class RecentRows(RequestTimelines):
    """Stores the rows of the last MAX_ROWS requests.

    Use it as a listener, or pass its ``append`` to the ``subscribe`` of other timelines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self.append = self.rows.append
        self.subscribe(self.append)


INTERVAL_S = 300.0
_TIMEOUT_S = 240.0
_POLL_INTERVAL_S = 5.0
_log = logging.getLogger("lengthwise.gateway")


class Monitor:
    """Estimates the gain every ``interval_s`` (while requests are too few, every 5 s), as an async context manager."""

    def __init__(
        self,
        recent: RecentRows,
        order: Order = Order(),  # noqa: B008
        *,
        interval_s: float = INTERVAL_S,
        first_s: float = 0.0,  # wait before the first estimate
    ) -> None:
        self._recent, self.order, self.interval_s, self.first_s = recent, order, interval_s, first_s
        self.estimate: dict[str, Any] | None = None  # the latest one
        self._running = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._running.enter_async_context(background(self._run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def poll(self) -> dict[str, Any]:
        """Return an estimate of the gain on the recent rows, in the form of ``as_json``."""
        rows = list(self._recent.rows)
        if sum(row.output_tokens >= 1 for row in rows) < MIN_REQUESTS:
            text = f"{len(rows)} requests so far; at least {MIN_REQUESTS} are needed."
            return as_json(Gain(TOO_FEW, text, len(rows), 0.0))
        if self.estimate is not None and self.estimate["decision"] == TOO_FEW:
            self.estimate = None  # the requests suffice now, and the first estimate follows
        lines = [json.dumps(asdict(self.order)), *(json.dumps(as_dict(row)) for row in rows)]
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "lengthwise.gateway.observe")
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            out, errors = await child.communicate("\n".join(lines).encode())
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if child.returncode:
            messages = errors.decode(errors="replace").strip().splitlines()  # the last line of a traceback
            raise ChildProcessError(messages[-1].strip() if messages else f"exit status {child.returncode}")
        found: dict[str, Any] = json.loads(out)
        return found

    async def _run(self) -> None:
        await asyncio.sleep(self.first_s)
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    self.estimate = await self.poll()
                if (loss := loss_warning(self.estimate, self.order.mode)) is not None:
                    _log.warning(*loss)
            except (OSError, ValueError, TimeoutError) as error:
                _log.warning("estimating the gain on the traffic failed: %s", error or type(error).__name__)
            is_early = self.estimate is None or self.estimate["decision"] == TOO_FEW
            await asyncio.sleep(min(_POLL_INTERVAL_S, self.interval_s) if is_early else self.interval_s)


def loss_warning(estimate: dict[str, Any], mode: str) -> tuple[Any, ...] | None:
    """Return the format and the values of a warning if requests take longer in ``mode`` than with FCFS, else None."""
    mean = next((order["mean"] for order in estimate["orders"] if order["name"] == mode), None)
    if estimate["decision"] == BAD_FIT or mean is None or mean["low"] is None or mean["low"] <= 0:
        return None
    shares = (100 * mean[end] for end in ("value", "low", "high"))
    return "mode %s is slower than fcfs: mean JCT %+.0f %% (%+.0f to %+.0f). Use another mode", mode, *shares
