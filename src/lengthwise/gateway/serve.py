"""Runs a gateway until it is told to end, and lets it read its configuration again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lengthwise.gateway.config import GatewayConfig, Phases, check_ports, listening
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.replanning import Make
from lengthwise.gateway.scheduler_driver import SchedulerDriver
from lengthwise.gateway.telemetry import Row
from lengthwise.schema.errors import EngineError, InputError, LengthwiseError, MissingExtraError


def require_extra() -> None:
    """Raises MissingExtraError where the extra ``gateway`` is not installed."""
    try:
        import aiohttp  # noqa: F401
        import httptools  # noqa: F401
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("lengthwise serve", "gateway") from error


if TYPE_CHECKING:
    import uvicorn

    from lengthwise.gateway.admin import AdminApp
    from lengthwise.gateway.relay import Relay
    from lengthwise.gateway.replanning import Make, PlanTracker

_gateway_log = logging.getLogger("lengthwise.gateway")
_POLL_INTERVAL_S = 0.01
_SETTLE_S = 2.0
"""So long the start waits for engines to tell what they are; who is slower is heard later."""
_FIXED = ("listen", "prediction")
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
        self._finished = False
        self._admin: AdminApp | None = None
        self._edge: uvicorn.Server | None = None
        self._follow = follow
        self.tracker: PlanTracker | None = None

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
            async with asyncio.timeout(self.config.resilience.drain_s):
                while self.driver.num_requests or self.app.in_flight:
                    await self.driver.emptied()
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            _gateway_log.warning(
                "%d requests had not finished after %g s", self.driver.num_requests, self.config.resilience.drain_s
            )
            return False
        return True

    async def stop(self) -> None:
        """Ends at once."""
        if not self._finished:
            self._finished = True
            self.app.draining = True
            self.driver.close()
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
                raise InputError(f"[{name}] cannot change while the gateway runs; start it anew with the new file")
        check_ports(config)
        check_change(self.config.order, config.order)
        tls = config.listen.tls
        if tls is not None:
            check_certificate(tls)
        await self.fleet.configure(config)
        self.driver.configure(config)
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
        from lengthwise.gateway.length_prediction import requested_tokens
        from lengthwise.gateway.relay import Relay
        from lengthwise.gateway.relay.engine_request import hint_adder
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
        self.driver = SchedulerDriver(self.scheduler, self._clock, self._listeners)
        tenants = Tenants()
        telemetry = Telemetry(config, self._clock, statistics=self.driver.statistics, tenants=tenants)
        self.telemetry = await self._stack.enter_async_context(telemetry)
        self.driver.listeners.add(telemetry)
        self.forecaster = await self._stack.enter_async_context(
            self._make_forecaster(config.prediction, self._clock, self.driver.late)
        )
        self.driver.listeners.add(self.forecaster)
        self.fleet = await self._stack.enter_async_context(
            self._make_fleet(config, self._clock, self.driver.fleet_changed, busy=self._busy)
        )
        self.driver.listeners.add(self.fleet.listener)
        if self._follow is not None:
            await self._start_following(self._follow)
        await self.fleet.stable(_SETTLE_S)
        add_hints = hint_adder(config, self.scheduler.engine_priority)
        self.relay: Relay = Relay(self.driver, self.fleet, self.forecaster, config, add_hints=add_hints, requested_tokens=requested_tokens)
        self._stack.push_async_callback(self.relay.aclose)
        self.app = App(
            config,
            telemetry.exchange(self.relay.exchange),
            models=self.fleet.models,
            ready=self.fleet.ready,
            clock=self._clock,
            listener=self.driver.listeners,
            tenants=tenants,
        )
        host, port = door.getsockname()[:2]
        self._edge = server(
            self.app, config.limits, host=host, port=port, tls=listen.tls, drain_s=_LAST_S, proxies=listen.proxies
        )
        await self._serve(self._edge, door)
        self.port = port
        if admin_door is not None:
            await self._start_admin(admin_door)

    async def _start_following(self, make: Make) -> None:
        """Who watches lengths, told of every request."""
        from lengthwise.gateway.replanning import PlanTracker

        phases = self.config.dispatch.phases
        assert phases is not None, "mode rra has a schedule"
        following = PlanTracker(make, phases, self.keep, self._clock)
        self.tracker = await self._stack.enter_async_context(following)
        self.driver.listeners.add(following)
        self.telemetry.metrics.tracker = lambda: following.state

    async def _start_admin(self, door: socket.socket) -> None:
        """The page and its metrics, on a port of their own."""
        from lengthwise.gateway.admin import AdminApp
        from lengthwise.gateway.edge import server

        app = self._admin = AdminApp(
            self.config, self.driver, self.fleet, self.forecaster, self.telemetry, clock=self._clock
        )
        await self._stack.enter_async_context(app)
        host, port = door.getsockname()[:2]
        await self._serve(server(app, self.config.limits, host=host, port=port, drain_s=_LAST_S), door)
        self.admin_port = port

    def _busy(self, name: str) -> int:
        """Requests in flight at a worker."""
        return sum(worker.in_flight for worker in self.driver.statistics().workers if worker.name == name)

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
            await asyncio.sleep(_POLL_INTERVAL_S)


def _forecaster(*arguments: Any) -> Any:
    from lengthwise.gateway.length_prediction import Forecaster

    return Forecaster(*arguments)


def _fleet(*arguments: Any, **named: Any) -> Any:
    from lengthwise.gateway.fleet import Fleet

    return Fleet(*arguments, **named)


_log = logging.getLogger("lengthwise.gateway")


def serve(
    config: GatewayConfig,
    *,
    ready: Callable[[int, int | None], None] | None = None,
    reload: Callable[[], GatewayConfig] | None = None,
    started: Callable[[Gateway], Awaitable[None]] | None = None,
) -> None:
    """Runs a gateway until it is told to end.

    SIGTERM or SIGINT: /ready says no, who comes is sent away with 503, who is in may finish within
    ``care.drain_s``; a second one ends it at once. SIGHUP: ``reload`` reads the configuration again; what it
    cannot read, or what cannot change, is logged, and all stays as it was.

    Args:
        config: What it is told.
        ready: Called with both ports once it listens.
        reload: Reads the configuration again; raises a LengthwiseError where it is bad.
        started: Awaited with the gateway once it listens, while it serves.

    Raises:
        InputError: A port cannot be had, or the configuration does not hold together.
        MissingExtraError: The extra ``gateway`` is not installed.
    """
    require_extra()
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_until_told(config, ready, reload, started))


async def _until_told(
    config: GatewayConfig,
    ready: Callable[[int, int | None], None] | None,
    reload: Callable[[], GatewayConfig] | None,
    started: Callable[[Gateway], Awaitable[None]] | None,
) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    reloads: set[asyncio.Future[None]] = set()
    async with Gateway(config) as gateway:
        with _signals(first, second, lambda: reloads.add(asyncio.ensure_future(_reloaded(gateway, reload)))):
            if ready is not None:
                ready(gateway.port, gateway.admin_port)
            if started is not None:
                await started(gateway)
            await first.wait()
            _log.info("ending: %d requests may finish within %g s", gateway.driver.num_requests, config.resilience.drain_s)
            await _first_of(gateway.drain(), second.wait())
        await asyncio.gather(*reloads)


@contextlib.contextmanager
def _signals(first: asyncio.Event, second: asyncio.Event, retry: Callable[[], None]) -> Any:
    loop = asyncio.get_running_loop()

    def told() -> None:
        (second if first.is_set() else first).set()

    handlers = {signal.SIGTERM: told, signal.SIGINT: told}
    if hasattr(signal, "SIGHUP"):
        handlers[signal.SIGHUP] = retry
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def _reloaded(gateway: Gateway, reload: Callable[[], GatewayConfig] | None) -> None:
    if reload is None:
        _log.warning("there is no file to read again")
        return
    try:
        await gateway.configure(reload())
    except LengthwiseError as error:
        _log.error("the configuration stays as it was: %s", error)
    else:
        _log.info("the configuration was read again")


async def _first_of(*works: Any) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_STOP_S = 60.0


class BackgroundGateway:
    """A gateway on another thread.

    Attributes:
        gateway: It; what is read of it is read while its thread goes on.
        rows: Requests that are over, in the order of their ends.
    """

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        self.gateway, self._loop = gateway, loop
        self.rows: list[Row] = []

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://127.0.0.1:{self.gateway.port}"

    def call(self, what: Coroutine[Any, Any, Any], within_s: float = _STOP_S) -> Any:
        """What a coroutine of the gateway returns, run where it lives."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=within_s)


