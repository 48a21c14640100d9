"""A small engine on loopback that speaks as vLLM does, deterministic, with faults by plan."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from dataclasses import dataclass, field
from typing import Any, Self

from lengthwise.gateway.background import stop_accepting

CHARS = ["a", "b ", "the ", "é", "€", "𝄞", "\n", '"', "\\", "x,y ", "ü", "日", '"text":"x', "data: [DONE]", "z"]
NULLS = ("refusal", "annotations", "audio", "function_call", "reasoning")


def encode(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def decode(ids: list[int]) -> str:
    return bytes(one - 3 for one in ids if one >= 3).decode("utf-8", "replace")


def following(ids: list[int]) -> int:
    """The next token of the model: a byte of a character that all before it decides."""
    for back in range(13):
        head, started = ids[: len(ids) - back], bytes(one - 3 for one in ids[len(ids) - back :])
        for char in (CHARS[zlib.crc32(repr(head).encode()) % len(CHARS)].encode(),):
            if back and char.startswith(started) and len(char) > len(started):
                return char[len(started)] + 3
    return CHARS[zlib.crc32(repr(ids).encode()) % len(CHARS)].encode()[0] + 3


class Words:
    """As a ``DecodeStream``: half a character is held back, and a prompt that ends in one comes out whole."""

    def __init__(self, prompt: list[int]) -> None:
        self.ids = list(prompt)
        self.out = decode(prompt)
        if self.out.endswith("�"):
            self.out = ""

    def step(self, one: int) -> str:
        self.ids.append(one)
        text = decode(self.ids)
        if text.endswith("�"):
            return ""
        new, self.out = text[len(self.out) :], text
        return new


def answer(prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
    """The output of the model in one go."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(following(ids))
    words = Words(prompt)
    return ids[len(prompt) :], "".join(words.step(one) for one in ids[len(prompt) :])


