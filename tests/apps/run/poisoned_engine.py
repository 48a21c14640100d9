"""An emulated engine whose process ends when it reads the word "poison", or at any prompt ("always")."""

from __future__ import annotations

import asyncio
import os
import sys

from lengthwise.testing.engine_server import EngineConfig, EngineServer, completions, request_handler


def deadly(raw, *rest, **more):
    if b"poison" in raw or sys.argv[4:] == ["always"]:
        os._exit(137)
    return completions.parse_request(raw, *rest, **more)


async def serve():
    request_handler.parse_request = deadly
    async with EngineServer(EngineConfig(model=sys.argv[3]), host=sys.argv[1], port=int(sys.argv[2])):
        await asyncio.Event().wait()


asyncio.run(serve())