@contextmanager
def background_gateway(
    config: GatewayConfig, listeners: tuple[Listener, ...] = (), *, engines_s: float = 30.0, follow: Make | None = None
) -> Iterator[BackgroundGateway]:
    """A gateway that serves until the end of the block, all of its engines up.

    Args:
        config: What it is told.
        listeners: Told of every request, on its thread.
        engines_s: So long engines may take to tell what they are.
        follow: Has the schedule of mode rra follow the lengths of its own traffic; None: it stays.

    Raises:
        InputError: It cannot start.
        EngineError: An engine is not there, or cannot be used.
    """
    ready: Future[tuple[BackgroundGateway, asyncio.Event]] = Future()
    thread = threading.Thread(
        target=lambda: _run(_serve(config, listeners, engines_s, follow, ready), ready), name="gateway", daemon=True
    )
    thread.start()
    running, over = ready.result()
    try:
        yield running
    finally:
        running._loop.call_soon_threadsafe(over.set)  # noqa: SLF001 - of this file
        thread.join(timeout=_STOP_S)


def _run(work: Coroutine[Any, Any, None], ready: Future[Any]) -> None:
    try:
        asyncio.run(work)
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


async def _serve(
    config: GatewayConfig,
    listeners: tuple[Listener, ...],
    engines_s: float,
    follow: Make | None,
    ready: Future[tuple[BackgroundGateway, asyncio.Event]],
) -> None:
    over = asyncio.Event()
    async with Gateway(config, listeners=listeners, follow=follow) as gateway:
        await gateway.fleet.stable(engines_s)
        now_s = asyncio.get_running_loop().time()
        for worker in gateway.fleet.workers():
            if trouble := worker.trouble(now_s):
                raise EngineError(f"the engine {worker.engine.display_url} must be there and serve a model; it is {trouble}")
        running = BackgroundGateway(gateway, asyncio.get_running_loop())
        gateway.telemetry.trips.subscribe(running.rows.append)
        ready.set_result((running, over))
        await over.wait()
