"""What the gateway fetches ends where it was asked for, and has an end."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from fleet_world import config_of, engines, fleet_of, run, until
from kube_api import KubeApi, endpoint, endpoint_slice

from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet import kubernetes_api
from lengthwise.gateway.fleet.discovery import EndpointSlices
from lengthwise.gateway.fleet.engine_probe import EngineMetadata, send_prompt
from lengthwise.gateway.fleet.kubernetes_api import KubernetesClient
from lengthwise.testing.engine_server import EngineSpec
from lengthwise.testing.engine_server.server import close_runner

PATH = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


@asynccontextmanager
async def answering(answer):
    """A server that answers every request so; its address, and what was asked."""
    requested = []

    async def noted(request):
        requested.append(f"{request.method} {request.path}")
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", noted)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", requested
    finally:
        await close_runner(runner)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/metrics", "/v1/completions"])
def test_no_engine_sends_the_gateway_elsewhere(path):
    """An engine of which one path redirects to another engine: the gateway does not follow."""

    async def work():
        async with engines(EngineSpec()) as (inner,), ClientSession() as client:

            async def mostly(request):
                if request.path == path:
                    raise web.HTTPTemporaryRedirect(f"{inner.url}{path}")
                async with client.request(
                    request.method, inner.url + request.path, data=await request.read()
                ) as reported:
                    return web.Response(
                        body=await reported.read(), status=reported.status, content_type=reported.content_type
                    )

            async with answering(mostly) as (url, requested):
                async with fleet_of(config_of(Engine(url))) as (fleet, _):
                    await until(lambda: f"GET {path}" in requested or f"POST {path}" in requested)
                    await asyncio.sleep(0.3)
                    assert fleet.workers()[0].name == url.removeprefix("http://")
                reached = [*inner.log.others, *(f"POST /v1/{entry.api}" for entry in inner.log.entries)]
                assert not [one for one in reached if one.endswith(path)]

    run(work)


def test_no_kubernetes_api_sends_the_gateway_elsewhere(tmp_path):
    async def work():
        async with KubeApi() as api:

            async def elsewhere(_):
                raise web.HTTPTemporaryRedirect(api.url + PATH)

            async with answering(elsewhere) as (url, requested), KubernetesClient(url, account=tmp_path) as client:
                with pytest.raises(kubernetes_api.KubernetesError, match="http 307"):
                    await client.list(PATH, "")
                with pytest.raises(kubernetes_api.KubernetesError, match="http 307"):
                    await anext(client.watch(PATH, "", "1", duration_s=5.0, timeout_s=5.0))
                assert len(requested) == 2
                assert not api.paths

    run(work)


def test_a_list_is_read_in_pages_and_all_of_them_have_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes_api, "MAX_LIST_BYTES", 200_000)
    row = json.dumps({"metadata": {"name": "x" * 1000}})

    async def endless(request):
        body = '{"metadata":{"continue":"more"},"items":[' + ",".join([row] * 20) + "]}"
        return web.Response(text=body)

    async def flood(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" " * 65_536)

    async def work():
        async with answering(endless) as (url, requested), KubernetesClient(url, account=tmp_path) as client:
            with pytest.raises(kubernetes_api.KubernetesError, match="a list of more than 200000 bytes"):
                await client.list(PATH, "")
            assert len(requested) == 10
        async with answering(flood) as (url, requested), KubernetesClient(url, account=tmp_path) as client:
            with pytest.raises(kubernetes_api.KubernetesError, match="a list of more than 200000 bytes"):
                await client.list(PATH, "")
            with pytest.raises(kubernetes_api.KubernetesError, match="an event without an end"):
                async for _ in client.watch(PATH, "", "1", duration_s=5.0, timeout_s=5.0):
                    pass
            assert len(requested) == 2

    run(work)


def test_while_the_list_is_too_long_the_engines_stay(tmp_path, monkeypatch):
    async def work():
        async with KubeApi() as api:
            api.faults.page = 1
            for name in ("a", "b", "c"):
                api.put(endpoint_slice(name, [endpoint(f"10.0.0.{ord(name)}", pod=name)]))
            reported = []
            source = EndpointSlices("default/engines:8000", Engine("http://any"), api_url=api.url, account=tmp_path)
            task = asyncio.create_task(source.run(lambda found: reported.append({one.name for one in found})))
            await until(lambda: reported == [{"a", "b", "c"}] and api.open == 1)
            monkeypatch.setattr(kubernetes_api, "MAX_LIST_BYTES", 700)
            lists = api.lists
            api.delete("a")
            await until(lambda: reported[-1] == {"b", "c"})
            api.clear()
            api.send_all(b'{"type":"ERROR","object":{"code":410}}\n')
            await until(lambda: api.lists > lists + 3)
            assert reported[-1] == {"b", "c"}
            monkeypatch.setattr(kubernetes_api, "MAX_LIST_BYTES", 70_000)
            await until(lambda: len(reported) == 3)
            assert reported[-1] == {"b", "c"}
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(work)


def test_an_engine_that_never_stops_telling_two_tokens_is_not_listened_to_for_long():
    reported = 0

    async def endless(request):
        nonlocal reported
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        while True:
            await answer.write(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n' * 100)
            reported += 100

    async def work():
        async with answering(endless) as (url, requested), ClientSession() as session:
            metadata = await send_prompt(Engine(url), session, EngineMetadata(), priority=False)
            assert not metadata.prompted
            assert not metadata.capabilities.token_ids_each
            assert requested == ["POST /v1/completions"]
            assert reported < 100_000

    run(work)
