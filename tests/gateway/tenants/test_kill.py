"""Usage after kills of the gateway's process: every token that it received counts, once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal

import aiohttp
import pytest
from fault_world import ask, body, engine, gateway_process
from relay_world import run, until

pytestmark = pytest.mark.slow
ADMIN = "admin"


def test_usage_is_exact_to_the_token_after_kills(tmp_path):
    tenants = {"store": str(tmp_path / "t.db"), "admin_sha256": hashlib.sha256(ADMIN.encode()).hexdigest()}

    async def api(session, gateway, method, path, content=None):
        url, headers = f"http://127.0.0.1:{gateway.admin_port}/admin/{path}", {"Authorization": f"Bearer {ADMIN}"}
        async with session.request(method, url, json=content, headers=headers) as reported:
            assert reported.status < 300, await reported.text()
            return await reported.json()

    async def stream(session, port, tokens, received):
        """Count the tokens of a stream as they come, until its end or that of the gateway."""
        at = len(received)
        received.append(0)
        try:
            async with session.post(
                f"http://127.0.0.1:{port}/v1/completions", json=body(tokens) | {"return_token_ids": True}
            ) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        received[at] += len(json.loads(line[6:])["choices"][0].get("token_ids") or ())
        except aiohttp.ClientError:
            pass

    async def work() -> None:
        lost, finished, prompts = [], [0], 0
        async with engine(seqs=8) as one, aiohttp.ClientSession() as admin:
            secret = ""
            for _ in range(2):
                async with gateway_process([one.url], tenants=tenants, concurrency=8) as gateway:
                    if not secret:
                        await api(admin, gateway, "PUT", "tenants/team", {"quotas": {"tokens_per_month": 1_000_000}})
                        secret = (await api(admin, gateway, "POST", "keys", {"tenant": "team"}))["secret"]
                    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as session:
                        for tokens in (7, 30):
                            assert (await ask(session, gateway.port, body(tokens))).complete
                            finished[0] += tokens
                            prompts += 1
                        received: list[int] = []
                        streams = [
                            asyncio.ensure_future(stream(session, gateway.port, 2000, received)) for _ in range(6)
                        ]
                        await until(lambda received=received: len(received) == 6 and min(received) > 20, 30)
                        gateway.signal(signal.SIGKILL)
                        await asyncio.gather(*streams)
                        lost += received
                        prompts += 6
                await one.idle()
            async with gateway_process([one.url], tenants=tenants) as gateway:
                (row,) = (await api(admin, gateway, "GET", "usage?tenant=team&period=month"))["usage"]
        assert (row["requests"], row["reserved_tokens"]) == (prompts, 0)
        sent = sum(tokens for entry in one.log.entries for _, tokens in entry.sent)
        assert finished[0] + sum(lost) <= row["output_tokens"] <= sent
        assert row["output_tokens"] - finished[0] - sum(lost) <= 2 * len(lost), "at most what was on its way"

    run(work)
