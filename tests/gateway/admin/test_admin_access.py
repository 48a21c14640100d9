"""Users of the admin port: roles, sessions of browsers, and the log of their actions, before a complete gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import replace

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_world import run, until

from lengthwise.gateway.admin.access import SESSION_S, Access, is_foreign
from lengthwise.gateway.audit import Actor, AuditLog
from lengthwise.gateway.config import ROLES, AdminUser, Engine, GatewayConfig, Listen, TenantsConfig
from lengthwise.gateway.edge.auth import MAX_FAILURES
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.serve import Gateway
from lengthwise.schema.errors import InputError
from lengthwise.testing.engine_server import EngineServer

TOKENS = {role: f"token-of-{role}" for role in ROLES}
USERS = tuple(AdminUser(f"user-{role}", hashlib.sha256(TOKENS[role].encode()).hexdigest(), role) for role in ROLES)
CALLS = {
    ("GET", "/metrics"): "viewer", ("GET", "/state.json"): "viewer", ("GET", "/session"): "viewer",
    ("GET", "/admin/workers"): "viewer", ("GET", "/admin/keys"): "viewer", ("GET", "/admin/usage"): "viewer",
    ("POST", "/admin/workers/e/drain"): "operator", ("POST", "/admin/workers/e/resume"): "operator",
    ("POST", "/admin/drain"): "operator", ("POST", "/admin/resume"): "operator", ("POST", "/admin/reload"): "operator",
    ("PUT", "/admin/tenants/team"): "admin", ("POST", "/admin/keys"): "admin",
    ("POST", "/admin/keys/k_none/rotate"): "admin", ("DELETE", "/admin/keys/k_none"): "admin",
}  # fmt: skip
BODIES = {"/admin/keys": {"tenant": "team"}}


def config_of(engine, tmp_path, **listen) -> GatewayConfig:
    return GatewayConfig(
        (Engine(engine.url, name="e"),),
        listen=Listen(port=0, admin_port=0, admins=USERS, audit=str(tmp_path / "audit.jsonl"), **listen),
        tenants=TenantsConfig(store=str(tmp_path / "t.db"), admin_sha256="0" * 64),
    )


def rows(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_each_role_may_do_what_it_should_and_all_changes_are_in_the_log(tmp_path):  # noqa: PLR0915
    async def work() -> None:  # noqa: PLR0915
        async with EngineServer() as engine:
            config = config_of(engine, tmp_path)
            async with Gateway(config) as g, aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
                g.read_config = lambda: config

                async def call(method, path, **headers):
                    url = f"http://127.0.0.1:{g.admin_port}{path}"
                    body = json.dumps(BODIES.get(path, {})) if method != "GET" else None
                    async with session.request(
                        method, url, data=body, headers=headers, allow_redirects=False
                    ) as response:
                        return response.status, response.headers, await response.read()

                for (method, path), least in CALLS.items():
                    assert (await call(method, path))[0] == 401
                    for role, token in TOKENS.items():
                        status = (await call(method, path, Authorization=f"Bearer {token}"))[0]
                        allowed = ROLES.index(role) >= ROLES.index(least)
                        assert (status == 403) is not allowed, (method, path, role, status)
                        assert status in ((200, 201, 404) if allowed else (403,)), (method, path, role, status)
                assert (await call("GET", "/healthz"))[0] == 200
                assert (await call("GET", "/"))[:2][0] == 303
                page = (await call("GET", "/login"))[2]
                assert b'name="token"' in page
                login, form = f"http://127.0.0.1:{g.admin_port}/login", {"token": TOKENS["operator"]}
                async with session.post(login, data={"token": "<b>"}) as response:
                    assert (response.status, b"must be that of a user" in await response.read()) == (401, True)
                async with session.post(login, data=form, allow_redirects=False) as response:
                    cookie = {"Cookie": response.headers["Set-Cookie"].partition(";")[0]}
                    assert (response.status, response.headers["Location"]) == (303, "/")
                assert (await call("GET", "/", **cookie))[0] == 200
                csrf = {"X-CSRF-Token": json.loads((await call("GET", "/session", **cookie))[2])["csrf"]}
                drains = [(await call("POST", "/admin/drain", **one))[0] for one in (cookie, cookie | csrf)]
                assert (drains, g.app.draining) == ([403, 200], True)
                assert (await call("POST", "/admin/resume", **cookie, **csrf))[0] == 200
                for other in ("http://elsewhere", "http://["):
                    assert (await call("POST", "/logout", **cookie, Origin=other))[0] == 403
                assert (await call("POST", "/logout", **cookie))[0] == 303
                assert (await call("GET", "/session", **cookie))[0] == 401
                operator = {"Authorization": f"Bearer {TOKENS['operator']}"}
                for damaged in (b"{x", 30_000 * b"[", b'"\xff"'):  # no line of the log could contain them
                    drain = f"http://127.0.0.1:{g.admin_port}/admin/drain"
                    async with session.post(drain, data=damaged, headers=operator) as response:
                        assert (response.status, g.app.draining) == (400, False), damaged[:3]
                assert (await call("POST", "/admin/workers/e/drain", **operator))[0] == 200
                assert g.fleet.worker("e").unavailable_reason(0.0) != ""
                assert not g.fleet.ready()
                await g.configure(replace(config, engines=(Engine(engine.url, name="e", concurrency=3),)))
                assert not g.fleet.ready(), "a reload changes nothing about it"
                assert (await call("POST", "/admin/workers/e/resume", **operator))[0] == 200
                await until(g.fleet.ready)
                assert (await call("POST", "/admin/workers/none/drain", **operator))[0] == 404
                other = replace(config.engines[0], url="http://127.0.0.1:9", name="new")
                g.read_config = lambda: replace(config, engines=(*config.engines, other))
                assert (await call("POST", "/admin/reload", **operator))[0] == 200

                def broken():
                    raise InputError("order.mode: must be another one")

                g.read_config = broken
                status, _, body = await call("POST", "/admin/reload", **operator)
                assert (status, b"must be another one" in body) == (400, True)
                g.read_config = [].pop
                assert (await call("POST", "/admin/reload", **operator))[0] == 500
                events = f"http://127.0.0.1:{g.admin_port}/events"
                async with session.get(events, headers=operator) as stream:
                    assert (await stream.content.readline()).startswith(b"data: ")
                    async with asyncio.timeout(30):
                        await g.configure(replace(config, listen=replace(config.listen, admins=USERS[2:])))
                        await stream.read()  # ends, as its user is gone
                assert (await call("GET", "/state.json", **operator))[0] == 401
                secret = b"lw-"
                assert secret in (await call("POST", "/admin/keys", Authorization=f"Bearer {TOKENS['admin']}"))[2]
                admin = {"Authorization": f"Bearer {TOKENS['admin']}"}
                metrics = (await call("GET", "/metrics", **admin))[2].decode()
                assert f"lengthwise_audit_lines_total {float(len(rows(tmp_path)))}" in metrics

    run(work)
    found = rows(tmp_path)
    made = {(row["actor"], row["action"], row["target"], row["outcome"]) for row in found}
    for expected in [
        ("user-operator", "worker_drained", "e", "ok"), ("user-viewer", "worker_drained", "e", "denied"),
        ("user-operator", "worker_drained", "none", "failed"), ("user-operator", "reload", "", "ok"),
        ("user-operator", "reload", "", "failed"), ("user-operator", "worker_added", "http://127.0.0.1:9", "ok"),
        ("user-operator", "key_added", "", "denied"), ("user-admin", "tenant_changed", "team", "ok"),
        ("user-admin", "key_revoked", "k_none", "failed"), ("user-operator", "drain", "", "ok"),
    ]:  # fmt: skip
        assert expected in made, expected
    (added,) = {row["settings"]["tenant"] for row in found if (row["action"], row["outcome"]) == ("key_added", "ok")}
    assert added == "team"
    assert {row["address"] for row in found if row["actor"] != "signal"} == {"127.0.0.1"}
    text = (tmp_path / "audit.jsonl").read_text()
    assert not any(secret in text for secret in (*TOKENS.values(), "lw-", *(user.sha256 for user in USERS)))


class Clock:
    now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


def scope_of(method="GET", **headers) -> dict:
    named = {"host": "gateway:8001", **{name.replace("_", "-"): value for name, value in headers.items()}}
    pairs = [(name.encode(), value.encode()) for name, value in named.items()]
    return {"type": "http", "method": method, "headers": pairs, "client": ("10.0.0.1", 1), "scheme": "http"}


def outcome(access, scope) -> tuple[str, str] | int:
    try:
        actor, csrf = asyncio.run(access.user(scope))
    except Fault as fault:
        return fault.status
    return actor.name, csrf


def test_a_session_is_a_cookie_that_other_pages_cannot_use():
    clock = Clock()
    access = Access(USERS, False, clock, AuditLog(None, clock))
    name, value = access.log_in(scope_of("POST", origin="http://gateway:8001"), TOKENS["operator"])
    parts = value.decode().split("; ")
    assert (name, parts[1:]) == (b"set-cookie", ["Path=/", "Max-Age=28800", "HttpOnly", "SameSite=Strict"])
    secure = access.log_in(scope_of("POST") | {"scheme": "https"}, TOKENS["viewer"])[1].decode()
    assert secure.startswith("__Host-lengthwise_session=")
    assert secure.endswith("; Secure")
    cookie = parts[0]
    user, csrf = outcome(access, scope_of(cookie=cookie))
    assert user == "user-operator"
    right = {"cookie": f"a=b; {cookie}", "x_csrf_token": csrf}
    assert outcome(access, scope_of("POST", **right)) == (user, csrf)
    for wrong in (
        {"x_csrf_token": ""}, {"x_csrf_token": csrf + "x"}, {"origin": "http://evil.example"}, {"origin": "null"},
        {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"},
    ):  # fmt: skip
        assert outcome(access, scope_of("POST", **right | wrong)) == 403, wrong
    assert outcome(access, scope_of(cookie=f"{cookie}; {cookie}")) == 401, "a second cookie may be another page's"
    assert outcome(access, scope_of(cookie=cookie) | {"scheme": "https"}) == 401
    with pytest.raises(Fault, match="Only the page of this port"):
        access.log_in(scope_of("POST", origin="http://evil.example"), TOKENS["operator"])
    access.configure(USERS[:1], False)
    assert outcome(access, scope_of(cookie=cookie)) == 401, "the user is gone"
    access.configure(USERS, False)
    with pytest.raises(Fault):
        access.log_out(scope_of("POST", cookie=cookie, origin="http://evil.example"))
    assert outcome(access, scope_of(cookie=cookie)) == (user, csrf)
    access.log_out(scope_of("POST", cookie=cookie))
    assert outcome(access, scope_of(cookie=cookie)) == 401
    later = access.log_in(scope_of("POST"), TOKENS["admin"])[1].decode().partition(";")[0]
    clock.now_s += SESSION_S
    assert outcome(access, scope_of(cookie=later)) == 401


def test_an_address_that_guesses_tokens_waits_also_with_a_right_one():
    clock = Clock()
    access = Access(USERS, False, clock, AuditLog(None, clock))
    used = scope_of(authorization=f"Bearer {TOKENS['viewer']}")
    assert outcome(access, used)[0] == "user-viewer"
    for number in range(MAX_FAILURES):
        assert outcome(access, scope_of(authorization=f"Bearer {number}")) == 401
    right = scope_of(authorization=f"Bearer {TOKENS['admin']}")
    assert outcome(access, right) == 429, "no guess shows that it is right"
    with pytest.raises(Fault) as caught:
        access.log_in(scope_of("POST"), TOKENS["admin"])
    assert caught.value.status == 429
    assert outcome(access, used)[0] == "user-viewer"
    assert outcome(access, right | {"client": ("10.0.0.2", 1)})[0] == "user-admin"
    twice = [*right["headers"], (b"authorization", b"Bearer other")]
    assert outcome(access, right | {"headers": twice[::-1], "client": ("10.0.0.2", 1)}) == 400
    clock.now_s += 61
    assert outcome(access, right)[0] == "user-admin"


@given(st.sampled_from(["http://gateway:8001", "https://gateway:8001", "http://gateway", "null", "", "//gateway:8001"]))
def test_only_the_own_origin_is_not_foreign(origin):
    assert is_foreign({b"origin": origin.encode(), b"host": b"gateway:8001"}) is not origin.endswith("//gateway:8001")


def test_lines_survive_rotation_and_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), Clock())
    actor = Actor("alice", "admin", "10.0.0.1")
    audit.record(actor, "first", "a\nb" * 200)
    path.rename(tmp_path / "old")
    audit.record(actor, "second")
    assert json.loads((tmp_path / "old").read_text())["target"] == ("a\nb" * 200)[:200]
    real, left = os.write, 30

    def write(file, data):
        nonlocal left
        if left < len(data):
            data, left = data[:left], 0
            if not data:
                raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    for number in range(1200):
        audit.record(actor, f"full-{number}")
    assert (audit.failures, audit.lost) == (1200, 200)
    monkeypatch.setattr(os, "write", real)
    audit.record(actor, "last")
    lines = path.read_text().splitlines()
    complete = [json.loads(line)["action"] for line in lines if line.endswith("}")]
    assert complete == ["second", *(f"full-{number}" for number in range(201, 1200)), "last"]
    assert len(lines) == len(complete) + 1, "the line that was cut stands alone"
