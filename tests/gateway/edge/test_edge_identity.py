"""Tokens of an issuer and an authorization service in front of a complete gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import aiohttp
import pytest
from aiohttp import web
from relay_world import run
from scripted_engine import Scripted
from test_serve import BODY, gateway

from lengthwise.gateway.config import Engine, ExternalAuth, GatewayConfig, Key, Listen, Oidc
from lengthwise.gateway.edge import identity
from lengthwise.gateway.edge.auth import MAX_FAILURES, MAX_IDENTIFIED, Keys
from lengthwise.schema.errors import InputError

jwt = pytest.importorskip("jwt")
ISSUER, AUDIENCE = "https://login.example", "llm"


class Issuer:
    """Signs tokens, and publishes its public keys."""

    def __init__(self) -> None:
        self.private, self.use = {}, "sig"

    def rotate(self, kid: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self.private = {kid: ec.generate_private_key(ec.SECP256R1())}

    def jwks(self) -> str:
        public = {kid: jwt.algorithms.ECAlgorithm.to_jwk(one.public_key()) for kid, one in self.private.items()}
        keys = [json.loads(one) | {"kid": kid, "alg": "ES256", "use": self.use} for kid, one in public.items()]
        return json.dumps({"keys": [*keys, {"kty": "oct", "kid": "shared", "k": "c2VjcmV0", "alg": "HS256"}]})

    def token(self, **claims) -> str:
        (kid, private), *_ = self.private.items()
        known = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300, "tenant": "search"}
        payload = {name: value for name, value in (known | claims).items() if value is not None}
        return jwt.encode(payload, private, algorithm="ES256", headers={"kid": kid})


async def ask(port: int, token: str | None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=BODY) as reported:
        body = await reported.text()
        return reported.status, body if reported.status == 200 else json.loads(body)["error"]["message"]


@contextlib.asynccontextmanager
async def service(answer):
    """The URL of an HTTP server."""
    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/"  # noqa: SLF001
    finally:
        await runner.cleanup()


def test_a_token_names_its_tenant_and_a_wrong_one_is_refused_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_MIN_FETCH_S", 0.0)
    issuer = Issuer()
    issuer.rotate("one")

    reads = 0

    async def keys(_):
        nonlocal reads
        reads += 1
        return web.Response(text=issuer.jwks())

    async def work() -> None:
        nonlocal reads
        async with Scripted() as engine, service(keys) as url:
            oidc = Oidc(url, ISSUER, AUDIENCE, priority_claim="class")
            config = GatewayConfig((Engine(engine.url),), listen=Listen(port=0, admin_port=None), oidc=oidc)
            async with gateway(config) as g:
                assert (await ask(g.port, issuer.token(**{"class": 2})))[0] == 200
                served = {tenant for _, _, tenant in g.telemetry.metrics.requests}
                assert served == {"search"}
                wrong = {
                    "expired": issuer.token(exp=time.time() - 60),
                    "Audience": issuer.token(aud="other"),
                    "issuer": issuer.token(iss="https://other.example"),
                    "must name a tenant": issuer.token(tenant=None),
                    "whole number": issuer.token(**{"class": "gold"}),
                    '"exp"': issuer.token(exp=None),
                    "no key with the kid 'shared'": jwt.encode(
                        {"tenant": "search"}, "secret" * 8, algorithm="HS256", headers={"kid": "shared"}
                    ),
                    "Incorrect API key": "a.b.c",
                    "did not provide": None,
                }
                for reason, token in wrong.items():
                    status, message = await ask(g.port, token)
                    assert status == 401
                    assert reason in message
                before = issuer.token()
                issuer.rotate("two")
                assert (await ask(g.port, issuer.token()))[0] == 200, "an unknown kid reads the keys"
                assert "kid 'one'" in (await ask(g.port, before))[1]
                reads, headers = 0, {b"authorization": f"Bearer {before}".encode()}
                await asyncio.gather(*(g.app.identity.key(headers, {}) for _ in range(9)), return_exceptions=True)
                assert reads <= 2, "requests that wait for a read make no other one"
                good = issuer.token()
                assert (await ask(g.port, good))[0] == 200
                issuer.use = "enc"
                other = issuer.token(jti="2")
                await g.app.identity.__aexit__()
                await g.app.identity.__aenter__()
                assert "no public keys" in (await ask(g.port, other))[1], "a key to encrypt verifies nothing"
                issuer.use = "sig"
                found = [(await ask(g.port, f"{other}x{n}"))[0] for n in range(MAX_FAILURES + 1)]
                assert found[0] == 401
                assert found[-1] == 429, "an address that guesses waits"
                assert [(await ask(g.port, one))[0] for one in (good, issuer.token(jti="3"))] == [200, 429]

    run(work)
    with pytest.raises(InputError, match="public keys of the issuer"):
        asyncio.run(
            identity.TokenVerifier(Oidc(str(tmp_path / "nowhere"), ISSUER, AUDIENCE), time.monotonic).__aenter__()
        )


def test_callers_of_many_tenants_take_a_bounded_memory():
    keys = Keys(GatewayConfig((Engine("http://e"),), oidc=Oidc("f", ISSUER, AUDIENCE)), time.monotonic)
    first = keys.identified(Key("first", "0" * 64))
    assert keys.identified(Key("first", "0" * 64)) is first
    for number in range(MAX_IDENTIFIED):
        keys.identified(Key(f"t{number}", "0" * 64))
    assert keys.identified(Key("first", "0" * 64)) is not first
    assert not keys.callers


def test_an_authorization_service_decides_and_its_silence_allows_nothing():
    async def decide(request):
        token = request.headers.get("Authorization", "")
        if token == "Bearer slow":
            await asyncio.sleep(1.5)
        if token == "Bearer good":
            assert request.headers["X-Original-URI"] == "/v1/completions"
            return web.Response(headers={"X-Lengthwise-Tenant": "search", "X-Lengthwise-Priority": "1"})
        return web.Response(status={"Bearer bare": 200, "Bearer broken": 500}.get(token, 403))

    async def work() -> None:
        async with Scripted() as engine, service(decide) as url:
            auth = ExternalAuth(url, timeout_s=0.5)
            config = GatewayConfig((Engine(engine.url),), listen=Listen(port=0, admin_port=None), external_auth=auth)
            async with gateway(config) as g:
                assert (await ask(g.port, "good"))[0] == 200
                assert {tenant for _, _, tenant in g.telemetry.metrics.requests} == {"search"}
                tokens = ("bad", None, "bare", "broken", "slow")
                assert [(await ask(g.port, one))[0] for one in tokens] == [401, 401, 503, 503, 503]

    run(work)
    with pytest.raises(InputError, match="leave out"):
        GatewayConfig((Engine("http://e"),), keys=(Key("t", "0" * 64),), external_auth=ExternalAuth("http://a"))
