"""Certificates: the server's, and the clients' where they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time

import aiohttp
import pytest
import trustme
from edge_serving import Report, Script, Served, chat, config, parsed

from lengthwise.gateway.certificates import RenewableContext
from lengthwise.gateway.config import Engine, ResilienceConfig, Tls
from lengthwise.gateway.edge.http_server import WriteTimeout
from lengthwise.gateway.relay import open_session
from lengthwise.gateway.relay.upstream import BrokenConnectionError

ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    ca, folder = trustme.CA(), tmp_path_factory.mktemp("tls")
    cert = ca.issue_cert("localhost")
    cert.private_key_pem.write_to_path(str(folder / "key.pem"))
    cert.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    return ca, folder


def server_tls(folder, *, ca=False):
    files = Tls(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem") if ca else None)
    return RenewableContext(files, is_server=True, purpose="tests")


def write(folder, ca, name="localhost", *, clients=None):
    """Write a certificate of an authority, and the authority of the other side."""
    cert = ca.issue_cert(name)
    cert.private_key_pem.write_to_path(str(folder / "key.pem"))
    cert.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    (clients or ca).cert_pem.write_to_path(str(folder / "ca.pem"))


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
    tls = server_tls(folder, ca=mutual)
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


def test_both_sides_rotate_certificates_and_authorities_without_a_restart(tmp_path):
    """The edge stands for an engine that requires certificates; the pools of the gateway are its clients."""
    engine_ca, gateway_ca = trustme.CA(), trustme.CA()
    (engine_files := tmp_path / "engine").mkdir()
    (gateway_files := tmp_path / "gateway").mkdir()
    write(engine_files, engine_ca, clients=gateway_ca)
    write(gateway_files, gateway_ca, "gateway", clients=engine_ca)
    files = [str(gateway_files / name) for name in ("cert.pem", "key.pem", "ca.pem")]
    served_tls = server_tls(engine_files, ca=True)

    async def work(port) -> None:
        url = f"https://127.0.0.1:{port}/health"
        session = open_session(Engine(url, tls=Tls(*files, server_name="localhost")), ResilienceConfig())
        pool, other = session.connector.pool, open_session(Engine(url, tls=Tls(*files)), ResilienceConfig())

        async def both() -> list[object]:
            """Status of a health check on a new connection, and whether the pool of clients' requests connects."""
            status = None
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url, headers={"Connection": "close"}) as response:
                    status = response.status
            try:
                connection = await pool.connect()
                connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"")
                await connection.wait_for_head()
                pool.release(connection)
            except (OSError, BrokenConnectionError):
                return [status, False]
            return [status, True]

        assert await both() == [200, True]
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await other.get(url)  # without the name, the address is not in the certificate
        old = await pool.connect()
        new_engine_ca, new_gateway_ca = trustme.CA(), trustme.CA()
        write(engine_files, new_engine_ca, clients=new_gateway_ca)
        write(gateway_files, new_gateway_ca, "gateway", clients=new_engine_ca)
        assert served_tls.renew()
        assert await both() == [None, False], "the gateway has not read them yet, and the old authority is gone"
        assert [pool.tls.renew(), pool.tls.renew()] == [True, None]
        assert await both() == [200, True]
        old.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"")
        await old.wait_for_head()
        assert old.status == 200, "an open connection stays"
        (gateway_files / "key.pem").write_text("half of a ke")
        (engine_files / "ca.pem").unlink()
        assert [pool.tls.renew(), pool.tls.renew(), served_tls.renew()] == [False, None, False]
        assert await both() == [200, True]
        await session.close()
        await other.close()

    with Served(config(), tls=served_tls) as served:
        asyncio.run(work(served.port))


def test_a_non_streamed_answer_that_no_client_reads_is_dropped(authority):
    ca, folder = authority
    context = ssl.create_default_context()
    ca.configure_trust(context)
    tls = server_tls(folder)
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
