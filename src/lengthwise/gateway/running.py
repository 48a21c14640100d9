"""A gateway that runs: its parts put together, two ports, and an end without losses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lengthwise.gateway._extra import require_extra
from lengthwise.gateway.clock import Clock, monotonic
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.hub import Hub
from lengthwise.gateway.listener import Listener
from lengthwise.gateway.phasing import Phases
from lengthwise.gateway.ports import check_ports, listening
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    import uvicorn

    from lengthwise.gateway.admin import AdminApp
    from lengthwise.gateway.follow import Following, Make
    from lengthwise.gateway.relay import Relay

_log = logging.getLogger("lengthwise.gateway")
_LOOK_S = 0.01
_SETTLE_S = 2.0
"""So long the start waits for engines to tell what they are; who is slower is heard later."""
_FIXED = ("listen", "forecasting")
_LAST_S = 1.0
"""How long answers that the end has cut off may take to leave."""


class Gateway:
    """All of a gateway, as an async context manager: entered it serves, left it has ended.

    Args:
        config: What it is told.
        clock: Its time.
        listeners: Told of every request, besides its own.
        make_forecaster: Another forecaster (one that knows the lengths, in a benchmark).
        make_fleet: Another fleet.
        follow: Has the schedule of mode rra follow the lengths of its own traffic; None: it stays.

    Attributes:
        port: Of clients, once entered.
        admin_port: Of the admin page; None where there is none.
        hub: Where requests wait.
        following: Who has the schedule follow lengths; None: nobody, or not begun.

    Raises:
        InputError: A schedule is to follow lengths, and there is none.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clock: Clock = monotonic,
        listeners: tuple[Listener, ...] = (),
        make_forecaster: Callable[..., Any] | None = None,
        make_fleet: Callable[..., Any] | None = None,
        follow: Make | None = None,
    ) -> None:
        require_extra()
        if follow is not None and config.order.mode != "rra":
            raise InputError(f"a schedule follows lengths in mode rra alone; the mode is {config.order.mode}")
        self.config, self._clock, self._listeners = config, clock, listeners
        self._make_forecaster = make_forecaster or _forecaster
        self._make_fleet = make_fleet or _fleet
        self.port = 0
        self.admin_port: int | None = None
        self._changing = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._ended = False
        self._admin: AdminApp | None = None
        self._edge: uvicorn.Server | None = None
        self._follow = follow
        self.following: Following | None = None

    async def __aenter__(self) -> Self:
        """Starts; raises InputError where a port cannot be had."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends; who is still in is told so. ``drain`` before it lets them finish."""
        await self.stop()

    async def drain(self) -> bool:
        """Lets nobody in any more, and returns when all who are in have finished, or ``drain_s`` is over.

        Returns:
            Whether all have finished.
        """
        self.app.draining = True
        try:
            async with asyncio.timeout(self.config.care.drain_s):
                while self.hub.held or self.app.in_flight:
                    await self.hub.emptied()
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            _log.warning("%d requests had not finished after %g s", self.hub.held, self.config.care.drain_s)
            return False
        return True

    async def stop(self) -> None:
        """Ends at once."""
        if not self._ended:
            self._ended = True
            self.app.draining = True
            self.hub.close()
            await self._stack.aclose()

    async def configure(self, config: GatewayConfig) -> None:
        """Takes another configuration: for who waits already where it is of the queue, else from the next request on.

        Of several at once each takes its turn, and the last one told holds. Its own certificate is read again.

        Raises:
            InputError: What cannot change while it runs would change, or it cannot be used; all stays as it was.
        """
        async with self._changing:
            await self._configure(config)

    async def keep(self, phases: Phases) -> None:
        """Keeps another schedule, each engine from its next phase on; raises InputError as ``configure`` does."""
        async with self._changing:  # whoever changes something else meanwhile is not undone
            config = self.config
            await self._configure(replace(config, dispatch=replace(config.dispatch, phases=phases)))

    async def _configure(self, config: GatewayConfig) -> None:
        from lengthwise.gateway.core import check_change
        from lengthwise.gateway.edge import check_certificate, renew_certificate

        for name in _FIXED:
            if getattr(config, name) != getattr(self.config, name):
                raise InputError(
                    f"[{name}] cannot change while the gateway runs; start it anew with the new file"
                )
        check_ports(config)
        check_change(self.config.order, config.order)
        tls = config.listen.tls
        if tls is not None:
            check_certificate(tls)
        await self.fleet.configure(config)
        self.hub.configure(config)
        self.telemetry.configure(config)
        self.config = config
        if self._admin is not None:
            self._admin.configure(config)
        self.app.configure(config)
        self.relay.configure(config)
        if tls is not None and self._edge is not None:
            renew_certificate(self._edge, tls)

    async def _start(self) -> None:
        from lengthwise.gateway.core import Scheduler
        from lengthwise.gateway.edge import App, Tenants, server
        from lengthwise.gateway.forecast import told_tokens
        from lengthwise.gateway.hints import hinted_for
        from lengthwise.gateway.relay import Relay
        from lengthwise.gateway.telemetry import Telemetry

        config, listen = self.config, self.config.listen
        check_ports(config)
        door = listening(listen.host, listen.port, "port")
        self._stack.callback(door.close)
        admin_door = None
        if listen.admin_port is not None:
            admin_door = listening(listen.admin_host, listen.admin_port, "admin port")
            self._stack.callback(admin_door.close)
        self.scheduler = Scheduler(config.order, config.admission, config.dispatch)
        self.hub = Hub(self.scheduler, self._clock, self._listeners)
        tenants = Tenants()
        telemetry = Telemetry(config, self._clock, statistics=self.hub.statistics, tenants=tenants)
        self.telemetry = await self._stack.enter_async_context(telemetry)
        self.hub.listeners.add(telemetry)
        self.forecaster = await self._stack.enter_async_context(
            self._make_forecaster(config.forecasting, self._clock, self.hub.late)
        )
        self.hub.listeners.add(self.forecaster)
        self.fleet = await self._stack.enter_async_context(
            self._make_fleet(config, self._clock, self.hub.fleet_changed, busy=self._busy)
        )
        self.hub.listeners.add(self.fleet.listener)
        if self._follow is not None:
            await self._start_following(self._follow)
        await self.fleet.settled(_SETTLE_S)
        hinted = hinted_for(config, self.scheduler.engine_priority)
        self.relay: Relay = Relay(
            self.hub, self.fleet, self.forecaster, config, hinted=hinted, told=told_tokens
        )
        self._stack.push_async_callback(self.relay.aclose)
        self.app = App(
            config,
            telemetry.exchange(self.relay.exchange),
            models=self.fleet.models,
            ready=self.fleet.ready,
            clock=self._clock,
            listener=self.hub.listeners,
            tenants=tenants,
        )
        host, port = door.getsockname()[:2]
        self._edge = server(
            self.app,
            config.limits,
            host=host,
            port=port,
            tls=listen.tls,
            drain_s=_LAST_S,
            proxies=listen.proxies,
        )
        await self._serve(self._edge, door)
        self.port = port
        if admin_door is not None:
            await self._start_admin(admin_door)

    async def _start_following(self, make: Make) -> None:
        """Who watches lengths, told of every request."""
        from lengthwise.gateway.follow import Following

        phases = self.config.dispatch.phases
        assert phases is not None, "mode rra has a schedule"
        following = Following(make, phases, self.keep, self._clock)
        self.following = await self._stack.enter_async_context(following)
        self.hub.listeners.add(following)
        self.telemetry.metrics.following = lambda: following.state

    async def _start_admin(self, door: socket.socket) -> None:
        """The page and its metrics, on a port of their own."""
        from lengthwise.gateway.admin import AdminApp
        from lengthwise.gateway.edge import server

        app = self._admin = AdminApp(
            self.config, self.hub, self.fleet, self.forecaster, self.telemetry, clock=self._clock
        )
        await self._stack.enter_async_context(app)
        host, port = door.getsockname()[:2]
        await self._serve(server(app, self.config.limits, host=host, port=port, drain_s=_LAST_S), door)
        self.admin_port = port

    def _busy(self, name: str) -> int:
        """Requests in flight at a worker."""
        return sum(worker.in_flight for worker in self.hub.statistics().workers if worker.name == name)

    async def _serve(self, server: Any, door: socket.socket) -> None:
        """Runs a uvicorn server until the gateway ends."""
        server.capture_signals = contextlib.nullcontext  # they are ours
        running = asyncio.ensure_future(server.serve(sockets=[door]))

        async def end() -> None:
            server.should_exit = True
            await running

        self._stack.push_async_callback(end)
        while not server.started:
            if running.done():
                running.result()
                raise InputError(f"the gateway could not listen at {door.getsockname()}")
            await asyncio.sleep(_LOOK_S)


def _forecaster(*arguments: Any) -> Any:
    from lengthwise.gateway.forecast import Forecaster

    return Forecaster(*arguments)


def _fleet(*arguments: Any, **named: Any) -> Any:
    from lengthwise.gateway.fleet import Fleet

    return Fleet(*arguments, **named)
