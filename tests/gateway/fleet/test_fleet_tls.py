from __future__ import annotations

import ssl

import pytest
import trustme
from aiohttp import web
from fleet_world import config_of, fleet_of, run

from lengthwise.gateway.config import Engine, Tls
from lengthwise.schema.errors import InputError
from lengthwise.testing.engine_server.server import close_runner


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """Paths: the trusted authority, our certificate, its key; and an authority that is not trusted."""
    folder = tmp_path_factory.mktemp("tls")
    own = authority.issue_cert("gateway.local")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    own.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    own.private_key_pem.write_to_path(str(folder / "key.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    return {name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key", "other")}


def served(authority, *, requests):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    if requests:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def health(_):
    return web.Response()


async def models(_):
    return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})


def requested(authority, tls, *, requests):
    """Whether an engine behind TLS is up, and why not."""
    seen = {}

    async def work():
        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=served(authority, requests=requests)).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with fleet_of(config_of(Engine(url, name="e", tls=tls, probe=False))) as (fleet, received):
                seen.update(up=received.last["e"].up, cause=fleet.worker("e").unavailable_reason(0.0))
        finally:
            await close_runner(runner)

    run(work)
    return seen["up"], seen["cause"]


def test_an_engine_with_a_trusted_authority_is_up(authority, files):
    assert requested(authority, Tls(ca=files["ca"]), requests=False) == (True, "")


def test_an_engine_with_an_untrusted_authority_is_down(authority, files):
    up, reason = requested(authority, Tls(ca=files["other"]), requests=False)
    assert not up
    assert "certificate" in reason.lower()


def test_an_engine_that_requests_a_certificate_is_sent_one(authority, files):
    tls = Tls(ca=files["ca"], cert=files["cert"], key=files["key"])
    assert requested(authority, tls, requests=True) == (True, "")
    up, _ = requested(authority, Tls(ca=files["ca"]), requests=True)
    assert not up


def test_a_missing_certificate_is_reported_at_the_start_and_leaves_nothing_open(files):
    async def work():
        bad = Engine("https://127.0.0.1:1", tls=Tls(ca=files["ca"], cert="/nowhere.pem", key=files["key"]))
        good = Engine("http://127.0.0.1:2", name="good")
        with pytest.raises(InputError, match="certificates"):
            async with fleet_of(config_of(good, bad)):
                pass
        async with fleet_of(config_of(good)) as (fleet, _):
            with pytest.raises(InputError, match="certificates"):
                await fleet.configure(config_of(bad))
            assert [worker.name for worker in fleet.workers()] == ["good"]

    run(work)
