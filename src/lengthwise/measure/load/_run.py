"""Requests go out when they are due, whatever became of those before; or N at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from lengthwise.backend.openai import Client, RequestError
from lengthwise.measure.load._row import LOST, Row
from lengthwise.measure.load.prompts import Prompts
from lengthwise.schema.workload import Workload

_AHEAD_BYTES = 1 << 28
_WARM_AT_ONCE = 4


@dataclass
class Run:
    """One run of a workload against a server.

    Attributes:
        give_up_after: So many requests lost in a row, or failed where none ever succeeded, end the run.
        told: Called with the requests that ended so far.
        rows: By request; those that were never due yet are None.
        start_s: When the first was due at the earliest (``perf_counter``).
        why_ended: Empty where all requests ended by themselves.
    """

    client: Client
    workload: Workload
    prompts: Prompts
    exact: bool = True
    priorities: bool = False
    give_up_after: int = 10
    told: Callable[[int], None] = lambda _: None
    rows: list[Row | None] = field(default_factory=list)
    start_s: float = 0.0
    why_ended: str = ""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _bodies: dict[int, bytes] = field(default_factory=dict)
    _ended: int = 0
    _succeeded: int = 0
    _in_a_row: int = 0

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.workload)

    def stop(self, why: str) -> None:
        """Ends the run now; the first reason stays."""
        self.why_ended = self.why_ended or why
        self._stop.set()

    async def warm_up(self, requests: int) -> None:
        """So many requests like the first ones, with prompts of their own, that nobody counts."""
        gate = asyncio.Semaphore(_WARM_AT_ONCE)

        async def one(at: int) -> None:
            body = self._made(at % len(self.workload), round_=1 + at // len(self.workload))
            async with gate:
                with contextlib.suppress(RequestError):
                    async for _ in self.client.stream(body):
                        pass

        await self._until_stopped(asyncio.gather(*(one(i) for i in range(requests))), None)

    def prepare(self) -> None:
        """Makes the bodies of the first requests, so that none is late for it."""
        size = 0
        for row in range(len(self.workload)):
            self._bodies[row] = self._made(row)
            size += len(self._bodies[row])
            if size > _AHEAD_BYTES:
                return

    async def go(self, time_limit_s: float | None) -> None:
        """Runs all requests, or as many as come before the limit or a stop."""
        self.start_s = time.perf_counter()
        n = self.workload.concurrency
        main = self._open() if n is None else self._closed(n)
        if not await self._until_stopped(asyncio.ensure_future(main), time_limit_s):
            self.stop(f"the time limit of {time_limit_s:g} s" if time_limit_s is not None else "")

    async def _until_stopped(self, main: asyncio.Future[Any], limit_s: float | None) -> bool:
        """Whether it ended by itself or was told to stop; False where the limit came first."""
        stopper = asyncio.ensure_future(self._stop.wait())
        done, left = await asyncio.wait({main, stopper}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if main in done:
            main.result()
        return bool(done)

    async def _open(self) -> None:
        async with asyncio.TaskGroup() as group:
            for row, arrival_s in enumerate(self.workload.arrival_s.tolist()):
                due_s = self.start_s + arrival_s
                if row not in self._bodies:
                    self._bodies[row] = self._made(row)
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                elif row % 8 == 0:  # those that were started must come to be sent
                    await asyncio.sleep(0)
                group.create_task(self._one(row, due_s))

    async def _closed(self, concurrency: int) -> None:
        left = iter(range(len(self.workload)))

        async def worker() -> None:
            due_s = self.start_s
            for row in left:
                await self._one(row, due_s)
                due_s = time.perf_counter()

        workers: list[Coroutine[Any, Any, None]] = [
            worker() for _ in range(min(concurrency, len(self.workload)))
        ]
        async with asyncio.TaskGroup() as group:
            for one in workers:
                group.create_task(one)

    async def _one(self, at: int, due_s: float) -> None:
        row = self.rows[at] = Row(due_s, int(self.workload.output_tokens[at]))
        if self.prompts.how == "token ids":
            row.ids = int(self.workload.prompt_tokens[at])
        body = self._bodies.pop(at, None) or self._made(at)
        try:
            async with contextlib.aclosing(self.client.stream(body, sent=row.sent)) as pieces:
                async for piece in pieces:
                    row.take(piece)
        except RequestError as error:
            row.failure = error
        row.ended = True
        self._count(row)

    def _count(self, row: Row) -> None:
        self._ended += 1
        self.told(self._ended)
        failure = row.failure
        if failure is None:
            self._succeeded, self._in_a_row = self._succeeded + 1, 0
        elif failure.reason in LOST or not self._succeeded:
            self._in_a_row += 1
            if self._in_a_row >= self.give_up_after:
                self.stop(f"{self._in_a_row} failures in a row, the last: {failure}")
        else:
            self._in_a_row = 0

    def _made(self, at: int, round_: int = 0) -> bytes:
        priority = self.workload.priority
        return self.client.body(
            self.prompts(at, round_),
            int(self.workload.output_tokens[at]),
            exact=self.exact,
            priority=int(priority[at]) if self.priorities and priority is not None else None,
        )
