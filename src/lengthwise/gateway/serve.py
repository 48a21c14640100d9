"""Run a gateway until a signal, or on a thread, and reload its configuration."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

from lengthwise.gateway.audit import SIGNAL, Actor, AuditLog
from lengthwise.gateway.background import background, on_thread
from lengthwise.gateway.certificates import CHECK_EVERY_S, RenewableContext
from lengthwise.gateway.config import AdminUser, GatewayConfig, Phases, bind_socket, check_ports, router_policy
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.replanning import ReplannerFactory
from lengthwise.gateway.request import PrefixHasher
from lengthwise.gateway.scheduler_driver import SchedulerDriver
from lengthwise.gateway.telemetry import Row
from lengthwise.schema.errors import EngineError, InputError, LengthwiseError, MissingExtraError

if TYPE_CHECKING:
    import uvicorn

    from lengthwise.gateway.admin import AdminApp
    from lengthwise.gateway.core import Scheduler
    from lengthwise.gateway.envoy import Picker
    from lengthwise.gateway.replanning import PlanTracker
    from lengthwise.gateway.shared_queue import SharedScheduler
    from lengthwise.gateway.tenants.accounts import Accounts
    from lengthwise.gateway.tenants.records import TenantSettings

_log = logging.getLogger("lengthwise.gateway")
_POLL_INTERVAL_S = 0.01
_FIRST_CHECK_S = 2.0  # time for engines to report their properties at the start; slower ones are added later
_FIXED_SECTIONS = ("listen", "prediction", "envoy", "tenants", "oidc", "external_auth", "shared_queue")
_SHUTDOWN_S = 1.0  # time for interrupted responses to be flushed at the end
_STOP_S = 60.0
_GC_THRESHOLDS = 700, 10, 10  # defaults of Python 3.11, which commands raise for a faster start
# mallopt's parameter M_MMAP_THRESHOLD and bytes. By default the first connection with TLS, with its buffer of 256 KiB,
# raises this threshold, so that later buffers come from a heap that fragments and grows for hours.
_MMAP_THRESHOLD = -3, 1 << 17


def require_extra(command: str = "lengthwise serve") -> None:
    """Raise MissingExtraError, which names the ``command``, if the extra ``gateway`` is not installed."""
    try:
        for name in ("aiohttp", "httptools", "msgspec", "prometheus_client", "uvicorn"):
            importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(command, "gateway") from error


class Gateway:
    """A complete gateway: an async context manager that serves requests within its block.

    ``wall`` is the clock of quotas. ``listeners`` receive the events of every request. ``make_predictor`` and
    ``make_fleet`` replace LengthPredictor and Fleet, for example by a predictor that knows the lengths.
    ``make_replanner`` makes a replanner, which adapts the schedule of mode rra to the lengths of requests. Raises
    InputError if the gateway cannot serve.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clock: Clock = monotonic,
        wall: Clock = time.time,
        listeners: tuple[Listener, ...] = (),
        make_predictor: Callable[..., Any] | None = None,
        make_fleet: Callable[..., Any] | None = None,
        make_replanner: ReplannerFactory | None = None,
    ) -> None:
        require_extra()
        if make_replanner is not None and config.order.mode != "rra":
            raise InputError(f"only mode rra has a schedule to replan; the mode is {config.order.mode}")
        self.config, self._clock, self._wall, self._listeners = config, clock, wall, listeners
        self._make_predictor, self._make_fleet, self._make_replanner = make_predictor, make_fleet, make_replanner
        self.port, self.started, self._stopped = 0, False, False
        self.admin_port: int | None = None
        self.picker: Picker | None = None
        self.tracker: PlanTracker | None = None
        self._configuring, self._stack = asyncio.Lock(), contextlib.AsyncExitStack()
        self._admin: AdminApp | None = None
        self.audit = AuditLog(config.listen.audit, wall)
        self.read_config: Callable[[], GatewayConfig] | None = None  # None: there is no file
        self._edge: uvicorn.Server | None = None
        self._contexts: list[RenewableContext] = []  # of this gateway's ports

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop at once. Unfinished requests fail: call ``drain`` before, so that they can finish."""
        await self.stop()

    async def drain(self) -> bool:
        """Continue to serve for ``linger_s``, then admit no request on a new connection.

        Return whether all admitted requests finished within ``drain_s`` after that. With ``linger_s``, each connection
        that is open then may send one more request, and the drain ends when no request has ended for ``linger_s``.
        """
        drain_s, linger_s = self.config.resilience.drain_s, self.config.resilience.linger_s
        self.app.closing = True
        if linger_s:
            await asyncio.sleep(linger_s)
            self.app.closing_connections = set(self._edge.server_state.connections) if self._edge else set()
        self.app.draining = True
        try:
            async with asyncio.timeout(drain_s):
                while self.driver.num_requests or self.app.in_flight or self.app.last_end_s > self._clock() - linger_s:
                    await self.driver.wait_empty()
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            _log.warning("%d requests had not finished after %g s", self.driver.num_requests, drain_s)
            return False
        return True

    async def stop(self) -> None:
        """Stop at once. Unfinished requests fail."""
        if not self._stopped:
            self._stopped = True
            self.app.draining, self.app.closing_connections = True, set()
            self.driver.close()
            await self._stack.aclose()

    async def configure(self, config: GatewayConfig, actor: Actor = SIGNAL) -> None:
        """Apply another configuration: settings of the queue to all requests, other settings to later requests.

        Concurrent calls are applied one after the other. All certificates are read again. The audit log gets the
        engines that ``actor`` adds and removes. Raises InputError, and changes nothing, if a setting cannot change
        while the gateway runs, or cannot be used.
        """
        async with self._configuring:
            before = {engine.display_url for engine in self.config.engines}
            await self._configure(config)
            after = {engine.display_url for engine in config.engines}
            for action, urls in (("worker_added", after - before), ("worker_removed", before - after)):
                for url in sorted(urls):
                    self.audit.record(actor, action, url)

    async def apply_phases(self, phases: Phases) -> None:
        """Apply another schedule from each engine's next phase on. Raises InputError as ``configure`` does."""
        async with self._configuring:  # the configuration is read inside, or a concurrent change would be lost
            config = self.config
            await self._configure(replace(config, dispatch=replace(config.dispatch, phases=phases)))

    async def _configure(self, config: GatewayConfig) -> None:
        from lengthwise.gateway.core import check_change

        for name in _FIXED_SECTIONS:
            new, old = getattr(config, name), getattr(self.config, name)
            if name == "listen":
                old = replace(old, admins=new.admins)
            if new != old:
                raise InputError(f"[{name}] cannot change while the gateway runs; restart it with the new file")
        check_ports(config)
        check_change(self.config.order, config.order)
        router_policy(config.dispatch)
        for context in self._contexts:
            context.check()
        await self.fleet.configure(config)
        self.driver.configure(config)
        self.telemetry.configure(config)
        self.config = config
        if self._admin is not None:
            self._admin.configure(config)
            self._admin.access.configure(*self._admin_users())
        self.app.configure(config)
        self.relay.configure(config)
        self._renew_certificates(force=True)

    def _renew_certificates(self, *, force: bool = False) -> None:
        pools = [getattr(worker.session.connector, "pool", None) for worker in self.fleet.workers()]
        engines = [one.tls for one in pools if one is not None]
        for context in (*self._contexts, *engines):
            if isinstance(context, RenewableContext) and (is_used := context.renew(force=force)) is not None:
                self.telemetry.metrics.counts["certificates" if is_used else "certificates_failed"] += 1

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self._renew_certificates()
            self.audit.flush()

    async def _start(self) -> None:
        from lengthwise.gateway.edge import App, Tenants
        from lengthwise.gateway.fleet import Fleet
        from lengthwise.gateway.length_prediction import LengthPredictor
        from lengthwise.gateway.relay import Relay
        from lengthwise.gateway.replanning import PlanTracker
        from lengthwise.gateway.telemetry import Telemetry

        config, listen, clock, stack = self.config, self.config.listen, self._clock, self._stack
        check_ports(config)
        listener = stack.enter_context(bind_socket(listen.host, listen.port, "port"))
        admin_listener = None
        if listen.admin_port is not None:
            admin_listener = stack.enter_context(bind_socket(listen.admin_host, listen.admin_port, "admin port"))
        tenants = self._tenants = Tenants()
        self.scheduler = self._new_scheduler()
        driver = self.driver = SchedulerDriver(self.scheduler, clock, self._listeners)
        accounts = await self._open_accounts()
        self.telemetry = Telemetry(config, clock, statistics=driver.statistics, tenants=tenants)
        self.telemetry.metrics.audit = self.audit
        make_predictor = self._make_predictor or LengthPredictor
        self.length_predictor: Any = make_predictor(config.prediction, clock, driver.repredict)
        for part in (self.telemetry, self.length_predictor):
            driver.listeners.add(await stack.enter_async_context(part))
        fleet = (self._make_fleet or Fleet)(config, clock, driver.fleet_changed, num_in_flight=self._num_in_flight)
        self.fleet: Any = await stack.enter_async_context(fleet)
        driver.listeners.add(self.fleet.listener)
        if self._make_replanner is not None:
            phases = config.dispatch.phases
            assert phases is not None, "mode rra has a schedule"
            tracker = self.tracker = PlanTracker(self._make_replanner, phases, self.apply_phases, clock)
            await stack.enter_async_context(tracker)
            driver.listeners.add(tracker)
            self.telemetry.metrics.tracker = lambda: tracker.state
        await self.fleet.wait_checked(_FIRST_CHECK_S)
        self.relay = Relay(driver, self.fleet, self.length_predictor, config)
        stack.push_async_callback(self.relay.aclose)
        state: Any = {"models": self.fleet.models, "entries": self.fleet.entries}
        state["ready"] = lambda: self.started and self.fleet.ready()
        state |= {"tenants": tenants, "clock": clock}
        handler = self.telemetry.traced(self.relay.serve)
        self.app = App(config, handler, listener=driver.listeners, **state)
        await self._open_shared_queue()
        if admin_listener is not None:
            await self._open_admin(admin_listener)
        if accounts is not None:
            self._use_accounts(accounts)
        await self._open_identity()
        await self._open_picker()
        # The clients' port opens last, so that /ready answers only when everything else is up. Until ``started`` it
        # fails, as a signal still stops the gateway at once.
        self._edge, self.port = await self._serve(self.app, listener, "tls", proxies=listen.proxies)
        await stack.enter_async_context(background(self._watch_files()))
        self.started = True

    def _new_scheduler(self) -> Scheduler:
        from lengthwise.gateway.core import Scheduler

        config, shared = self.config, self.config.shared_queue
        settings = config.order, config.admission, config.dispatch
        if shared.url is None:
            return Scheduler(*settings)
        from lengthwise.gateway.shared_queue import SharedScheduler

        name = secrets.token_hex(8)
        return SharedScheduler(*settings, gateway=name, lease_s=shared.lease_s, tenants=self._tenants)

    async def _open_shared_queue(self) -> None:
        """Join the other gateways, and share hashes of prefixes and usage of keys with them."""
        shared, app = self.config.shared_queue, self.app
        if shared.url is None:
            return
        from lengthwise.gateway.shared_queue import SharedQueue

        scheduler = cast("SharedScheduler", self.scheduler)
        scheduler.usage, scheduler.on_usage = app.pop_usage, app.add_usage
        queue = SharedQueue(shared, scheduler, self._clock, self.driver.wake)
        await self._stack.enter_async_context(queue)
        app.prefix_hasher = PrefixHasher(bytes.fromhex(queue.secret), self._tenants)
        app.configure(self.config)

    async def _open_admin(self, listener: socket.socket) -> None:
        from lengthwise.gateway.admin import Access, AdminApi, AdminApp

        parts = self.driver, self.fleet, self.length_predictor, self.telemetry
        app = self._admin = AdminApp(self.config, *parts, clock=self._clock)
        app.access = Access(*self._admin_users(), self._clock, self.audit)
        app.api = AdminApi(app.access, self)
        await self._stack.enter_async_context(app)
        _, self.admin_port = await self._serve(app, listener, "admin_tls", proxies=self.config.listen.proxies)

    async def _open_accounts(self) -> Accounts | None:
        if self.config.tenants.store is None:
            return None
        from lengthwise.gateway.tenants.accounts import Accounts

        accounts = await self._stack.enter_async_context(Accounts(self.config.tenants, wall=self._wall))
        self.driver.listeners.add(accounts)
        return accounts

    async def _open_identity(self) -> None:
        from lengthwise.gateway.edge.identity import AuthService, TokenVerifier

        if self.config.oidc is not None:
            verifier = TokenVerifier(self.config.oidc, self._clock)
            self.app.identity = await self._stack.enter_async_context(verifier)
            if self._admin is not None and self.config.oidc.role_claim is not None:
                self._admin.access.verifier, self._admin.access.role_claim = verifier, self.config.oidc.role_claim
        elif self.config.external_auth is not None:
            self.app.identity = await self._stack.enter_async_context(AuthService(self.config.external_auth))

    async def _open_picker(self) -> None:
        if self.config.envoy.ext_proc_port is not None:
            from lengthwise.gateway.envoy import Picker

            picker = Picker(self.app, self.relay, self.driver, self.fleet, self.telemetry)
            self.picker = await self._stack.enter_async_context(picker)
            self._contexts += [] if picker.tls is None else [picker.tls]

    def _use_accounts(self, accounts: Accounts) -> None:
        """Use keys and weights of the store of tenants, now and after each change. Serve the API that changes them."""
        from lengthwise.gateway.tenants.api import TenantsApi

        def renew(tenants: Mapping[str, TenantSettings]) -> None:
            self.app.renew_keys(self.config)
            self.scheduler.service.weights = {self._tenants.number(name): one.weight for name, one in tenants.items()}

        self.app.accounts, accounts.on_change = accounts, renew
        renew(accounts.tenants)
        if self._admin is not None and (api := self._admin.api) is not None:
            tenants_api = TenantsApi(accounts, lambda: self.config.slo_classes)
            api.routes |= tenants_api.routes
            api.changes |= tenants_api.changes

    def _admin_users(self) -> tuple[tuple[AdminUser, ...], bool]:
        """Return the users of the admin port, and whether clients without a token may read."""
        config, users = self.config, self.config.listen.admins
        if (digest := config.tenants.admin_sha256) is not None:
            users = (*users, AdminUser("admin", digest, "admin"))
        return users, config.is_admin_open

    def _num_in_flight(self, name: str) -> int:
        return sum(worker.in_flight for worker in self.driver.statistics().workers if worker.name == name)

    async def _serve(
        self, app: Any, listener: socket.socket, tls_name: str, **options: Any
    ) -> tuple[uvicorn.Server, int]:
        from lengthwise.gateway.edge import server as make_server

        if (tls := getattr(self.config.listen, tls_name)) is not None:
            options["tls"] = RenewableContext(tls, is_server=True, purpose=f"[listen] {tls_name}")
            self._contexts.append(options["tls"])
        host, port = listener.getsockname()[:2]
        server = make_server(app, self.config.limits, host=host, port=port, drain_s=_SHUTDOWN_S, **options)
        setattr(server, "capture_signals", contextlib.nullcontext)  # noqa: B010 - signals are the gateway's
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        self._stack.push_async_callback(lambda: running)
        self._stack.callback(setattr, server, "should_exit", True)
        while not server.started:
            if running.done():
                running.result()
                raise InputError(f"the gateway could not listen at {listener.getsockname()}")
            await asyncio.sleep(_POLL_INTERVAL_S)
        return server, int(port)


