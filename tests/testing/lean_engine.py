"""Minimal backend for overhead measurements, fixed responses at the least cost: python lean_engine.py [PORT].

It sends a buffered response, or a stream of ``max_tokens`` events, each written alone: back to back, or with an
interval in milliseconds where ``<gap:5>`` is in the prompt. It reads nothing else of a body. Needs uvloop.
"""

import asyncio
import functools
import itertools
import json
import re
import signal
import sys
from collections import deque
from typing import Any

import uvloop

_LENGTH = re.compile(rb"(?i)\r\ncontent-length:\s*(\d+)\r\n")
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_GAP = re.compile(rb"<gap:(\d{1,6})>")
_MODELS = {"object": "list", "data": [{"id": "toy", "object": "model", "owned_by": "vllm", "max_model_len": 8192}]}
_TEXT = " and so on it goes with words that say nothing at all, one after another, until it is enough. " * 3
_KINDS = list(itertools.product((False, True), repeat=2))
"""Whether a request is a chat, and whether it wants the ids of tokens."""


def _response(body: Any) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(chat: bool, choices: list[dict[str, Any]], **more: Any) -> bytes:
    body = {"id": "c-1", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1, "model": "toy"}
    return _chunked(
        b"data: " + json.dumps(body | {"choices": choices} | more, separators=(",", ":")).encode() + b"\n\n"
    )


def _token(chat: bool, has_ids: bool, text: str = " word", end: str | None = None) -> bytes:
    """Return the event of a token; without text that of a stream's begin."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": end, "logprobs": None}
    choice |= {"delta": {"content": text} if text else {"role": "assistant", "content": ""}} if chat else {"text": text}
    choice |= {"token_ids": [1234] if text else []} if has_ids else {}
    ids: dict[str, Any] = {} if text or not has_ids else {"prompt_token_ids": [1] * 16}
    return _event(chat, [choice], **ids) if chat else _event(chat, [choice | ids])


def _buffered(chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": _TEXT}} if chat else {"text": _TEXT}
    usage = {"prompt_tokens": 16, "completion_tokens": 64, "total_tokens": 80}
    kind = "chat.completion" if chat else "text_completion"
    return _response({"id": "c-1", "object": kind, "created": 1, "model": "toy", "choices": [choice], "usage": usage})


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_BUFFERED = {chat: _buffered(chat) for chat in (False, True)}
_FIRST, _TOKEN = ({kind: _token(*kind, text) for kind in _KINDS} for text in ("", " word"))
_LAST = {kind: _token(*kind, end="length") for kind in _KINDS}
_METADATA = {
    b"/v1/models": _response(_MODELS),
    b"/version": _response({"version": "0.33.0+lean"}),
    b"/health": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class LeanProtocol(asyncio.Protocol):
    """One connection, whose requests (with a Content-Length) are answered in sequence."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._loop, self._data = transport, asyncio.get_running_loop(), b""
        self._requests: deque[tuple[bytes, bytes]] = deque()
        self._timer: asyncio.Handle | None = None
        self._busy = False

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._requests.clear()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (head := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data, 0, head + 2)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._data) < end:
                break
            path = self._data[:head].split(b" ", 2)[1].partition(b"?")[0]
            self._requests.append((path, self._data[head + 4 : end]))
            self._data = self._data[end:]
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
        tokens, gap, end = _TOKENS.search(body), _GAP.search(body), _END
        count, kind = int(tokens[1]) if tokens else 16, (chat, b"return_token_ids" in body)
        if b"include_usage" in body:
            usage = {"prompt_tokens": 16, "completion_tokens": count, "total_tokens": 16 + count}
            end = _event(chat, [], usage=usage) + _END
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
        write_next = functools.partial(self._write, left - 1, kind, end, due_s + gap_s, gap_s)
        self._timer = self._loop.call_at(due_s + gap_s, write_next) if gap_s > 0 else self._loop.call_soon(write_next)


async def serve(port: int) -> None:
    """Listen on loopback until SIGTERM; print the URL as JSON."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(LeanProtocol, "127.0.0.1", port)
    print(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
