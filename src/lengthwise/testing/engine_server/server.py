"""The emulated engine as a server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from lengthwise.schema.errors import MissingExtraError
from lengthwise.testing.engine_server.completions import (
    RefusedError,
    chat_ids,
    decode,
    encode,
    error_body,
    prompt_ids,
    read_body,
)
from lengthwise.testing.engine_server.engine import ClockedBatch, EngineSpec
from lengthwise.testing.engine_server.request_handler import Answering, FaultPlan, Log, read_plan

MetadataHandler = Callable[["EngineServer"], Any]
VERSION = "0.33.0+emulated"


def metrics(server: EngineServer) -> str:
    """Prometheus text under the kind's own names; "" where it has none."""
    batch = server.clocked.batch
    values = {
        "running": batch.running,
        "waiting": batch.queued,
        "kv": batch.kv_used,
        "preemptions": batch.preemptions,
        "tokens": batch.tokens,
    }
    lines = []
    for name, key, kind in _METRICS.get(server.spec.kind, ()):
        labels = f'{{engine="0",model_name="{server.spec.model}"}}' if server.spec.kind != "llama.cpp" else ""
        lines += [f"# HELP {name} Emulated.", f"# TYPE {name} {kind}", f"{name}{labels} {float(values[key])}"]
    if server.spec.kind == "vllm":
        lines += ["# HELP vllm:cache_config_info Emulated.", "# TYPE vllm:cache_config_info gauge", _cache(server)]
    return "\n".join([*lines, ""]) if lines else ""


def _cache(server: EngineServer) -> str:
    limits = server.spec.limits
    told = f'block_size="{limits.block_size}",engine="0",num_gpu_blocks="{limits.num_blocks}"'
    return f"vllm:cache_config_info{{{told}}} 1.0"


_METRICS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "vllm": (
        ("vllm:num_requests_running", "running", "gauge"),
        ("vllm:num_requests_waiting", "waiting", "gauge"),
        ("vllm:kv_cache_usage_perc", "kv", "gauge"),
        ("vllm:num_preemptions_total", "preemptions", "counter"),
        ("vllm:generation_tokens_total", "tokens", "counter"),
    ),
    "sglang": (
        ("sglang:num_running_reqs", "running", "gauge"),
        ("sglang:num_queue_reqs", "waiting", "gauge"),
        ("sglang:token_usage", "kv", "gauge"),
        ("sglang:num_retracted_reqs", "preemptions", "gauge"),
        ("sglang:generation_tokens_total", "tokens", "counter"),
    ),
    "llama.cpp": (
        ("llamacpp:requests_processing", "running", "gauge"),
        ("llamacpp:requests_deferred", "waiting", "gauge"),
        ("llamacpp:kv_cache_usage_ratio", "kv", "gauge"),
        ("llamacpp:tokens_predicted_total", "tokens", "counter"),
    ),
}


def _slots(server: EngineServer) -> list[dict[str, Any]]:
    busy = server.clocked.batch.running
    slots, length = server.spec.limits.max_num_seqs, server.spec.max_model_len
    return [{"id": i, "n_ctx": length, "is_processing": i < busy} for i in range(slots)]


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


METADATA: dict[str, dict[str, MetadataHandler]] = {
    "vllm": {"/version": lambda _: {"version": VERSION}},
    "sglang": {
        "/server_info": _server_info,
        "/get_server_info": _server_info,
        "/get_model_info": lambda server: {"model_path": server.spec.model, "is_generation": True},
    },
    "llama.cpp": {"/slots": _slots, "/props": _props},
    "openai": {},
}
"""Routes that only tell something, by kind."""
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "openai": "openai"}
TOKENIZES = {"vllm": "prompt", "sglang": "prompt", "llama.cpp": "content"}
"""The field of ``/tokenize`` that holds the text."""
ABORTS = {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}


if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BYTES = 64 << 20


