"""A gateway in a process of its own that counts what it holds: python counting_gateway.py ENGINE_URL.

Says its port; then, for every line that it reads, what it holds now, as JSON; it ends with its standard input.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from pathlib import Path

from lengthwise.gateway.config import Engine, GatewayConfig, Listen, ResilienceConfig
from lengthwise.gateway.serve import Gateway

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def in_use(gateway: Gateway) -> dict[str, float]:
    """Numbers that are as before once no request is in the gateway."""
    gc.collect()
    now, driver, loop = gateway.driver.statistics(), gateway.driver, asyncio.get_running_loop()
    return {
        "turns": driver.num_requests,
        "traces": len(gateway.telemetry.timelines),
        "waiting": now.waiting,
        "waiting_bytes": now.waiting_bytes,
        "slots": now.running,
        "answers": gateway.app.in_flight,
        "lines": len(gateway.fleet.workers()[0].session.connector.pool.busy),
        "tasks": len(asyncio.all_tasks()),
        "timers": sum(not timer.cancelled() for timer in loop._scheduled),  # noqa: SLF001 - asyncio lists timers nowhere else
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "rss_mib": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB,
    }


async def main(url: str) -> None:
    config = GatewayConfig(
        engines=(Engine(url, concurrency=8),),
        listen=Listen(port=0, admin_port=0),
        resilience=ResilienceConfig(health_every_s=1.0),
    )
    loop = asyncio.get_running_loop()
    async with Gateway(config) as gateway:
        print(gateway.port, flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(in_use(gateway)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
