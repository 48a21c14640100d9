"""The doors of an emulated engine."""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from lengthwise.testing.engine_server.answering import Answering
from lengthwise.testing.engine_server.asked import RefusedError, chat_ids, prompt_ids, read_body
from lengthwise.testing.engine_server.faults import read_plan
from lengthwise.testing.engine_server.kinds import ABORTS, FACTS, OWNERS, TOKENIZES, Facts, metrics
from lengthwise.testing.engine_server.rendering import error_body
from lengthwise.testing.engine_server.toy_model import decode, encode

if TYPE_CHECKING:
    from aiohttp import web

    from lengthwise.testing.engine_server.server import EngineServer

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MOST_BYTES = 64 << 20


def app(server: EngineServer) -> web.Application:
    """An application of aiohttp with the routes of the server's kind, and /emulator/* for tests."""
    from aiohttp import web

    doors = _Doors(server)

    @web.middleware
    async def keyed(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await doors.keyed(request, handler)

    made = web.Application(client_max_size=_MOST_BYTES, middlewares=[keyed])
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
    for path, facts in FACTS[kind].items():
        made.router.add_get(path, doors.fact(facts))
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
        return self._set_asleep(asleep=True)

    async def wake_up(self, _: web.Request) -> web.Response:
        return self._set_asleep(asleep=False)

    def _set_asleep(self, *, asleep: bool) -> web.Response:
        from aiohttp import web

        self._server.asleep = asleep
        return web.Response(status=200)

    def _require_awake(self) -> None:
        if self._server.asleep:
            raise RefusedError(503, "The engine sleeps.")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self._require_awake()
        return await Answering(self._server, request, chat=False).run()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self._require_awake()
        return await Answering(self._server, request, chat=True).run()

    async def models(self, _: web.Request) -> web.Response:
        spec = self._server.spec
        row: dict[str, Any] = {
            "id": spec.model,
            "object": "model",
            "created": 0,
            "owned_by": OWNERS[spec.kind],
        }
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

    def fact(self, facts: Facts) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A door that tells something."""

        async def told(_: web.Request) -> web.Response:
            return self._json(facts(self._server))

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