def app(server: EngineServer) -> web.Application:
    """An application of aiohttp with the routes of the server's kind, and /emulator/* for tests."""
    from aiohttp import web

    doors = _Doors(server)

    @web.middleware
    async def keyed(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await doors.keyed(request, handler)

    made = web.Application(client_max_size=_MAX_BYTES, middlewares=[keyed])
    made.router.add_post("/v1/completions", doors.completions)
    made.router.add_post("/v1/chat/completions", doors.chat)
    made.router.add_get("/v1/models", doors.models)
    kind = server.spec.kind
    if kind != "openai":
        made.router.add_get("/health", doors.health)
        made.router.add_get("/metrics", doors.metrics)
        made.router.add_post("/tokenize", doors.tokenize)
        made.router.add_post("/detokenize", doors.detokenize)
    if kind == "vllm":  # as in its development mode
        made.router.add_post("/sleep", doors.sleep)
        made.router.add_post("/wake_up", doors.wake_up)
    if kind in ABORTS:
        made.router.add_post(ABORTS[kind], doors.abort)
    for path, metadata in METADATA[kind].items():
        made.router.add_get(path, doors.fact(metadata))
    made.router.add_get("/emulator/log", doors.log)
    made.router.add_post("/emulator/faults", doors.faults)
    made.router.add_post("/emulator/health", doors.set_health)
    return made


class _Doors:
    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def keyed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """As vLLM: the key guards /v1 and /inference alone."""
        key = self._server.spec.api_key
        if not request.path.startswith(("/v1/c", "/emulator")):
            self._server.log.others.append(f"{request.method} {request.path}")
        if key is not None and request.path.startswith(("/v1", "/inference")):
            shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(shown.encode(), key.encode()):
                return self._json(error_body("Unauthorized", "AuthenticationError", 401), 401)
        try:
            return await handler(request)
        except RefusedError as error:
            return self._json(error_body(str(error), error.kind, error.status), error.status)

    def _json(self, body: Any, status: int = 200) -> web.Response:
        from aiohttp import web

        return web.json_response(body, status=status)

    async def sleep(self, _: web.Request) -> web.Response:
        return self._set_asleep(in_sleep=True)

    async def wake_up(self, _: web.Request) -> web.Response:
        return self._set_asleep(in_sleep=False)

    def _set_asleep(self, *, in_sleep: bool) -> web.Response:
        from aiohttp import web

        self._server.in_sleep = in_sleep
        return web.Response(status=200)

    def _require_awake(self) -> None:
        if self._server.in_sleep:
            raise RefusedError(503, "The engine sleeps.")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self._require_awake()
        return await Answering(self._server, request, chat=False).run()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self._require_awake()
        return await Answering(self._server, request, chat=True).run()

    async def models(self, _: web.Request) -> web.Response:
        spec = self._server.spec
        row: dict[str, Any] = {"id": spec.model, "object": "model", "created": 0, "owned_by": OWNERS[spec.kind]}
        if spec.kind in {"vllm", "sglang"}:
            row["max_model_len"] = spec.max_model_len
        return self._json({"object": "list", "data": [row]})

    async def health(self, _: web.Request) -> web.Response:
        from aiohttp import web

        status = 200 if self._server.healthy else 503
        if self._server.spec.kind == "llama.cpp":
            return self._json({"status": "ok" if status == 200 else "error"}, status)
        return web.Response(status=status)

    async def metrics(self, _: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(text=metrics(self._server), content_type="text/plain")

    async def tokenize(self, request: web.Request) -> web.Response:
        spec, body = self._server.spec, read_body(await request.read())
        if spec.kind == "llama.cpp":
            return self._json({"tokens": encode(str(body.get("content", "")))})
        if "messages" in body:
            ids = chat_ids(body)
        elif isinstance(text := body.get(TOKENIZES[spec.kind]), str):
            ids = prompt_ids(text) if body.get("add_special_tokens", True) else encode(text)
        else:
            raise RefusedError(400, "prompt: Field required")
        return self._json({"count": len(ids), "max_model_len": spec.max_model_len, "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = read_body(await request.read())
        name = "content" if self._server.spec.kind == "llama.cpp" else "prompt"
        return self._json({name: decode(body.get("tokens", ()))})

    async def abort(self, request: web.Request) -> web.Response:
        body = read_body(await request.read())
        ids = body.get("request_ids", body.get("rid", ()))
        self._server.abort({ids} if isinstance(ids, str) else set(map(str, ids)))
        return self._json({})

    def fact(self, metadata: MetadataHandler) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A door that tells something."""

        async def told(_: web.Request) -> web.Response:
            return self._json(metadata(self._server))

        return told

    async def log(self, request: web.Request) -> web.Response:
        since = int(request.query.get("since", "0"))
        rows = [dataclasses.asdict(entry) for entry in self._server.log.entries[since:]]
        return self._json(
            {
                "entries": rows,
                "aborts": self._server.aborts,
                "slots_in_use": self._server.slots_in_use,
                "open": self._server.log.open,
            }
        )

    async def faults(self, request: web.Request) -> web.Response:
        try:
            self._server.faults = read_plan(read_body(await request.read()))
        except (TypeError, ValueError) as error:
            raise RefusedError(400, str(error)) from None
        return self._json({})

    async def set_health(self, request: web.Request) -> web.Response:
        self._server.healthy = bool(read_body(await request.read()).get("healthy", True))
        return self._json({})


if TYPE_CHECKING:
    from aiohttp import web

_PLAIN = EngineSpec()
_POLL_INTERVAL_S = 0.002
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
        in_sleep: Whether it was put to sleep (/sleep, as vLLM has it in its development mode): it answers nobody.
        clocked: The batch; a new one after a restart.
        restarts: How often it was started again.
        dies_hard: What ``die`` does in place of closing: a process of its own ends itself.
    """

    def __init__(
        self, spec: EngineSpec = _PLAIN, *, host: str = "127.0.0.1", port: int = 0, faults: FaultPlan | None = None
    ) -> None:
        self.spec: EngineSpec = spec
        self.host, self.port = host, port
        self.faults = faults or FaultPlan()
        self.log = Log()
        self.healthy = True
        self.in_sleep = False
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
            app(self), access_log=None, handler_cancellation=True, shutdown_timeout=_LEAVE_S, handle_signals=False
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
                await asyncio.sleep(_POLL_INTERVAL_S)

    def abort(self, request_ids: set[str]) -> int:
        """Ends requests by the ids that their clients chose; how many were found."""
        found = [answer for name, answer in self.answers.values() if name and name in request_ids]
        for answer in found:
            with contextlib.suppress(KeyError):
                answer.abort()
        return len(found)


class Running:
    """Servers in a thread of their own.

    Attributes:
        servers: They; read their logs freely, and change their faults.
    """

    def __init__(self, servers: tuple[EngineServer, ...], loop: asyncio.AbstractEventLoop) -> None:
        self.servers, self._loop = servers, loop

    def call(self, what: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine of a server returns (``die``, ``restart``, ``idle``), run where they live."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=60)


@contextmanager
def in_thread(*servers: EngineServer) -> Iterator[Running]:
    """The servers up, each at its ``url``, until the end of the block."""
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(servers, ready)), daemon=True)
    thread.start()
    loop, over = ready.result(timeout=60)
    try:
        yield Running(servers, loop)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(timeout=60)


async def _serve(
    servers: tuple[EngineServer, ...], ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
) -> None:
    over = asyncio.Event()
    try:
        async with AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server)
            ready.set_result((asyncio.get_running_loop(), over))
            await over.wait()
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        raise
