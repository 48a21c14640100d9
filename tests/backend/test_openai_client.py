"""The client against a real server on loopback: what it finds, what it times, how it fails."""

from __future__ import annotations

import asyncio
import builtins
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

from scripted_server import EVERYTHING, Script, ScriptedServer

from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import CHAT, Capabilities, RequestError, Server
from lengthwise.schema.errors import InputError, MissingExtraError


def probed(server, **options):
    async def run():
        async with Client(Server(server.url, **options)) as client:
            return await client.probe()

    return asyncio.run(run())


def answered(server, prompt="one two", max_tokens=6, capabilities=None, **options):
    """The pieces of one answer after a probe, or by the abilities given."""

    async def run():
        async with Client(Server(server.url, **options), capabilities) as client:
            if capabilities is None:
                await client.probe()
                server.discard()
            return [piece async for piece in client.stream(client.body(prompt, max_tokens))]

    return asyncio.run(run())


def test_a_request_without_a_limit_has_no_max_tokens():
    client = Client(Server("http://127.0.0.1:9"), Capabilities(model="toy"))
    assert json.loads(client.body("one", 6, exact=False))["max_tokens"] == 6
    assert "max_tokens" not in json.loads(client.body("one", None, exact=False))


def test_all_that_a_server_can_do_is_found():
    with ScriptedServer() as server:
        assert probed(server) == Capabilities(
            engine="vllm",
            version="1.2.3",
            models=("toy",),
            model="toy",
            max_model_len=4096,
            token_id_prompts=True,
            usage=True,
            usage_each=True,
            token_ids_each=True,
            ignore_eos=True,
            min_tokens=True,
            tokenizer="vllm",
            metrics=True,
        )


@pytest.mark.parametrize("missing", sorted(EVERYTHING - {"completions", "chat", "models", "version"}))
@pytest.mark.parametrize("strict", [False, True])
def test_what_a_server_cannot_do_is_not_assumed(missing, strict):
    with ScriptedServer(Script(can=EVERYTHING - {missing}, strict=strict)) as server:
        able = probed(server)
    name = "tokenizer" if missing == "tokenize" else missing
    unknown = None if missing in {"ignore_eos", "min_tokens"} and not strict else False
    assert (getattr(able, name) or unknown) == unknown
    others = EVERYTHING - {missing, "completions", "chat", "models", "version", "tokenize"}
    others -= {"usage_each"} if missing == "usage" else set()
    assert all(getattr(able, other) is True for other in others)


def test_a_chat_only_server_is_sent_chats():
    with ScriptedServer(Script(can=frozenset({"chat", "models", "usage"}), strict=True)) as server:
        able = probed(server)
        assert (able.api, able.usage, able.token_id_prompts, able.token_ids_each) == (CHAT, True, False, False)
        pieces = answered(server, capabilities=able, max_tokens=4)
    assert [p.is_output for p in pieces] == [False, True, True, True, True, False]
    assert "ignore_eos" not in server.log[-1].body


def test_chunks_contain_tokens_times_and_the_finish_reason(stalls):
    with ScriptedServer(Script(first_s=0.05, gap_s=0.02, together=2)) as server:
        pieces = answered(server, max_tokens=7)
        outputs = [p for p in pieces if p.is_output]
    assert [p.tokens for p in outputs] == [2, 2, 2, 1]
    assert "".join(p.text for p in outputs) == "é " * 7
    assert outputs[-1].finish_reason == "length"
    assert (pieces[-1].usage.prompt_tokens, pieces[-1].usage.output_tokens) == (2, 7)
    late = [p.at_s - at_s for p, at_s in zip(outputs, server.log[0].at_s, strict=True)]
    assert all(0 <= by_s < 0.05 + stalls.lost_s for by_s in late), late


def test_token_ids_give_token_counts_where_usage_does_not():
    with ScriptedServer(Script(together=3, can=EVERYTHING - {"usage_each"})) as server:
        pieces = answered(server, max_tokens=7)
    assert [p.tokens for p in pieces if p.is_output] == [3, 3, 1]


