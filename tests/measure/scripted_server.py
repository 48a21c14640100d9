"""A real server on loopback that speaks like an OpenAI-compatible one, with scripted timing and faults.

It logs when it sent what, on the clock that its clients read (``time.perf_counter``), so that a test compares
what a client saw with what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from lengthwise.testing.engine_server.server import close_runner

BLOCK = 8  # tokens of the prefix cache
EVERYTHING = frozenset(
    {"usage", "usage_each", "token_ids_each", "ignore_eos", "min_tokens", "token_id_prompts", "tokenize", "metrics"}
    | {"completions", "chat", "models", "version"}
)


@dataclass
class Script:
    """How the server behaves.

    Attributes:
        first_s: Until the first token.
        gap_s: Between pieces.
        together: Tokens in a piece.
        can: What it supports; the rest is ignored, or refused where ``strict``.
        stops_at: Tokens after which it stops by itself, where that is not ignored.
        faults: By the number of the stream, from 0: a name of ``_Answer``'s faults.
        fault: The same for every stream.
        caches: Whether it keeps prompts, and looks for the beginnings of others among them.
        pauses: Spans on its clock from the first stream in which nothing is sent.
        gathers: Streams that must have come before the first token of any is sent.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    together: int = 1
    can: frozenset[str] = EVERYTHING
    strict: bool = False
    stops_at: int = 5
    faults: dict[int, str] = field(default_factory=dict)
    fault: str = ""
    caches: bool = False
    pauses: tuple[tuple[float, float], ...] = ()
    gathers: int = 0
    line_end: str = "\n"


@dataclass
class Sent:
    """One stream as the server saw it."""

    body: dict[str, Any]
    came_s: float
    prompt_tokens: int
    at_s: list[float] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