def serve(
    config: GatewayConfig,
    *,
    ready: Callable[[int, int | None], None] | None = None,
    reload: Callable[[], GatewayConfig] | None = None,
    started: Callable[[Gateway], Awaitable[None]] | None = None,
) -> None:
    """Run a gateway until a signal.

    At SIGTERM or SIGINT, /ready fails, new completion requests get 503, and admitted ones may finish within
    ``resilience.drain_s``. A second such signal, or one during the start, stops the gateway at once. At SIGHUP,
    ``reload`` reads the configuration again; if that fails, the error is logged and nothing changes. Once the gateway
    listens, ``ready`` is called with both ports (the admin port may be None), and then ``started`` with the gateway.

    Raises InputError if a port is taken or the configuration is inconsistent, and MissingExtraError.
    """
    require_extra()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(*_MMAP_THRESHOLD)
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        loop_factory = importlib.import_module("uvloop").new_event_loop

    async def after_start(gateway: Gateway) -> None:
        gc.freeze()  # so that collections of closed connections skip objects of the start
        gc.set_threshold(*_GC_THRESHOLDS)
        if ready is not None:
            ready(gateway.port, gateway.admin_port)
        if started is not None:
            await started(gateway)

    gateway = Gateway(config)
    gateway.read_config = reload
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve_until_signal(gateway, after_start))


