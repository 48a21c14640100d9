"""A client of OpenAI-compatible servers that tells when each piece of an answer came.

For vLLM, SGLang, llama.cpp, TGI and ``transformers serve``. What a server can do is found by asking it
(``Client.probe``), never assumed. Numbers of tokens come from the server's usage or token ids, never from
the number of chunks: one chunk can carry many tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

from lengthwise.backend._openai_faults import library, named, retry_after_s
from lengthwise.backend._openai_pieces import PieceReader, told, usage_of
from lengthwise.backend._openai_probe import identify, probe
from lengthwise.backend._openai_server import (
    CHAT,
    COMPLETIONS,
    Abilities,
    Piece,
    RequestError,
    Server,
    Usage,
)
from lengthwise.backend._openai_tokens import tokenize
from lengthwise.backend.sse import SseReader

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "Abilities",
    "Client",
    "Piece",
    "Prompt",
    "RequestError",
    "Server",
    "Usage",
]

_DRAIN_S = 0.5
Prompt = str | Sequence[int]
IDLE_S = 2.0
"""Shorter than servers keep an idle connection (uvicorn: 5 s), so that none is lost while it is being reused."""


class Client:
    """Connections to a server, as many as requests are under way: none waits for another.

    Use as an async context manager. Needs aiohttp (extra ``bench``).

    Args:
        server: Whom to ask.
        abilities: What ``probe`` found, where it is known already.
    """

    def __init__(self, server: Server, abilities: Abilities | None = None) -> None:
        self.server = server
        self.abilities = abilities or Abilities(model=server.model or "")
        self._aiohttp = library()
        self._session: Any = None

    async def __aenter__(self) -> Self:
        """Opens the session."""
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.server.api_key:
            headers["Authorization"] = f"Bearer {self.server.api_key}"
        server, aiohttp = self.server, self._aiohttp
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(
                total=server.timeout_s, sock_connect=server.connect_s, sock_read=server.stall_s
            ),
            headers=headers,
            trace_configs=[_sending(aiohttp)],
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes all connections."""
        await self._session.close()

    async def probe(self) -> Abilities:
        """Asks what the server is and can do, keeps it for further requests, and returns it.

        Raises:
            InputError: Nobody answers there, the key is refused, or it completes no prompt.
        """
        self.abilities = await probe(self)
        return self.abilities

    async def identify(self) -> Abilities:
        """Who the server is, by what it tells of itself alone: nothing is generated for it.

        Raises:
            InputError: Nobody answers there, the key is refused, or it lists no models.
        """
        return await identify(self)

    def body(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        exact: bool = True,
        priority: int | None = None,
    ) -> bytes:
        """What is sent for a prompt: a stream with all that the server can tell of its tokens.

        Args:
            prompt: Text, or token ids where ``abilities.token_ids``.
            max_tokens: Longest output.
            exact: Ask for exactly so many tokens, by what the server has for it.
            priority: Sent where given; smaller goes first.
        """
        able = self.abilities
        fields: dict[str, Any] = {"model": able.model, "max_tokens": max_tokens, "stream": True}
        fields |= prompted(prompt, able.api)
        if able.usage:
            fields["stream_options"] = {"include_usage": True}
            if able.usage_each:
                fields["stream_options"]["continuous_usage_stats"] = True
        if able.ids_each and not able.usage_each:
            fields["return_token_ids"] = True
        if exact and able.ignore_eos is not False:
            fields["ignore_eos"] = True
        if exact and able.min_tokens is not False:
            fields["min_tokens"] = max_tokens
        if priority is not None:
            fields["priority"] = priority
        return json.dumps(fields | dict(self.server.body)).encode()

    async def stream(
        self,
        body: bytes | dict[str, Any],
        *,
        sent: Callable[[float], None] | None = None,
        usage_each: bool | None = None,
        api: str | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of an answer as they come; the last ones hold usage and finish reason.

        Args:
            body: Of ``body``, or fields of one's own.
            sent: Called with the time (``perf_counter``) at which the request's headers went out.
            usage_each: Whether every piece tells the numbers so far; None: as probed.
            api: "completions" or "chat"; None: as probed.

        Raises:
            RequestError: It failed; pieces before that have been handed out.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        events = SseReader()
        reader = PieceReader(usage_each=self.abilities.usage_each if usage_each is None else usage_each)
        with named():
            request = self._session.post(self._path(api), data=data, trace_request_ctx=sent)
            async with request as answer:
                await _require_stream(answer)
                while chunk := await answer.content.readany():
                    at_s = time.perf_counter()
                    for event in events.feed(chunk):
                        piece = reader.read(event, at_s)
                        if piece is not None:
                            yield piece
                    if reader.done:
                        await _drained(answer)
                        break
        if not reader.done:
            raise RequestError("closed early", "the stream ended without its [DONE]")

    async def ask(self, fields: dict[str, Any], api: str = COMPLETIONS) -> tuple[str, Usage | None]:
        """Text and usage of an answer that comes whole; raises RequestError."""
        status, kind, body = await self.answer("POST", f"{self.server.root}{_PATHS[api]}", fields)
        if status != 200:
            raise RequestError(f"http {status}", told(body, kind))
        try:
            choice = body["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"].get("content")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestError("malformed", f"{error!r} in {str(body)[:200]}") from None
        return str(text or ""), usage_of(body)

    async def fetch(self, method: str, url: str, fields: Any = None) -> tuple[int, Any]:
        """Status and body of a request: JSON where it is, else text; raises RequestError."""
        status, _, body = await self.answer(method, url, fields)
        return status, body

    async def answer(self, method: str, url: str, fields: Any = None) -> tuple[int, str, Any]:
        """Status, content type and body of a request, as ``fetch``; raises RequestError."""
        data = None if fields is None else json.dumps(fields).encode()
        with named():
            async with self._session.request(method, url, data=data) as answer:
                text = await answer.text(errors="replace")
        try:
            return answer.status, answer.content_type, json.loads(text)
        except ValueError:
            return answer.status, answer.content_type, text

    async def tokenize(self, text: str) -> list[int] | None:
        """The token ids of a text by the server's own tokenizer; None where it has no door to it."""
        return await tokenize(self, text)

    def _path(self, api: str | None) -> str:
        return f"{self.server.root}{_PATHS[api or self.abilities.api]}"


_PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}


def prompted(prompt: Prompt, api: str) -> dict[str, Any]:
    """The fields that hold a prompt."""
    if api == COMPLETIONS:
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    return {"messages": [{"role": "user", "content": prompt}]}


def _sending(aiohttp: Any) -> Any:
    """Hands the time at which a request's headers went out to whoever asked for it."""
    config = aiohttp.TraceConfig()

    async def on_sent(_session: Any, context: SimpleNamespace, _params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx(time.perf_counter())

    config.on_request_headers_sent.append(on_sent)
    return config


async def _drained(answer: Any) -> None:
    """Waits a little for the end of the body, without which the connection could not be used again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await answer.content.readany()


async def _require_stream(answer: Any) -> None:
    kind = answer.content_type
    if answer.status != 200:
        said = _error_text(await answer.content.read(2000), kind)
        raise RequestError(f"http {answer.status}", said, retry_after_s(answer.headers))
    if kind != "text/event-stream":
        came = _error_text(await answer.content.read(2000), kind)
        shown = came if came.startswith(kind) else kind
        raise RequestError("malformed", f"the answer must be a stream of events; it is {shown}")


def _error_text(data: bytes, kind: str) -> str:
    try:
        return told(json.loads(data), kind)
    except ValueError:
        return told(data.decode("utf-8", "replace"), kind)