class ScriptedServer:
    """Runs in a thread; a context manager."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.log: list[Sent] = []
        self.max_at_once = self.at_once = 0
        self.words: dict[str, int] = {}
        self.looked_up = self.found = 0
        self._retained: set[tuple[int, ...]] = set()
        self.states: Callable[[int], str] = lambda _: "as scripted"
        self.url = ""

    def discard(self) -> None:
        """Starts a new log, as after a probe."""
        self.log, self.max_at_once = [], 0

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # it may have died by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def die(self) -> None:
        """Closes everything at once, from within a request."""
        self._stop.set()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop, self._gathered = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self._stop.wait()
        await close_runner(runner)

    async def _models(self, _: web.Request) -> web.Response:
        rows = [{"id": "toy", "owned_by": "vllm", "max_model_len": 4096}]
        return web.json_response({"data": rows if "models" in self.script.can else []})

    async def _version(self, _: web.Request) -> web.Response:
        _require("version" in self.script.can)
        return web.json_response({"version": "1.2.3"})

    async def _metrics(self, _: web.Request) -> web.Response:
        _require("metrics" in self.script.can)
        return web.Response(
            text="# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{model="toy",engine="0"}} {self.at_once}.0\n'
            "# TYPE vllm:iteration_tokens_total histogram\n"
            'vllm:iteration_tokens_total_bucket{le="1.0"} 3.0\n'
            "vllm:iteration_tokens_total_sum 12.0\nvllm:iteration_tokens_total_count 4.0\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.looked_up}.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.found}.0\n'
            "process_cpu_seconds_total 1.5\n"
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        _require("tokenize" in self.script.can)
        body = await request.json()
        ids = self._ids(body["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids)})

    def _ids(self, text: str) -> list[int]:
        return [self.words.setdefault(word, 400 + len(self.words)) for word in text.split()]

    def _look_up(self, ids: list[int]) -> None:
        """Counts what of a prompt was kept of earlier ones, in whole blocks from its beginning, and keeps it."""
        begins = [tuple(ids[:end]) for end in range(BLOCK, len(ids), BLOCK)]  # the last token is computed again
        self.looked_up += len(ids)
        self.found += BLOCK * sum(begin in self._retained for begin in begins)
        self._retained.update(begins)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        _require(("chat" if chat else "completions") in self.script.can)
        body = await request.json()
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        _check(body, prompt, self.script)
        ids = prompt if isinstance(prompt, list) else self._ids(prompt)
        if self.script.caches:
            self._look_up(ids)
        tokens = len(ids) + 3 * chat
        sent = Sent(body, time.perf_counter(), tokens, headers=dict(request.headers))
        number = len(self.log)
        self.log.append(sent)
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        if self.at_once >= self.script.gathers:
            self._gathered.set()
        try:
            return await _Answer(self, request, sent, number, chat=chat).run()
        finally:
            self.at_once -= 1

    async def until_awake(self) -> None:
        """Waits until all have come, and for the end of a pause that is on now."""
        if self.script.gathers:
            await asyncio.wait_for(self._gathered.wait(), 60)
        started_at = self.log[0].came_s
        for start, length in self.script.pauses:
            now = time.perf_counter() - started_at
            if start <= now < start + length:
                await asyncio.sleep(start + length - now)


def _require(neighbor: bool) -> None:
    if not neighbor:
        raise web.HTTPNotFound


_FIELDS = {"ignore_eos": bool, "min_tokens": int, "return_token_ids": bool, "stream_options": dict}
_ABILITY = {"return_token_ids": "token_ids_each", "stream_options": "usage"}


def _check(body: dict[str, Any], prompt: Any, script: Script) -> None:
    for name, kind in _FIELDS.items():
        known = _ABILITY.get(name, name) in script.can
        if name in body and not known and script.strict:
            raise web.HTTPUnprocessableEntity(text=json.dumps({"error": {"message": f"unknown {name}"}}))
        if name in body and known and not isinstance(body[name], kind):
            raise web.HTTPBadRequest(text=json.dumps({"error": {"message": f"{name} is wrong"}}))
    if isinstance(prompt, list) and "token_id_prompts" not in script.can:
        raise web.HTTPBadRequest(text=json.dumps({"error": {"message": "a prompt is a text"}}))


class _Answer:
    """One answer, with its fault, if any."""

    def __init__(self, server: ScriptedServer, request: web.Request, sent: Sent, number: int, *, chat: bool):
        self.server, self.request, self.sent, self.chat = server, request, sent, chat
        script, self.number = server.script, number
        self.fault = script.faults.get(number, script.fault)
        body, can = sent.body, script.can
        wanted = int(body.get("max_tokens", 16))
        ignores = bool(body.get("ignore_eos")) and "ignore_eos" in can
        floor = int(body.get("min_tokens", 0)) if "min_tokens" in can else 0
        self.tokens = wanted if ignores else min(wanted, max(script.stops_at, floor))
        if self.fault == "ends early":
            self.tokens = max(1, self.tokens // 2)
        options = body.get("stream_options") or {}
        self.usage = "usage" in can and bool(options.get("include_usage"))
        self.each = "usage_each" in can and bool(options.get("continuous_usage_stats"))
        self.ids = "token_ids_each" in can and bool(body.get("return_token_ids"))

    async def run(self) -> web.StreamResponse:
        if self.fault.startswith("http "):
            error = {"error": {"message": self.server.states(self.number)}}
            return web.json_response(error, status=int(self.fault.removeprefix("http ")))
        if self.fault == "slow header":
            await asyncio.sleep(0.2)
        if self.fault == "reset":
            self.request.transport.abort()
        if not self.sent.body.get("stream"):
            return web.json_response({"choices": [{"text": "x "}], "usage": self._usage(1)})
        kind = "application/json" if self.fault == "no stream" else "text/event-stream"
        answer = web.StreamResponse(headers={"Content-Type": kind})
        await answer.prepare(self.request)
        await self._stream(answer)
        return answer

    async def _stream(self, answer: web.StreamResponse) -> None:
        script = self.server.script
        deadline_s = self.sent.came_s + script.first_s
        if self.chat:
            await self._send(answer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        done = 0
        while done < self.tokens:
            await asyncio.sleep(deadline_s - time.perf_counter())
            await self.server.until_awake()
            new = min(script.together, self.tokens - done)
            done += new
            if done > 2 and await self._broken(answer):
                return
            self.sent.at_s.append(time.perf_counter())
            await self._send(answer, self._chunk(done, new))
            deadline_s += script.gap_s
        if self.usage:
            await self._send(answer, {"choices": [], "usage": self._usage(done)})
        if self.fault != "no done":
            await self._write(answer, "data: [DONE]")

    async def _broken(self, answer: web.StreamResponse) -> bool:
        """Breaks an answer in its middle; True where nothing more is to be sent."""
        if self.fault == "malformed":
            await self._write(answer, "data: {not json")
        elif self.fault == "server error":
            await self._send(answer, {"error": {"message": "out of luck"}})
        elif self.fault == "stalls":
            await asyncio.sleep(3)
        elif self.fault == "closes":
            self.request.transport.close()
            await asyncio.sleep(0.05)
        elif self.fault == "dies":
            self.server.die()
            await asyncio.sleep(0.2)
        else:
            return False
        return True

    def _chunk(self, done: int, new: int) -> dict[str, Any]:
        if self.fault == "no choices":
            return {"choices": None}
        text = "é " * new
        end = {"finish_reason": ("length" if done == self.sent.body.get("max_tokens") else "stop")}
        choice: dict[str, Any] = {"index": 0, "finish_reason": None} | (end if done == self.tokens else {})
        choice |= {"delta": {"content": text}} if self.chat else {"text": text}
        choice |= {"token_ids": [7] * new} if self.ids else {}
        return {"choices": [choice]} | ({"usage": self._usage(done)} if self.each else {})

    def _usage(self, done: int) -> dict[str, int]:
        lie = 1000 if self.fault == "lies" else 0
        prompt = self.sent.prompt_tokens + (1 if self.fault == "lies of prompts" else 0)
        return {"prompt_tokens": prompt, "completion_tokens": done + lie}

    async def _send(self, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        await self._write(answer, f": c{self.server.script.line_end}data: {json.dumps(body, ensure_ascii=False)}")

    async def _write(self, answer: web.StreamResponse, text: str) -> None:
        end = self.server.script.line_end
        await answer.write(f"{text}{end}{end}".encode())
