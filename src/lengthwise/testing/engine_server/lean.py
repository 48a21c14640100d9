"""A backend that costs as little as possible, so that what is measured is what stands before it.

Fixed answers: a whole one, or a stream of ``max_tokens`` events, each written alone: back to back, or so many
milliseconds apart where ``<gap:5>`` stands in the prompt. Of a body it reads no more than that. Needs
httptools (extra ``gateway``).
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


def _complete(chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": _TEXT}} if chat else {"text": _TEXT}
    kind = "chat.completion" if chat else "text_completion"
    usage = {"prompt_tokens": 16, "completion_tokens": 64, "total_tokens": 80}
    return _json({"id": "c-1", "object": kind, "created": 1, "model": MODEL, "choices": [choice], "usage": usage})


def _json(body: Any) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(kind: tuple[bool, bool], end: str | None = None) -> bytes:
    """An event of (chat, with ids)."""
    chat, ids = kind
    choice: dict[str, Any] = {"index": 0, "finish_reason": end, "logprobs": None}
    choice |= {"delta": {"content": " word"}} if chat else {"text": " word"}
    choice |= {"token_ids": [1234]} if ids else {}
    return _sse(chat, {"choices": [choice]})


def _first(kind: tuple[bool, bool]) -> bytes:
    chat, ids = kind
    extra: dict[str, Any] = {"prompt_token_ids": [1] * 16} if ids and chat else {}
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
    choice |= {"delta": {"role": "assistant", "content": ""}} if chat else {"text": ""}
    choice |= {"token_ids": []} if ids else {}
    choice |= {"prompt_token_ids": [1] * 16} if ids and not chat else {}
    return _sse(chat, {"choices": [choice]} | extra)


def _usage(chat: bool, tokens: int) -> bytes:
    usage = {"prompt_tokens": 16, "completion_tokens": tokens, "total_tokens": 16 + tokens}
    return _sse(chat, {"choices": [], "usage": usage})


def _sse(chat: bool, body: dict[str, Any]) -> bytes:
    kind = "chat.completion.chunk" if chat else "text_completion"
    data = json.dumps({"id": "c-1", "object": kind, "created": 1, "model": MODEL} | body, separators=(",", ":"))
    return _chunked(b"data: " + data.encode() + b"\n\n")


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_OVER = _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_INTEGERS = {chat: _complete(chat) for chat in (False, True)}
_KINDS = [(chat, ids) for chat in (False, True) for ids in (False, True)]
_FIRST = {kind: _first(kind) for kind in _KINDS}
_EVENT = {kind: _event(kind) for kind in _KINDS}
_LAST = {kind: _event(kind, "length") for kind in _KINDS}
_METADATA = {
    b"/v1/models": _json(_MODELS),
    b"/version": _json({"version": "0.33.0+lean"}),
    b"/health": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}
_NONE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class Lean(asyncio.Protocol):
    """One connection; requests in it are answered one after another.

    Args:
        parser: ``httptools.HttpRequestParser``.
    """

    def __init__(self, parser: Any) -> None:
        self._parser_of = parser
        self._loop = asyncio.get_running_loop()
        self._requested: deque[tuple[bytes, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False

    def connection_made(self, transport: Any) -> None:
        """Begins."""
        self._transport = transport
        self._parser = self._parser_of(self)

    def connection_lost(self, _: Exception | None) -> None:
        """Whatever was under way is not any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._requested.clear()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Of the parser."""
        self._url, self._body, self._expects = b"", b"", False

    def on_url(self, url: bytes) -> None:
        """Of the parser."""
        self._url += url

    def on_header(self, name: bytes, _: bytes) -> None:
        """Of the parser."""
        if name.lower() == b"expect":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Of the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Of the parser: a whole request."""
        self._requested.append((self._url.partition(b"?")[0], self._body))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._requested and not self._busy:
            path, body = self._requested.popleft()
            if not path.endswith(b"/completions"):
                self._transport.write(_METADATA.get(path, _NONE))
            elif _STREAM.search(body):
                self._stream(body, path.endswith(b"chat/completions"))
            else:
                self._transport.write(_INTEGERS[path.endswith(b"chat/completions")])

    def _stream(self, body: bytes, chat: bool) -> None:
        tokens, gap = _TOKENS.search(body), _GAP.search(body)
        count = int(tokens[1]) if tokens else 16
        usage = _usage(chat, count) if b"include_usage" in body else b""
        kind = (chat, b"return_token_ids" in body)
        self._transport.write(_HEAD + _FIRST[kind])
        self._busy = True
        self._write(count, kind, usage, self._loop.time(), int(gap[1]) / 1000 if gap else 0.0)

    def _write(self, left: int, kind: tuple[bool, bool], usage: bytes, deadline_s: float, gap_s: float) -> None:
        if self._transport.is_closing():
            return
        if left == 1:
            self._transport.write(_LAST[kind] + usage + _OVER)
            self._next()
            return
        self._transport.write(_EVENT[kind])
        deadline_s += gap_s
        again = functools.partial(self._write, left - 1, kind, usage, deadline_s, gap_s)
        if gap_s > 0:
            self._timer = self._loop.call_at(deadline_s, again)
        else:
            self._loop.call_soon(again)


async def serve(port: int) -> None:
    """Listens on loopback until SIGTERM; prints its address as JSON when it does."""
    try:
        import httptools
    except ImportError as error:
        raise MissingExtraError("lengthwise.testing.engine_server.lean", "gateway") from error
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    server = await loop.create_server(lambda: Lean(httptools.HttpRequestParser), "127.0.0.1", port)
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(json.dumps({"url": f"http://127.0.0.1:{port}"}) + "\n")
    sys.stdout.flush()
    await over.wait()
    server.close()


def main() -> None:
    """``python -m lengthwise.testing.engine_server.lean --port 9000``."""
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