async def _drain(gateway: Gateway, stop: asyncio.Event) -> None:
    drain_s = gateway.config.resilience.drain_s
    _log.info("stopping: %d requests may finish within %g s", gateway.driver.num_requests, drain_s)
    tasks = [asyncio.ensure_future(gateway.drain()), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _reload(gateway: Gateway) -> None:
    if gateway.read_config is None:
        _log.warning("there is no configuration file to reload")
        return
    outcome = "failed"
    try:
        await gateway.configure(gateway.read_config())
    except LengthwiseError as error:
        _log.error("the configuration stays as it was: %s", error)
    except Exception:  # noqa: BLE001 - logged; the gateway serves on
        _log.exception("the configuration stays as it was, as reading it failed unexpectedly")
    else:
        _log.info("the configuration was reloaded")
        outcome = "ok"
    gateway.audit.record(SIGNAL, "reload", outcome=outcome)


async def _serve_until_signal(gateway: Gateway, started: Callable[[Gateway], Awaitable[None]]) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    up, first, second = asyncio.Event(), asyncio.Event(), asyncio.Event()
    reloads: set[asyncio.Future[None]] = set()  # references keep the tasks alive

    def on_stop() -> None:
        (second if first.is_set() else first).set()
        if not up.is_set():
            task.cancel()

    async def on_reload() -> None:
        await up.wait()
        await _reload(gateway)

    handlers = {signal.SIGTERM: on_stop, signal.SIGINT: on_stop}
    handlers[signal.SIGHUP] = lambda: reloads.add(asyncio.ensure_future(on_reload()))
    for number, handler in handlers.items():  # before the start, as a signal without a handler kills the process
        loop.add_signal_handler(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)  # the command blocks them during its imports
    try:
        async with gateway:
            up.set()
            await started(gateway)
            await first.wait()
            await _drain(gateway, second)
        await asyncio.gather(*reloads)
    except asyncio.CancelledError:
        if not first.is_set():
            raise
        task.uncancel()
        _log.info("stopped before the gateway had started")
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


class BackgroundGateway:
    """A gateway on another thread. ``rows`` are the journal's rows of finished requests, with any outcome, in order."""

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        self.gateway, self._loop = gateway, loop
        self.rows: list[Row] = []

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"http://127.0.0.1:{self.gateway.port}"

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = _STOP_S) -> Any:
        """Return the result of a coroutine on the gateway's event loop. Raises TimeoutError after ``timeout_s``."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=timeout_s)


@contextlib.contextmanager
def background_gateway(
    config: GatewayConfig,
    listeners: tuple[Listener, ...] = (),
    *,
    start_timeout_s: float = 30.0,
    make_replanner: ReplannerFactory | None = None,
) -> Iterator[BackgroundGateway]:
    """Run a gateway on a thread until the end of the block. Its engines must be up within ``start_timeout_s``.

    ``listeners`` receive the events of every request, on the gateway's thread. ``make_replanner`` makes a replanner for
    mode rra. Raises InputError if the gateway cannot start, EngineError if an engine is down or cannot be used.
    """

    @contextlib.asynccontextmanager
    async def serving() -> AsyncIterator[BackgroundGateway]:
        loop = asyncio.get_running_loop()
        async with Gateway(config, listeners=listeners, make_replanner=make_replanner) as gateway:
            await gateway.fleet.wait_checked(start_timeout_s)
            for worker in gateway.fleet.workers():
                if error := worker.unavailable_reason(loop.time()):
                    url = worker.engine.display_url
                    raise EngineError(f"the engine {url} must be up and serve a model; it is {error}")
            served = BackgroundGateway(gateway, loop)
            gateway.telemetry.timelines.subscribe(served.rows.append)
            yield served

    with on_thread(serving(), "gateway") as served:
        yield served
