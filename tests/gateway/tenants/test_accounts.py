"""Quotas hold under races, usage is exact, and keys reach all gateways of a store."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from postgres_world import Server, programs
from relay_world import until
from test_serve import BODY, Scripted, gateway

from lengthwise.gateway.config import Engine, GatewayConfig, Key, Listen, TenantsConfig
from lengthwise.gateway.edge.auth import Keys, Tenants
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.request import LengthPrediction, Request
from lengthwise.gateway.tenants.accounts import Accounts
from lengthwise.gateway.tenants.records import PERIODS, KeySettings, TenantSettings, window
from lengthwise.gateway.tenants.store import Store, StoreError
from lengthwise.schema.errors import InputError, UnknownNameError

ADMIN = "admin-key"
NOON_S = datetime(2026, 2, 28, 12, 0, 30, tzinfo=UTC).timestamp()
_IDS = itertools.count(1)


class Wall:
    def __init__(self, now_s: float = NOON_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def config_of(place, **named) -> TenantsConfig:
    return TenantsConfig(store=str(place), admin_sha256="0" * 64, **named)


def request_of(prompt: int = 10, predicted: float = 40.0, most: int = 100) -> Request:
    return Request(next(_IDS), 0.0, "m", prompt, most, length_prediction=LengthPrediction(predicted))


async def total(accounts: Accounts, subject: str) -> tuple[int, ...]:
    """(requests, prompt tokens, output tokens, reserved tokens) of the day."""
    rows = await accounts.usage("day", subject)
    names = ("requests", "prompt_tokens", "output_tokens", "reserved_tokens")
    return tuple(sum(row[name] for row in rows) for name in names)


@given(st.integers(0, 4 * 10**9), st.sampled_from(PERIODS))
def test_windows_are_those_of_utc(at_s, period):
    start_s, end_s = window(period, at_s)
    assert start_s <= at_s < end_s
    assert window(period, end_s)[0] == end_s, "the next one follows without a gap"
    start = datetime.fromtimestamp(start_s, UTC)
    units = {
        "minute": (start.second,),
        "hour": (start.minute,),
        "day": (start.hour,),
        "month": (start.day - 1, start.hour),
    }
    assert not any(units[period])
    if period == "month":
        assert (start.month % 12) + 1 == datetime.fromtimestamp(end_s, UTC).month


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_no_schedule_of_requests_exceeds_a_quota_by_more_than_the_error_of_its_reservations(tmp_path_factory, data):
    """Two gateways, two keys of one tenant, random lengths and orders of ends. With max_tokens reserved: not at all."""
    reserve = data.draw(st.sampled_from(("predicted", "max_tokens")))
    limits = {"tenant": data.draw(st.integers(50, 2000)), "key": data.draw(st.integers(50, 1500))}
    shapes = st.tuples(st.integers(1, 60), st.integers(0, 120), st.integers(1, 200))  # prompt, predicted, maximum
    shapes = data.draw(st.lists(shapes, min_size=1, max_size=30))
    seed = data.draw(st.integers(0, 2**32))
    place = tmp_path_factory.mktemp("store") / "tenants.db"

    async def work() -> None:
        draws, wall = random.Random(seed), Wall()
        async with AsyncExitStack() as stack:
            config = config_of(place, reserve=reserve)
            both = [await stack.enter_async_context(Accounts(config, wall=wall)) for _ in range(2)]
            await both[0].put_tenant("team", TenantSettings({"tokens_per_day": limits["tenant"]}))
            rights = KeySettings("team", quotas={"tokens_per_hour": limits["key"]})
            ids = [(await both[0].add_key(rights))[0].id for _ in range(2)]
            await both[1].reload()
            error, served = {"team": 0, **dict.fromkeys(ids, 0)}, dict.fromkeys(("team", *ids), 0)

            async def one(prompt: int, predicted: int, most: int) -> None:
                accounts, request = draws.choice(both), request_of(prompt, min(predicted, most), most)
                key = accounts.key(draws.choice(ids))
                try:
                    await accounts.reserve(key, request, request.length_prediction.total_tokens)
                except Fault as fault:
                    refused.append((fault.status, fault.code))
                    return
                for _ in range(draws.randrange(4)):
                    await asyncio.sleep(0)
                is_served, output = draws.random() < 0.9, draws.randrange(most + 1)
                accounts.settle(request, (prompt, output) if is_served else None)
                reserved = most if reserve == "max_tokens" else min(predicted, most)
                for name in ("team", key.id):
                    served[name] += (prompt + output) * is_served
                    error[name] += max(0, output - reserved) * is_served

            refused: list[tuple[int, str]] = []
            await asyncio.gather(*(one(*shape) for shape in shapes))
            assert set(refused) <= {(429, "quota_exceeded")}
            for accounts in both:
                await accounts.flush()
            for name, limit in (("team", limits["tenant"]), *((one, limits["key"]) for one in ids)):
                subject = f"tenant:{name}" if name == "team" else f"key:{name}"
                _, prompt, output, reserved = await total(both[0], subject)
                assert (prompt + output, reserved) == (served[name], 0), "every token, once"
                assert served[name] <= limit + error[name]
                assert reserve == "predicted" or served[name] <= limit

    asyncio.run(work())


def test_a_request_that_cannot_be_stored_fails_alone(tmp_path):
    """Requests share transactions, also with one whose cost does not fit in 64 bits."""

    async def work() -> None:
        async with Accounts(config_of(tmp_path / "[t].db")) as accounts:
            await accounts.put_tenant("wrong", TenantSettings(input_cost_per_token=100))
            await accounts.put_tenant("team", TenantSettings())
            keys = [(await accounts.add_key(KeySettings(name)))[0] for name in ("team", "wrong", *["team"] * 20)]
            requests = [request_of(10**9) for _ in keys]
            made = [accounts.reserve(key, one, 40) for key, one in zip(keys, requests, strict=True)]
            results = await asyncio.gather(*made, return_exceptions=True)
            assert [getattr(one, "status", 200) for one in results] == [200, 503, *[200] * 20]

    asyncio.run(work())


def test_a_reservation_whose_commit_had_no_answer_is_undone_once(tmp_path, monkeypatch):
    """The connection breaks after the commit; the request gets 503, and the store retains nothing of it."""
    real, broken = Store.transaction, 0

    def transaction(self, work):
        nonlocal broken
        result = real(self, work)
        if broken:
            broken -= 1
            raise StoreError("the connection broke")
        return result

    async def work() -> None:
        nonlocal broken
        async with Accounts(config_of(tmp_path / "t.db", refresh_s=0.02), wall=Wall()) as accounts:
            await accounts.put_tenant("team", TenantSettings())
            key, _ = await accounts.add_key(KeySettings("team"))
            await accounts.reserve(key, other := request_of(), 40)
            broken = 1
            with pytest.raises(Fault, match="cannot reach"):
                await accounts.reserve(key, request_of(), 40)
            assert await total(accounts, "tenant:team") == (2, 0, 0, 100), "it is committed"
            async with asyncio.timeout(60):
                while await total(accounts, "tenant:team") != (1, 0, 0, 50):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            broken = 1
            accounts.settle(other, (10, 7))  # committed without an answer, too
            for _ in range(3):
                await asyncio.sleep(0.05)
                await accounts.flush()
            assert await total(accounts, "tenant:team") == (1, 10, 7, 0)

    monkeypatch.setattr(Store, "transaction", transaction)
    asyncio.run(work())


def test_a_refusal_names_the_quota_and_waits_for_the_end_of_its_window(tmp_path):
    async def work() -> None:
        wall = Wall()
        async with Accounts(config_of(tmp_path / "t.db"), wall=wall) as accounts:
            prices = {"input_cost_per_token": 0.001, "output_cost_per_token": 0.01}
            await accounts.put_tenant(
                "team", TenantSettings({"cost_per_month": 0.85, "requests_per_minute": 2}, **prices)
            )
            key, _ = await accounts.add_key(KeySettings("team"))
            requests = [request_of() for _ in range(4)]  # 0.41 each
            for request in requests[:2]:
                await accounts.reserve(key, request, 40)
            with pytest.raises(
                Fault, match=r"cost_per_month of this tenant are 0.85; 0.82 are used .* 2026-03-01"
            ) as caught:
                await accounts.reserve(key, requests[2], 40)
            assert caught.value.retry_after_s == (11 * 3600 + 59 * 60 + 30), "the later end of two: that of February"
            accounts.settle(requests[0], (10, 1))  # 0.39 less
            with pytest.raises(Fault, match="requests_per_minute") as caught:
                await accounts.reserve(key, requests[2], 40)
            assert caught.value.retry_after_s == 30
            wall.now_s += 30
            await accounts.reserve(key, requests[2], 40)
            with pytest.raises(Fault, match="fits no window"):
                await accounts.reserve(key, requests[3], 400)
            (month,) = await accounts.usage("month", "tenant:team")
            assert (month["requests"], month["cost"], month["reserved_cost"]) == (3, 0.02, 0.82)

    asyncio.run(work())


@pytest.mark.slow
def test_gateways_of_one_postgres_share_keys_and_quotas(tmp_path):
    server = Server(programs(), tmp_path)
    place = server.place("any").partition("&schema")[0]

    async def work() -> None:
        async with AsyncExitStack() as stack:
            config = config_of(place, progress=str(tmp_path), refresh_s=0.05)
            both = [await stack.enter_async_context(Accounts(config)) for _ in range(2)]
            await both[0].put_tenant("team", TenantSettings({"tokens_per_month": 1000}))
            key, _ = await both[0].add_key(KeySettings("team"))
            await until(lambda: both[1].keys)
            requests = [request_of() for _ in range(60)]
            results = await asyncio.gather(
                *(both[at % 2].reserve(key, one, 40) for at, one in enumerate(requests)), return_exceptions=True
            )
            assert sum(result is None for result in results) == 20, "20 of 50 tokens each, at both together"
            for at, (one, result) in enumerate(zip(requests, results, strict=True)):
                if result is None:
                    both[at % 2].settle(one, (10, 7))
            for accounts in both:
                await accounts.flush()
            assert await total(both[1], "tenant:team") == (20, 200, 140, 0)
            await both[0].reserve(key, one := request_of(), 40)
            server.crash()
            with pytest.raises(Fault, match="cannot reach") as caught:
                await both[0].reserve(key, request_of(), 40)
            assert caught.value.status == 503
            both[0].settle(one, (10, 9))  # no store takes it now
            await asyncio.sleep(0.1)
            server.start()
            for _ in range(600):
                if not await both[0].flush():
                    break
                await asyncio.sleep(0.1)
            assert await total(both[1], "tenant:team") == (21, 210, 149, 0)

    try:
        asyncio.run(work())
    finally:
        server.stop()


def test_secrets_are_stored_nowhere_and_rotate_with_a_grace(tmp_path):
    async def work() -> None:
        wall = Wall()
        async with Accounts(config_of(tmp_path / "t.db"), wall=wall) as accounts:
            with pytest.raises(InputError, match="there must be the tenant team"):
                await accounts.add_key(KeySettings("team"))
            with pytest.raises(UnknownNameError, match="tokens_per_day"):
                await accounts.put_tenant("team", TenantSettings({"tokens_per_dya": 1}))
            with pytest.raises(InputError, match="cost_per_token above 0"):
                await accounts.put_tenant("team", TenantSettings({"cost_per_day": 1}))
            await accounts.put_tenant("team", TenantSettings())
            key, first = await accounts.add_key(KeySettings("team", models=("m",)))
            _, second = await accounts.rotate_key(key.id, 60)

            def status(secret: str) -> int:
                gateway = GatewayConfig((Engine("http://e"),), keys=(Key("file", "1" * 64),))
                keys = Keys(gateway, lambda: 0.0, tenants=Tenants(), accounts=accounts)
                try:
                    caller = keys.caller(b"Bearer " + secret.encode(), "")
                except Fault as fault:
                    return fault.status
                assert caller.models == {"m"}
                return 200

            assert [status(one) for one in (first, second, "lw-other")] == [200, 200, 401]
            wall.now_s += 60
            assert [status(one) for one in (first, second)] == [401, 200]
            stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
            assert key.id.encode() in stored
            assert not any(secret.encode() in stored for secret in (first, second))
            await accounts.revoke_key(key.id)
            assert status(second) == 401
            with pytest.raises(KeyError):
                await accounts.rotate_key(key.id, 0)

    asyncio.run(work())


def test_the_api_takes_the_admin_key_alone_and_its_keys_serve_at_once(tmp_path):
    import hashlib

    import aiohttp

    admin = hashlib.sha256(ADMIN.encode()).hexdigest()

    async def work() -> None:
        async with Scripted() as engine:
            tenants = TenantsConfig(store=str(tmp_path / "t.db"), admin_sha256=admin)
            config = GatewayConfig((Engine(engine.url),), listen=Listen(port=0, admin_port=0), tenants=tenants)
            async with gateway(config) as g, aiohttp.ClientSession() as session:

                async def call(method, path, body=None, key=ADMIN):
                    url = f"http://127.0.0.1:{g.admin_port}/admin/{path}"
                    headers = {"Authorization": f"Bearer {key}"}
                    async with session.request(method, url, json=body, headers=headers) as reported:
                        text = await reported.text()
                        return reported.status, json.loads(text) if text else None

                async def ask(secret):
                    url, headers = f"http://127.0.0.1:{g.port}/v1/completions", {"Authorization": f"Bearer {secret}"}
                    async with session.post(url, json=BODY, headers=headers) as reported:
                        return reported.status, await reported.read()

                for method, path in (("GET", "keys"), ("POST", "keys"), ("PUT", "tenants/a"), ("GET", "nothing")):
                    assert (await call(method, path, key="wrong"))[0] == 401
                assert (await call("PUT", "tenants/team", {"quotas": {"tokens_per_day": 130}, "weight": 2}))[0] == 200
                status, key = await call("POST", "keys", {"tenant": "team", "name": "ci"})
                assert status == 201
                assert (await call("POST", "keys", {"tenant": "team", "burts": 3}))[1]["error"]["message"].count(
                    "burts"
                )
                assert (await call("PUT", "keys"))[0] == 405
                assert (await ask("nonsense"))[0] == 401
                secret = key.pop("secret")
                assert (await call("GET", "keys"))[1]["keys"] == [key]
                status, body = await ask(secret)
                assert (status, body.count(b'"text":')) == (200, 50)
                number = g.scheduler.service.weights
                assert list(number.values()) == [2.0]
                await asyncio.sleep(0)
                _, usage = await call("GET", "usage?tenant=team&period=month")
                (row,) = usage["usage"]
                assert (row["requests"], row["output_tokens"], row["reserved_tokens"]) == (1, 50, 0)
                assert row["prompt_tokens"] > 0
                assert [(await ask(secret))[0] for _ in range(3)] == [200, 429, 429]
                status, rotated = await call("POST", f"keys/{key['id']}/rotate", {"grace_s": 0})
                assert (status, (await ask(secret))[0], (await ask(rotated["secret"]))[0]) == (200, 401, 429)
                assert (await call("DELETE", f"keys/{key['id']}"))[0] == 204
                assert (await call("DELETE", f"keys/{key['id']}"))[0] == 404
                assert (await ask(rotated["secret"]))[0] == 401

    asyncio.run(work())
