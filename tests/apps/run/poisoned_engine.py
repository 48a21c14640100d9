"""An emulated engine whose process ends when it reads the word "poison", or at any prompt ("always")."""

from __future__ import annotations

import asyncio
import os
import sys

from lengthwise.testing.engine_server import EngineServer, EngineSpec, completions, routes


def deadly(body, *rest, **more):
    if "poison" in str(body) or sys.argv[4:] == ["always"]:
        os._exit(137)
    return completions.parse_request(body, *rest, **more)


async def serve():
    routes.parse_request = deadly
    async with EngineServer(EngineSpec(model=sys.argv[3]), host=sys.argv[1], port=int(sys.argv[2])):
        await asyncio.Event().wait()


asyncio.run(serve())
