"""Outputs collected from a small server: all of them, once, through trouble, and on after a stop."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lengthwise.backend.collect import Endpoint, collect
from lengthwise.predict.sample_files import read
from lengthwise.schema.errors import InputError, OutputError


class Server(ThreadingHTTPServer):
    """Answers with as many words as the prompt has, fails as configured, counts the requests in flight."""

    daemon_threads = False  # closing waits for the answers, whose failures would else be printed during a later test

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.fails: dict[str, list[int]] = {}
        self.running, self.most, self.lock = 0, 0, threading.Lock()

    def handle_error(self, *_) -> None:
        """Silent: a client may leave before its answer."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, server = body["messages"][0]["content"], self.server
        with server.lock:
            server.requested[prompt] += 1
            server.bodies.append({**body, "auth": self.headers.get("Authorization"), "path": self.path})
            server.running += 1
            server.most = max(server.most, server.running)
            code = server.fails.get(prompt, []).pop(0) if server.fails.get(prompt) else 200
        n = len(prompt.split())
        answer = {
            "choices": [{"message": {"content": "word " * n}, "finish_reason": "length" if n > 3 else "stop"}],
            "usage": {"completion_tokens": n, "prompt_tokens": n},
        }
        data = json.dumps(answer if code == 200 else {"error": "no"}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        with server.lock:
            server.running -= 1

    def log_message(self, *_) -> None:
        """Silent."""


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def endpoint(server, **options) -> Endpoint:
    return Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "m", **options)


def test_every_prompt_is_sent_once_and_can_be_read_back(server, tmp_path) -> None:
    prompts = [" ".join(["w"] * n) + f" {i}" for i, n in enumerate([1, 2, 3, 4] * 5)]
    ticks: list[int] = []
    found = collect(prompts * 2, tmp_path / "o.jsonl", endpoint(server), concurrency=3, report=ticks.append)
    assert (found.done, found.skipped, found.failed) == (20, 0, 0)
    assert ticks == list(range(1, 21))
    assert set(server.requested.values()) == {1}
    assert server.most <= 3
    samples = read(tmp_path / "o.jsonl")
    counted = dict(zip(samples.prompts.text, samples.output_tokens, strict=True))
    assert all(counted[p] == len(p.split()) for p in prompts)
    assert samples.censored.sum() == 10


def test_it_goes_on_where_it_stopped_and_drops_a_cut_line(server, tmp_path) -> None:
    out = tmp_path / "o.jsonl"
    collect(["a", "b"], out, endpoint(server))
    out.write_text(out.read_text() + '{"model": "m", "prompt": "c", "outp')
    found = collect(["a", "b", "c"], out, endpoint(server))
    assert (found.done, found.skipped) == (1, 2)
    assert sorted(read(out).prompts.text) == ["a", "b", "c"]
    assert server.requested["a"] == 1


def test_a_busy_server_is_retried_and_a_refusal_is_reported(server, tmp_path) -> None:
    server.fails = {"busy": [503, 429], "wrong": [400], "stopped": [500] * 9}
    pauses: list[float] = []
    found = collect(["busy", "wrong", "stopped"], tmp_path / "o", endpoint(server, retries=2), pause=pauses.append)
    assert (found.done, found.failed) == (1, 2)
    assert "HTTP" in found.reason
    assert dict(server.requested) == {"busy": 3, "wrong": 1, "stopped": 3}
    assert sorted(pauses) == [1, 1, 2, 2]


def test_settings_and_key_are_sent(server, tmp_path) -> None:
    collect(["a"], tmp_path / "o", endpoint(server, max_tokens=9, temperature=0.5, api_key="k"))
    body = server.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["auth"]) == (9, 0.5, "Bearer k")
    assert body["path"] == "/v1/chat/completions"
    assert "secret" not in repr(endpoint(server, api_key="secret"))


def test_an_unreachable_server_is_a_failure_with_its_reason(tmp_path) -> None:
    found = collect(["a"], tmp_path / "o", Endpoint("http://127.0.0.1:9/v1", "m", retries=0))
    assert (found.done, found.failed) == (0, 1)
    assert "URLError" in found.reason


def test_what_cannot_be_used_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="http"):
        Endpoint("localhost:8000", "m")
    with pytest.raises(InputError, match="at least 1"):
        collect(["a"], tmp_path / "o", Endpoint("http://x", "m"), concurrency=0)
    (tmp_path / "notes").write_text("my notes\n")
    with pytest.raises(OutputError, match="must be new"):
        collect(["a"], tmp_path / "notes", Endpoint("http://x", "m"))
    with pytest.raises(OutputError, match="cannot write"):
        collect(["a"], tmp_path / "no" / "o", Endpoint("http://x", "m"))
