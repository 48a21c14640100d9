"""A router in front of two engines: prompts go to the one that prefills, then to the one that decodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from lengthwise.testing.engine_server.server import close_runner

_ONE_TOKEN = {"max_tokens": 1, "stream": False}
_NOT_OF_ONE = ("min_tokens", "stream_options")


def prefill_of(body: dict[str, object]) -> dict[str, object]:
    """The request that only has the prompt computed."""
    return {key: value for key, value in body.items() if key not in _NOT_OF_ONE} | _ONE_TOKEN


@contextmanager
def routed(prefill_url: str, decode_url: str) -> Iterator[str]:
    """The address of a router before both, up until the end of the block."""
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(prefill_url, decode_url, ready)), daemon=True)
    thread.start()
    loop, over, url = ready.result(timeout=60)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(timeout=60)


async def _serve(prefill_url: str, decode_url: str, ready: Future) -> None:
    over = asyncio.Event()
    connector, timeout = TCPConnector(limit=0), ClientTimeout(total=None)
    async with ClientSession(connector=connector, timeout=timeout) as session:

        async def completions(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            async with session.post(f"{prefill_url}/v1/completions", json=prefill_of(body)) as prefilled:
                if prefilled.status != 200:
                    return web.Response(status=prefilled.status, body=await prefilled.read())
                await prefilled.read()
            async with session.post(f"{decode_url}/v1/completions", json=body) as decoded:
                answer = web.StreamResponse(
                    status=decoded.status, headers={"Content-Type": decoded.headers["Content-Type"]}
                )
                await answer.prepare(request)
                async for piece in decoded.content.iter_any():
                    await answer.write(piece)
                return answer

        async def requested(request: web.Request) -> web.Response:
            async with session.get(decode_url + request.path_qs) as reported:
                return web.Response(
                    status=reported.status, body=await reported.read(), content_type=reported.content_type
                )

        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", completions)
        app.router.add_get("/{path:.*}", requested)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        ready.set_result((asyncio.get_running_loop(), over, f"http://127.0.0.1:{port}"))
        await over.wait()
        await close_runner(runner)


__all__ = ["prefill_of", "routed"]
