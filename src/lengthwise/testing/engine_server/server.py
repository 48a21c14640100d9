"""Serves an emulated engine over HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self

from lengthwise.engine.continuous_batching import ClockedBatch
from lengthwise.gateway.background import on_thread, stop_accepting
from lengthwise.schema.deployment import NULL_BLOCKS
from lengthwise.schema.errors import MissingExtraError
from lengthwise.testing.engine_server import completions
from lengthwise.testing.engine_server.engine import EngineSpec
from lengthwise.testing.engine_server.request_handler import FaultPlan, Log, RequestHandler, parse_faults
from lengthwise.testing.engine_server.routes import ROUTES, count_tokens

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

VERSION = "0.33.0+emulated"

_METRICS: dict[str, dict[str, str]] = {
    "vllm": {
        "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "queued",
        "vllm:kv_cache_usage_perc": "kv_used", "vllm:num_preemptions_total": "preemptions",
        "vllm:generation_tokens_total": "tokens",
    },
    "sglang": {
        "sglang:num_running_reqs": "running", "sglang:num_queue_reqs": "queued", "sglang:token_usage": "kv_used",
        "sglang:num_retracted_reqs": "preemptions", "sglang:generation_tokens_total": "tokens",
    },
    "llama.cpp": {
        "llamacpp:requests_processing": "running", "llamacpp:requests_deferred": "queued",
        "llamacpp:kv_cache_usage_ratio": "kv_used", "llamacpp:tokens_predicted_total": "tokens",
    },
}  # fmt: skip
"""Metrics by kind: name and attribute of the batch; only names that end in ``_total`` are counters."""


def metrics(server: EngineServer) -> str:
    """Return metrics as Prometheus text, with the names of this kind of engine, or "" if it has none."""
    spec, lines = server.spec, []
    for name, attribute in _METRICS.get(spec.kind, {}).items():
        labels = f'{{engine="0",model_name="{spec.model}"}}' if spec.kind != "llama.cpp" else ""
        kind, value = "counter" if name.endswith("_total") else "gauge", float(getattr(server.clocked.batch, attribute))
        lines += [f"# HELP {name} Emulated.", f"# TYPE {name} {kind}", f"{name}{labels} {value}"]
    if spec.kind == "vllm":
        blocks = spec.limits.num_blocks + NULL_BLOCKS
        labels = f'block_size="{spec.limits.block_size}",engine="0",num_gpu_blocks="{blocks}"'
        name = "vllm:cache_config_info"
        lines += [f"# HELP {name} Emulated.", f"# TYPE {name} gauge", f"{name}{{{labels}}} 1.0"]
    return "\n".join([*lines, ""]) if lines else ""


def _models(server: EngineServer) -> dict[str, Any]:
    spec = server.spec
    row: dict[str, Any] = {"id": spec.model, "object": "model", "created": 0, "owned_by": _OWNERS[spec.kind]}
    if spec.kind in {"vllm", "sglang"}:
        row["max_model_len"] = spec.max_model_len
    return {"object": "list", "data": [row]}


def _slots(server: EngineServer) -> list[dict[str, Any]]:
    running, length = server.clocked.batch.running, server.spec.max_model_len
    return [{"id": i, "n_ctx": length, "is_processing": i < running} for i in range(server.spec.limits.max_num_seqs)]


def _props(server: EngineServer) -> dict[str, Any]:
    return {
        "build_info": f"b{VERSION}",
        "total_slots": server.spec.limits.max_num_seqs,
        "default_generation_settings": {"n_ctx": server.spec.max_model_len},
        "model_path": server.spec.model,
    }


def _server_info(server: EngineServer) -> dict[str, Any]:
    limits = server.spec.limits
    return {
        "version": VERSION,
        "served_model_name": server.spec.model,
        "max_running_requests": limits.max_num_seqs,
        "max_total_num_tokens": limits.num_blocks * limits.block_size,
        "enable_priority_scheduling": limits.by_priority,
        "schedule_low_priority_values_first": False,
    }


_METADATA: dict[str, dict[str, Callable[[EngineServer], Any]]] = {
    "vllm": {"/version": lambda _: {"version": VERSION}},
    "sglang": {
        "/server_info": _server_info,
        "/get_server_info": _server_info,
        "/get_model_info": lambda server: {"model_path": server.spec.model, "is_generation": True},
    },
    "llama.cpp": {"/slots": _slots, "/props": _props},
    "openai": {},
}
"""Metadata routes by kind."""
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "openai": "openai"}
_ABORT_ROUTES = {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}
_MAX_BYTES = 64 << 20


def _app(server: EngineServer) -> web.Application:  # noqa: C901, PLR0915 - one short handler per route
    from aiohttp import web

    spec = server.spec
    text_field = "content" if spec.kind == "llama.cpp" else "prompt"

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in ROUTES and not request.path.startswith("/emulator"):
            server.log.others.append(f"{request.method} {request.path}")
        # As in vLLM, the key protects /v1 and /inference alone.
        expected = server.spec.api_key  # tests change the specification of a running server
        if expected is not None and request.path.startswith(("/v1", "/inference")):
            key = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(key.encode(), expected.encode()):
                return web.json_response(completions.error_body("Unauthorized", "AuthenticationError", 401), status=401)
        try:
            return await handler(request)
        except completions.RefusedError as error:
            return web.json_response(completions.error_body(str(error), error.kind, error.status), status=error.status)

    async def complete(request: web.Request) -> web.StreamResponse:
        if server.is_sleeping:
            raise completions.RefusedError(503, "The engine is sleeping.")
        return await RequestHandler(server, request).run()

    async def health(_: web.Request) -> web.Response:
        status = 200 if server.healthy else 503
        if spec.kind == "llama.cpp":
            return web.json_response({"status": "ok" if server.healthy else "error"}, status=status)
        return web.Response(status=status)

    async def prometheus(_: web.Request) -> web.Response:
        return web.Response(text=metrics(server), content_type="text/plain")

    def sleep(*, is_sleeping: bool) -> Handler:
        async def handle(_: web.Request) -> web.Response:
            server.is_sleeping = is_sleeping
            return web.Response(status=200)

        return handle

    def metadata(read: Callable[[EngineServer], Any]) -> Handler:
        async def handle(_: web.Request) -> web.Response:
            return web.json_response(read(server))

        return handle

    async def log(request: web.Request) -> web.Response:
        entries = server.log.entries[int(request.query.get("since", "0")) :]
        numbers = {"aborts": server.aborts, "slots_in_use": server.slots_in_use, "open": server.log.open}
        return web.json_response({"entries": [dataclasses.asdict(entry) for entry in entries]} | numbers)

    def with_body(respond: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(respond(completions.parse_body(await request.read())) or {})

        return handle

    def tokenize(body: dict[str, Any]) -> dict[str, Any]:
        if spec.kind == "llama.cpp":
            return {"tokens": completions.encode(str(body.get("content", "")))}
        if "messages" in body:
            ids = completions.chat_ids(body)
        elif isinstance(text := body.get(text_field), str):
            ids = completions.prompt_ids(text) if body.get("add_special_tokens", True) else completions.encode(text)
        else:
            raise completions.RefusedError(400, "prompt: Field required")
        return {"count": len(ids), "max_model_len": spec.max_model_len, "tokens": ids}

    def detokenize(body: dict[str, Any]) -> dict[str, Any]:
        return {text_field: completions.decode(completions.prompt_ids(body.get("tokens")))}

    def abort(body: dict[str, Any]) -> None:
        ids = body.get("request_ids", body.get("rid", ()))
        server.abort({ids} if isinstance(ids, str) else set(map(str, ids)))

    def set_faults(body: dict[str, Any]) -> None:
        try:
            server.faults = parse_faults(body)
        except (TypeError, ValueError) as error:
            raise completions.RefusedError(400, str(error)) from None

    def set_health(body: dict[str, Any]) -> None:
        server.healthy = bool(body.get("healthy", True))

    routes = [
        *(web.post(path, complete) for path in ROUTES),
        web.post("/v1/messages/count_tokens", with_body(count_tokens)),
        web.get("/v1/models", metadata(_models)),
        web.get("/emulator/log", log),
        web.post("/emulator/faults", with_body(set_faults)),
        web.post("/emulator/health", with_body(set_health)),
        *(web.get(path, metadata(read)) for path, read in _METADATA[spec.kind].items()),
    ]
    if spec.kind != "openai":
        routes += [web.get("/health", health), web.get("/metrics", prometheus)]
        routes += [web.post("/tokenize", with_body(tokenize)), web.post("/detokenize", with_body(detokenize))]
    if spec.kind == "vllm":  # as in its development mode
        routes += [web.post("/sleep", sleep(is_sleeping=True)), web.post("/wake_up", sleep(is_sleeping=False))]
    if spec.kind in _ABORT_ROUTES:
        routes.append(web.post(_ABORT_ROUTES[spec.kind], with_body(abort)))
    app = web.Application(client_max_size=_MAX_BYTES, middlewares=[check_key])
    app.add_routes(routes)
    return app


_DEFAULT = EngineSpec()
_POLL_INTERVAL_S = 0.002
_SHUTDOWN_TIMEOUT_S = 0.05  # for a handler that started while the port was closed; aiohttp takes 0 as no limit


async def close_runner(runner: web.AppRunner, *, reset: bool = False) -> None:
    """Close the ports and all connections of an aiohttp server, also those whose client does not read.

    If ``reset``, requests in progress end at once, otherwise within the runner's ``shutdown_timeout``.
    """
    servers = (getattr(site, "_server", None) for site in runner.sites)
    await stop_accepting([listener for server in servers if server for listener in server.sockets])
    connections = runner.server.connections if runner.server else ()
    transports = [one.transport for one in connections if one.transport is not None]
    if reset:
        for transport in transports:
            transport.abort()
    await runner.cleanup()
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0)  # the loop closes the sockets in its next turn


class EngineServer:
    """OpenAI-compatible engine that batches, queues, preempts and fails as real ones do, and writes toy text.

    The server is an async context manager that needs aiohttp (extra ``gateway``). Many servers can run in one event
    loop. ``port`` 0 selects a free port. ``faults`` may be changed at any time. A restart reuses the port and continues
    the ``log``, but not the batch (``clocked``). If ``healthy`` is false, /health returns 503. If ``is_sleeping`` is
    true, completions return 503. The fault "die" first calls ``exit_process``, if it is set: it may end the process.
    """

    def __init__(
        self, spec: EngineSpec = _DEFAULT, *, host: str = "127.0.0.1", port: int = 0, faults: FaultPlan | None = None
    ) -> None:
        self.spec: EngineSpec = spec
        self.host, self.port, self.faults, self.log = host, port, faults or FaultPlan(), Log()
        self.healthy, self.is_sleeping, self.restarts = True, False, 0
        self.exit_process: Any = None
        self.handlers: dict[int, tuple[str, RequestHandler]] = {}
        self.clocked: ClockedBatch
        self._runner: web.AppRunner | None = None
        self.dying: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Return the base URL."""
        return f"http://{self.host}:{self.port}"

    @property
    def up(self) -> bool:
        """Return whether the server listens."""
        return self._runner is not None

    @property
    def aborts(self) -> int:
        """Return the number of requests that ended by a client disconnect or an abort request."""
        return self.log.count("aborted")

    @property
    def slots_in_use(self) -> int:
        """Return the number of sequences that are queued or run in the batch. It is 0 if no request has leaked."""
        return self.clocked.batch.queued + self.clocked.batch.running

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.dying is not None:
            await self.dying
        await self.die()

    async def _start(self) -> None:
        try:
            from aiohttp import web
        except ImportError as error:
            raise MissingExtraError("lengthwise.testing.engine_server", "gateway") from error
        spec, loop = self.spec, asyncio.get_running_loop()
        self.clocked = ClockedBatch(spec.limits, spec.steps, loop, speed=spec.speed)
        runner = web.AppRunner(
            _app(self), access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
        )
        await runner.setup()
        await web.TCPSite(runner, self.host, self.port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    async def die(self) -> None:
        """Reset all connections and close the port immediately. Requests in the batch are lost."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self.clocked.stop()
        for _, handler in self.handlers.values():
            self.log.finish(handler.entry, "died")
        await close_runner(runner, reset=True)

    def die_soon(self) -> None:
        """Start ``die`` from a handler, which cannot await it because ``die`` waits for all handlers."""
        if self.exit_process is not None:
            self.exit_process()
        self.dying = asyncio.create_task(self.die())

    async def restart(self) -> None:
        """Die if the server is alive, then listen on the same port with an empty batch."""
        if self.dying is not None:
            await self.dying
            self.dying = None
        await self.die()
        self.restarts += 1
        await self._start()

    async def idle(self, within_s: float = 60.0) -> None:
        """Wait until no request is open. Raises TimeoutError after ``within_s``."""
        async with asyncio.timeout(within_s):
            while self.log.open or self.slots_in_use:  # noqa: ASYNC110 - for tests alone
                await asyncio.sleep(_POLL_INTERVAL_S)

    def abort(self, request_ids: set[str]) -> int:
        """Abort requests by the ids that their clients chose. Return the number of requests found."""
        handlers = [handler for name, handler in self.handlers.values() if name and name in request_ids]
        for handler in handlers:
            with contextlib.suppress(KeyError):
                handler.abort()
        return len(handlers)


class RunningServers:
    """Servers that run in a thread of their own. Other threads may use their logs and faults."""

    def __init__(self, servers: tuple[EngineServer, ...], loop: asyncio.AbstractEventLoop) -> None:
        self.servers, self._loop = servers, loop

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a server's coroutine (``die``, ``restart``, ``idle``) in their loop; TimeoutError after 60 s."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=60)


@contextmanager
def in_thread(*servers: EngineServer) -> Iterator[RunningServers]:
    """Run servers in a thread until the end of the block."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[RunningServers]:
        async with AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server)
            yield RunningServers(servers, asyncio.get_running_loop())

    with on_thread(serving(), "engines") as running:
        yield running
