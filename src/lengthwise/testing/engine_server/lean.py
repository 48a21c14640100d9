"""A minimal backend for overhead measurements: fixed responses at the least cost.

It sends a buffered response, or a stream of ``max_tokens`` events, each written alone: back to back, or with an
interval in milliseconds where ``<gap:5>`` is in the prompt. It reads nothing else of a body. Needs httptools (extra
``gateway``).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import signal
import sys
from collections import deque
from typing import Any

from lengthwise.schema.errors import MissingExtraError

MODEL = "toy"
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_GAP = re.compile(rb"<gap:(\d{1,6})>")
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 8192}]}
_TEXT = " and so on it goes with words that say nothing at all, one after another, until it is enough. " * 3


def _response(body: Any) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _buffered(chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": _TEXT}} if chat else {"text": _TEXT}
    kind = "chat.completion" if chat else "text_completion"
    usage = {"prompt_tokens": 16, "completion_tokens": 64, "total_tokens": 80}
    return _response({"id": "c-1", "object": kind, "created": 1, "model": MODEL, "choices": [choice], "usage": usage})


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(chat: bool, body: dict[str, Any]) -> bytes:
    kind = "chat.completion.chunk" if chat else "text_completion"
    data = json.dumps({"id": "c-1", "object": kind, "created": 1, "model": MODEL} | body, separators=(",", ":"))
    return _chunked(b"data: " + data.encode() + b"\n\n")


def _token(kind: tuple[bool, bool], finish_reason: str | None = None) -> bytes:
    chat, has_ids = kind
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
    choice |= {"delta": {"content": " word"}} if chat else {"text": " word"}
    choice |= {"token_ids": [1234]} if has_ids else {}
    return _event(chat, {"choices": [choice]})


def _first(kind: tuple[bool, bool]) -> bytes:
    chat, has_ids = kind
    prompt_ids: dict[str, Any] = {"prompt_token_ids": [1] * 16} if has_ids else {}
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
    choice |= {"delta": {"role": "assistant", "content": ""}} if chat else {"text": ""}
    choice |= {"token_ids": []} if has_ids else {}
    choice |= {} if chat else prompt_ids
    return _event(chat, {"choices": [choice]} | (prompt_ids if chat else {}))


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_BUFFERED = {chat: _buffered(chat) for chat in (False, True)}
_KINDS = [(chat, has_ids) for chat in (False, True) for has_ids in (False, True)]
_FIRST = {kind: _first(kind) for kind in _KINDS}
_TOKEN = {kind: _token(kind) for kind in _KINDS}
_LAST = {kind: _token(kind, "length") for kind in _KINDS}
_METADATA = {
    b"/v1/models": _response(_MODELS),
    b"/version": _response({"version": "0.33.0+lean"}),
    b"/health": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class LeanProtocol(asyncio.Protocol):
    """One connection, whose requests are answered one after another.

    Args:
        parser: ``httptools.HttpRequestParser``.
    """

    def __init__(self, parser: Any) -> None:
        self._parser_class = parser
        self._loop = asyncio.get_running_loop()
        self._requests: deque[tuple[bytes, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False

    def connection_made(self, transport: Any) -> None:  # noqa: D102
        self._transport = transport
        self._parser = self._parser_class(self)

    def connection_lost(self, _: Exception | None) -> None:  # noqa: D102
        if self._timer is not None:
            self._timer.cancel()
        self._requests.clear()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self._parser.feed_data(data)

    # Callbacks of the parser:

    def on_message_begin(self) -> None:  # noqa: D102
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:  # noqa: D102
        self._url += url

    def on_header(self, name: bytes, _: bytes) -> None:  # noqa: D102
        if name.lower() == b"expect":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:  # noqa: D102
        self._body += body

    def on_message_complete(self) -> None:  # noqa: D102
        self._requests.append((self._url.partition(b"?")[0], self._body))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._requests and not self._busy:
            path, body = self._requests.popleft()
            chat = path.endswith(b"chat/completions")
            if not path.endswith(b"/completions"):
                self._transport.write(_METADATA.get(path, _NOT_FOUND))
            elif _STREAM.search(body):
                self._stream(body, chat)
            else:
                self._transport.write(_BUFFERED[chat])

    def _stream(self, body: bytes, chat: bool) -> None:
        tokens, gap = _TOKENS.search(body), _GAP.search(body)
        count = int(tokens[1]) if tokens else 16
        end = _END
        if b"include_usage" in body:
            usage = {"prompt_tokens": 16, "completion_tokens": count, "total_tokens": 16 + count}
            end = _event(chat, {"choices": [], "usage": usage}) + _END
        kind = (chat, b"return_token_ids" in body)
        self._transport.write(_HEAD + _FIRST[kind])
        self._busy = True
        self._write(count, kind, end, self._loop.time(), int(gap[1]) / 1000 if gap else 0.0)

    def _write(self, left: int, kind: tuple[bool, bool], end: bytes, due_s: float, gap_s: float) -> None:
        if self._transport.is_closing():
            return
        if left == 1:
            self._transport.write(_LAST[kind] + end)
            self._next()
            return
        self._transport.write(_TOKEN[kind])
        due_s += gap_s
        write_next = functools.partial(self._write, left - 1, kind, end, due_s, gap_s)
        if gap_s > 0:
            self._timer = self._loop.call_at(due_s, write_next)
        else:
            self._loop.call_soon(write_next)


async def serve(port: int) -> None:
    """Listen on loopback until SIGTERM; print the URL as JSON."""
    try:
        import httptools
    except ImportError as error:
        raise MissingExtraError("lengthwise.testing.engine_server.lean", "gateway") from error
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: LeanProtocol(httptools.HttpRequestParser), "127.0.0.1", port)
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(json.dumps({"url": f"http://127.0.0.1:{port}"}) + "\n")
    sys.stdout.flush()
    await stop.wait()
    server.close()


def main() -> None:
    """Run ``python -m lengthwise.testing.engine_server.lean --port 9000``."""
    parser = argparse.ArgumentParser(prog="python -m lengthwise.testing.engine_server.lean", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(args.port))
    else:
        uvloop.run(serve(args.port))


if __name__ == "__main__":
    main()
