"""The emulated engine as a server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self

from lengthwise.schema.errors import MissingExtraError
from lengthwise.testing.engine_server.answering import Answering
from lengthwise.testing.engine_server.clocked import ClockedBatch
from lengthwise.testing.engine_server.faults import FaultPlan
from lengthwise.testing.engine_server.log import Log
from lengthwise.testing.engine_server.routes import app
from lengthwise.testing.engine_server.spec import EngineSpec

if TYPE_CHECKING:
    from aiohttp import web

_PLAIN = EngineSpec()
_LOOK_S = 0.002
_LEAVE_S = 0.05
"""For a handler that began while the port was closed: 0 would be no limit to aiohttp."""


class EngineServer:
    """An OpenAI-compatible engine that batches, waits, evicts and fails as real ones do, and writes toy text.

    An async context manager; many may run in one event loop. Needs aiohttp (extra ``gateway``).

    Args:
        spec: What it is.
        host: Where it listens.
        port: 0 picks a free one, which it keeps when it is started again.
        faults: What goes wrong; may be changed at any time.

    Attributes:
        log: What it saw and did; goes on over restarts.
        healthy: What /health says (503 where not).
        asleep: Whether it was put to sleep (/sleep, as vLLM has it in its development mode): it answers nobody.
        clocked: The batch; a new one after a restart.
        restarts: How often it was started again.
        dies_hard: What ``die`` does in place of closing: a process of its own ends itself.
    """

    def __init__(
        self,
        spec: EngineSpec = _PLAIN,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: FaultPlan | None = None,
    ) -> None:
        self.spec: EngineSpec = spec
        self.host, self.port = host, port
        self.faults = faults or FaultPlan()
        self.log = Log()
        self.healthy = True
        self.asleep = False
        self.restarts = 0
        self.dies_hard: Any = None
        self.answers: dict[int, tuple[str, Answering]] = {}
        self.clocked: ClockedBatch
        self._runner: web.AppRunner | None = None
        self._dying: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"

    @property
    def up(self) -> bool:
        """Whether it listens."""
        return self._runner is not None

    @property
    def aborts(self) -> int:
        """Requests that ended because their client left or asked for it."""
        return self.log.count("aborted")

    @property
    def slots_in_use(self) -> int:
        """Outputs that wait or run in the batch: 0 when nothing has leaked."""
        return self.clocked.batch.queued + self.clocked.batch.running

    async def __aenter__(self) -> Self:
        """Listens."""
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops; requests that are open end with it."""
        if self._dying is not None:
            await self._dying
        await self.die()

    async def _start(self) -> None:
        try:
            from aiohttp import web
        except ImportError as error:
            raise MissingExtraError("lengthwise.testing.engine_server", "gateway") from error
        self.clocked = ClockedBatch(self.spec)
        runner = web.AppRunner(
            app(self),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_LEAVE_S,
            handle_signals=False,
        )
        await runner.setup()
        await web.TCPSite(runner, self.host, self.port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    async def die(self) -> None:
        """All connections are reset and the port is closed, at once; what was in the batch is lost."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for _, answer in list(self.answers.values()):
            answer.die()
        for site in list(runner.sites):
            await site.stop()
        for connection in list(runner.server.connections if runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        self.clocked.stop()
        await runner.cleanup()

    def die_soon(self) -> None:
        """As ``die``, from within an answer."""
        if self.dies_hard is not None:
            self.dies_hard()
        self._dying = asyncio.create_task(self.die())

    async def restart(self) -> None:
        """Dies, where it has not yet, and comes back on the same port with an empty batch."""
        if self._dying is not None:
            await self._dying
            self._dying = None
        await self.die()
        self.restarts += 1
        await self._start()

    async def idle(self, within_s: float = 5.0) -> None:
        """Waits until nothing is open any more; raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while self.log.open or self.slots_in_use:  # noqa: ASYNC110 - for tests alone
                await asyncio.sleep(_LOOK_S)

    def abort(self, request_ids: set[str]) -> int:
        """Ends requests by the ids that their clients chose; how many were found."""
        found = [answer for name, answer in self.answers.values() if name and name in request_ids]
        for answer in found:
            with contextlib.suppress(KeyError):
                answer.abort()
        return len(found)
