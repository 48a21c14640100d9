"""Certificates: the server's, and the clients' where they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time

import pytest
import trustme
from edge_serving import Report, Script, Served, chat, config, parsed

from lengthwise.gateway.config import Tls
from lengthwise.gateway.edge.http_server import WriteTimeout

ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    ca, folder = trustme.CA(), tmp_path_factory.mktemp("tls")
    cert = ca.issue_cert("localhost")
    cert.private_key_pem.write_to_path(str(folder / "key.pem"))
    cert.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    return ca, folder


def health(port, context):
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as line,
        context.wrap_socket(line, server_hostname="localhost") as safe,
    ):
        safe.sendall(ASK)
        got = b""
        while piece := safe.recv(65_536):
            got += piece
        return parsed(got)[0] if got else None


@pytest.mark.parametrize("mutual", [False, True])
def test_certificates(authority, mutual):
    ca, folder = authority
    tls = Tls(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem") if mutual else None)
    context = ssl.create_default_context()
    ca.configure_trust(context)
    with Served(config(), tls=tls) as served:
        if mutual:
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                assert health(served.port, context) is None, "no certificate, no answer"
            ca.issue_cert("client@example.org").configure_cert(context)
        assert health(served.port, context) == 200
        with pytest.raises(ssl.SSLError):
            health(served.port, ssl.create_default_context())


def test_a_non_streamed_answer_that_no_client_reads_is_dropped(authority):
    ca, folder = authority
    context = ssl.create_default_context()
    ca.configure_trust(context)
    tls = Tls(str(folder / "cert.pem"), str(folder / "key.pem"), None)
    body = json.dumps(chat()).encode()
    script = Script(answers=[Report([b"x" * (16 << 20)])])
    with (
        Served(config(body_s=0.3, idle_s=0.2), script, tls=tls) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as line,
        context.wrap_socket(line, server_hostname="localhost") as safe,
    ):
        safe.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert safe.recv(1) == b"H"
        end = time.monotonic() + 8
        while served.server.server_state.connections:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert served.app.in_flight == 0


def test_a_connection_that_was_closed_twice_has_nothing_left_to_write(authority):
    """The second close of a TLS transport drops its protocol; a shutdown of the gateway must not fail on it."""
    ca, folder = authority
    server_side, client_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    server_side.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    ca.configure_trust(client_side)

    async def work() -> bool:
        accepted = asyncio.get_running_loop().create_future()
        listen = asyncio.start_server(lambda *pair: accepted.set_result(pair), "127.0.0.1", 0, ssl=server_side)
        async with await listen as server:
            port = server.sockets[0].getsockname()[1]
            _, client = await asyncio.open_connection("127.0.0.1", port, ssl=client_side, server_hostname="localhost")
            transport = (await accepted)[1].transport
            transport.close()
            transport.close()
            timeout = WriteTimeout(transport, 30.0)
            timeout.start()
            timeout.stop()
            client.close()
            return transport.is_closing()

    assert asyncio.run(work())