@dataclass
class Seen:
    """A request as the engine saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes = b""
    sent: int = 0
    how: str = "running"


@dataclass
class Fault:
    """What goes wrong with a request, once."""

    kind: str
    after: int = 0


@dataclass
class Scripted:
    """The engine. ``plan`` holds a fault (or None) for each request as they come."""

    plan: list[Fault | None] = field(default_factory=list)
    step_s: float = 0.0
    per_chunk: int = 1
    sends_ids: bool = True
    reports_usage: bool = True
    refusal: str = "no"
    full_until: int = 0
    end: str = "\n\n"
    seen: list[Seen] = field(default_factory=list)
    port: int = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._client, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Behaves as a process that dies: it stops listening and resets all connections."""
        await stop_accepting(self._server.sockets)
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        return sum(one.how == "running" for one in self.seen)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                seen = Seen(lines[0].split()[1], headers, json.loads(raw or b"{}"), raw)
                if seen.path == "/detokenize":
                    self._complete(writer, 200, {"prompt": decode(seen.body["tokens"])})
                    continue
                self.seen.append(seen)
                await self._served(seen, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _served(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self.plan.pop(0) if self.plan else None
        kind = fault.kind if fault else ""
        if kind.isdigit():
            seen.how = kind
            self._complete(writer, int(kind), {"error": {"message": self.refusal}, "object": "error"})
            return
        if kind == "die" and fault and fault.after < 0:
            seen.how = kind
            raise ConnectionResetError
        if kind == "hang":
            with contextlib.suppress(Exception):
                await reader.read(1)
            seen.how = "aborted"
            raise ConnectionResetError
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await self._on_response(seen, fault, writer, gone)
        finally:
            if seen.how == "running":
                seen.how = "aborted"
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await gone

    async def _on_response(  # noqa: C901 - one story
        self, seen: Seen, fault: Fault | None, writer: asyncio.StreamWriter, stopped: asyncio.Future[bytes]
    ) -> None:
        body, chat = seen.body, "messages" in seen.body
        prompt = self.prompt_of(body)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        frame = {"id": f"cmpl-{self.port}-{len(self.seen)}", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            ids, text = answer(prompt, most)
            for _ in ids:
                await self._pause(stopped)
            self._complete(writer, 200, self._object(frame, chat, text, len(prompt), len(ids)))
            seen.how = "finished"
            return
        self._head(writer)
        reported = self.sends_ids and body.get("return_token_ids")
        if chat:
            first = {**frame, "choices": [_choice(chat, "", None, None, role=True)]}
            first["prompt_token_ids"] = prompt if reported else None
            self._event(writer, first)
        words, ids = Words(prompt), list(prompt)
        text, chunk = "", []
        for done in range(1, most + 1):
            if fault and fault.after == done - 1:
                await self._failed(seen, fault, writer, stopped)
            await self._pause(stopped)
            ids.append(following(ids))
            chunk.append(ids[-1])
            text += words.step(ids[-1])
            if done % self.per_chunk and done < most:
                continue
            finish = "length" if done == most else None
            choice = _choice(chat, text, finish, chunk if reported else None)
            if not chat:
                choice["prompt_token_ids"] = prompt if reported and done <= self.per_chunk else None
            each = self._reports(body, "continuous_usage_stats") and {"usage": _usage(len(prompt), done)}
            self._event(writer, {**frame, "choices": [choice], **(each or {})})
            seen.sent, text, chunk = done, "", []
            await writer.drain()
        if fault and fault.after >= most:
            await self._failed(seen, fault, writer, stopped)
        if self._reports(body, "include_usage"):
            self._event(writer, {**frame, "choices": [], "usage": _usage(len(prompt), most)})
        if not (fault and fault.kind == "no_done"):
            self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        seen.how = "finished"
        await writer.drain()

    async def _failed(
        self, seen: Seen, fault: Fault, writer: asyncio.StreamWriter, stopped: asyncio.Future[bytes]
    ) -> None:
        if fault.kind == "die":
            await writer.drain()
            await asyncio.sleep(0.02)
            seen.how = "died"
            raise ConnectionResetError
        if fault.kind == "stall":
            await stopped
            raise ConnectionResetError
        if fault.kind in ("error", "busy"):
            code = 503 if fault.kind == "busy" else 500
            self._event(writer, {"error": {"message": "engine dead", "code": code}})
            self._event(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            seen.how = "error"
            raise ConnectionResetError
        if fault.kind == "garbage":
            self._chunk(writer, b"data: {not json\xff\n\n\x00\x01:::\n\n")

    def _reports(self, body: dict[str, Any], option: str) -> bool:
        return self.reports_usage and bool((body.get("stream_options") or {}).get(option))

    async def _pause(self, stopped: asyncio.Future[bytes]) -> None:
        await asyncio.sleep(self.step_s)
        if stopped.done():
            raise ConnectionResetError

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return encode("".join(f"<{one['role']}>{one['content']}" for one in body["messages"]) + "<a>")
        prompt = body["prompt"]
        return encode(prompt) if isinstance(prompt, str) else prompt

    def _object(self, frame: dict[str, Any], chat: bool, text: str, prompt: int, out: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        message = {"role": "assistant", "content": text, **dict.fromkeys(NULLS)}  # as vLLM 0.32 writes it
        choice |= {"message": message} if chat else {"text": text}
        choice |= dict.fromkeys(("logprobs", "stop_reason", "token_ids"))
        return {**frame, "choices": [choice], "usage": _usage(prompt, out)}

    def _head(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def _event(self, writer: asyncio.StreamWriter, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), ensure_ascii=False)
        self._chunk(writer, f"data: {text}{self.end}".encode())

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _complete(self, writer: asyncio.StreamWriter, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (status, len(body), body)
        )


def _choice(chat: bool, text: str, finish: str | None, ids: list[int] | None, *, role: bool = False) -> dict[str, Any]:
    delta = {"role": "assistant", "content": text} if role else {"content": text}
    words: dict[str, Any] = {"delta": delta} if chat else {"text": text}
    return {"index": 0, **words, "logprobs": None, "finish_reason": finish, "token_ids": ids}


def _usage(prompt: int, out: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + out, "completion_tokens": out}
