"""A real uvicorn on loopback with the edge, a scripted exchange behind it, and raw sockets to it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field

from lengthwise.gateway import edge
from lengthwise.gateway.config import Engine, GatewayConfig, Key, Limits

SECRET = "sk-right-key"


def sha(secret):
    return hashlib.sha256(secret.encode()).hexdigest()


def config(*keys, **limits):
    return GatewayConfig(engines=(Engine("http://127.0.0.1:1"),), keys=keys, limits=Limits(**limits))


def a_key(**metadata):
    return Key(**{"tenant": "acme", "sha256": sha(SECRET), **metadata})


class Report:
    """An answer of given pieces."""

    def __init__(self, pieces, *, status=200, kind=b"application/json", pause_s=0.0, length=True):
        self.status, self.pieces, self.pause_s = status, pieces, pause_s
        self.headers = [(b"content-type", kind)]
        if length:
            self.headers.append((b"content-length", b"%d" % sum(map(len, pieces))))
        self.closed = self.sent = 0
        self.cancelled = False

    async def __aiter__(self):
        try:
            for piece in self.pieces:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                self.sent += 1
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def attach_writer(self, writer):
        self.writer = writer

    async def aclose(self):
        self.closed += 1


@dataclass
class Script:
    """An exchange that records its requests, and answers as an engine would, or as ``answers`` specifies."""

    client_request: list = field(default_factory=list)
    report: list = field(default_factory=list)
    answers: list = field(default_factory=list)
    waiting_cancelled: int = 0

    async def __call__(self, client_request):
        self.client_request.append(client_request)
        answer = self.answers.pop(0) if self.answers else plain(client_request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            try:
                await answer.wait()
            except asyncio.CancelledError:
                self.waiting_cancelled += 1
                raise
            answer = plain(client_request)
        self.report.append(answer)
        return answer


def plain(client_request):
    """The answer of an OpenAI server."""
    usage = {
        "prompt_tokens": client_request.prompt_tokens,
        "completion_tokens": 2,
        "total_tokens": client_request.prompt_tokens + 2,
    }
    chat = client_request.api == "chat"
    complete = {
        "id": "c-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": client_request.model,
    }
    if not client_request.stream:
        message = {"message": {"role": "assistant", "content": "Hi there"}} if chat else {"text": "Hi there"}
        choice = {"index": 0, "finish_reason": "stop", "logprobs": None, **message}
        return Report([json.dumps(complete | {"choices": [choice], "usage": usage}).encode()])
    pieces = []
    for word in ("Hi", " there"):
        part = {"delta": {"content": word}} if chat else {"text": word}
        event = complete | {
            "object": complete["object"].replace("completion", "completion.chunk") if chat else complete["object"]
        }
        choice = {"index": 0, "finish_reason": None, "logprobs": None, **part}
        pieces.append(b"data: " + json.dumps(event | {"choices": [choice]}).encode() + b"\n\n")
    return Report([*pieces, b"data: [DONE]\n\n"], kind=b"text/event-stream", length=False)


class Served:
    """The edge on a port, in a thread of its own."""

    def __init__(self, of, exchange=None, models=("tiny", "org/large"), tls=None, proxies=None, **more):
        self.script = exchange or Script()
        self.app = edge.App(of, self.script, models=lambda: models, **more)
        self.server = edge.server(self.app, of.limits, drain_s=1, tls=tls, proxies=proxies)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def _run(self):
        async def main():
            self.loop = asyncio.get_running_loop()
            task = asyncio.create_task(self.server.serve())
            while not self.server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.005)
            self.port = self.server.servers[0].sockets[0].getsockname()[1]
            self._ready.set()
            await task

        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def connections(self):
        return self.server.server_state.connections

    @property
    def keep_alive_s(self):
        return self.server.config.timeout_keep_alive

    @contextlib.contextmanager
    def socket(self, timeout_s=10):
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as line:
            yield line

    def raw(self, data, *, timeout_s=10):
        """All that comes back for some bytes, until the server closes, or has sent a whole answer and rests."""
        with self.socket(timeout_s) as line:
            with contextlib.suppress(OSError):
                line.sendall(data)
            return everything(line)

    def submit(self, body, *, path="/v1/chat/completions", secret=SECRET, method="POST", **headers):
        """Status, headers and body for one request."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {
            "host": "x",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        if secret:
            lines.setdefault("authorization", f"Bearer {secret}")
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in lines.items()) + "\r\n"
        return parsed(self.raw(head.encode("latin-1") + body))


def everything(line, rest_s=None):
    if rest_s is not None:
        line.settimeout(rest_s)
    got = b""
    with contextlib.suppress(OSError):
        while piece := line.recv(65536):
            got += piece
    return got


def parsed(raw):
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    if headers.get("content-type") == "application/json" and "transfer-encoding" not in headers and body:
        body = json.loads(body)
    return int(first.split()[1]), headers, body


def chat(**fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}], **fields}
