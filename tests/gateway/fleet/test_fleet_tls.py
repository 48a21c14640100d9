from __future__ import annotations

import ssl

import pytest
import trustme
from aiohttp import web
from fleet_world import config_of, fleet_of, run

from lengthwise.gateway.config import Engine, Tls
from lengthwise.schema.errors import InputError


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """Paths: who is believed, our certificate, its key; and an authority that nobody believes."""
    folder = tmp_path_factory.mktemp("tls")
    ours = authority.issue_cert("gateway.local")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    ours.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    ours.private_key_pem.write_to_path(str(folder / "key.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    return {name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key", "other")}


def served(authority, *, asks):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    if asks:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def health(_):
    return web.Response()


async def models(_):
    return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})


def asked(authority, tls, *, asks):
    """Whether an engine behind TLS is up, and why not."""
    seen = {}

    async def work():
        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=served(authority, asks=asks)).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with fleet_of(config_of(Engine(url, name="e", tls=tls, probe=False))) as (fleet, heard):
                seen.update(up=heard.last["e"].up, cause=fleet.worker("e").unavailable_reason(0.0))
        finally:
            await runner.cleanup()

    run(work)
    return seen["up"], seen["cause"]


def test_an_engine_whose_authority_is_believed_is_up(authority, files):
    assert asked(authority, Tls(ca=files["ca"]), asks=False) == (True, "")


def test_an_engine_whose_authority_is_not_believed_is_down(authority, files):
    up, why = asked(authority, Tls(ca=files["other"]), asks=False)
    assert not up
    assert "certificate" in why.lower()


def test_an_engine_that_asks_for_a_certificate_is_shown_ours(authority, files):
    tls = Tls(ca=files["ca"], cert=files["cert"], key=files["key"])
    assert asked(authority, tls, asks=True) == (True, "")
    up, _ = asked(authority, Tls(ca=files["ca"]), asks=True)
    assert not up


def test_a_certificate_that_is_not_there_is_said_at_the_start_and_leaves_nothing_open(files):
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