def test_without_reported_counts_tokens_are_not_counted_by_chunks():
    with ScriptedServer(Script(together=3, can=EVERYTHING - {"usage_each", "token_ids_each"})) as server:
        pieces = answered(server, max_tokens=7)
    assert [p.tokens for p in pieces if p.is_output] == [0, 0, 0]
    assert pieces[-1].usage.output_tokens == 7


def test_key_and_fields_of_ones_own_are_sent_and_the_key_is_not_shown():
    server_facts = Server("http://user:pw@host/v1", api_key="s3cret")
    assert "s3cret" not in repr(server_facts)
    assert (server_facts.shown, server_facts.root) == ("http://host/v1", "http://user:pw@host")
    with ScriptedServer() as server:
        answered(server, api_key="s3cret", body={"temperature": 0.5})
        assert server.log[0].headers["Authorization"] == "Bearer s3cret"
        assert server.log[0].body["temperature"] == 0.5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("http 429", "http 429"),
        ("http 500", "http 500"),
        ("malformed", "malformed"),
        ("no stream", "malformed"),
        ("server error", "server error"),
        ("stalls", "stalled"),
        ("reset", "reset"),
        ("closes", "closed early"),
        ("no done", "closed early"),
    ],
)
def test_each_failure_has_its_name(fault, reason):
    with ScriptedServer(Script(fault=fault)) as server:
        with pytest.raises(RequestError) as caught:
            answered(server, capabilities=Capabilities(model="toy"), stall_s=0.3)
        assert caught.value.reason == reason, caught.value


def test_an_unreachable_server_is_refused():
    with ScriptedServer() as server:
        pass
    with pytest.raises(RequestError) as caught:
        answered(server, capabilities=Capabilities(model="toy"))
    assert caught.value.reason == "refused"
    assert str(caught.value) == f"refused: no server listens at {server.url.removeprefix('http://')}"
    with pytest.raises(InputError, match=r"^no server listens at http://127\.0\.0\.1:\d+; is it up\?$"):
        probed(server)


def test_an_unknown_host_is_reported_without_the_wording_of_the_library():
    with pytest.raises(InputError, match=r"no server answers at http://no\.invalid:9") as caught:
        probed(SimpleNamespace(url="http://no.invalid:9"))
    assert "ssl" not in str(caught.value)
    assert "no.invalid:9: " in str(caught.value)


class _SiteServer(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for the answers, whose failures would else be printed during a later test

    def handle_error(self, *_):
        """Silent: a client may leave before the end of a page."""


class _Site(BaseHTTPRequestHandler):
    PAGE = b"<!DOCTYPE html>\n<html><head><title>Another server</title></head>" + b"<p>more</p>" * 500
    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.PAGE)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("model", [None, "toy"])
def test_of_a_server_of_pages_comes_one_short_line(monkeypatch, status, model):
    monkeypatch.setattr(_Site, "status", status)
    with _SiteServer(("127.0.0.1", 0), _Site) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        with pytest.raises(InputError) as caught:
            probed(SimpleNamespace(url=f"http://127.0.0.1:{site.server_port}"), model=model)
        site.shutdown()
    words = str(caught.value)
    assert "text/html '<!DOCTYPE html> <html><head><title>Another" in words
    assert "more</p><p>more</p><p>" not in words
    assert "\n" not in words
    assert (f"http {status}" if model is None or status == 404 else "must be a stream of events") in words
    assert len(words) < 400


def test_an_unknown_model_is_reported():
    with ScriptedServer() as server, pytest.raises(InputError, match="has no model 'other'; it lists toy"):
        probed(server, model="other")


def test_a_request_may_take_only_so_long():
    with ScriptedServer(Script(gap_s=0.05)) as server, pytest.raises(RequestError, match="timed out"):
        answered(server, capabilities=Capabilities(model="toy", ignore_eos=True), max_tokens=90, timeout_s=0.3)


def test_an_address_is_checked():
    with pytest.raises(InputError, match="must begin with http"):
        Server("localhost:8000")


def test_without_the_library_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def none(name, *rest, **more):
        if name == "aiohttp":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[bench\]"):
        Client(Server("http://localhost"))


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
def test_any_line_ends_are_read(end):
    with ScriptedServer(Script(line_end=end)) as server:
        assert len([p for p in answered(server) if p.is_output]) == 6
