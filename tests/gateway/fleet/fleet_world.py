"""A fleet on emulated engines, with what it reported, on a loop that must have nothing left at its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lengthwise.gateway.config import Discovery, Dispatch, Engine, GatewayConfig, Order, ResilienceConfig
from lengthwise.gateway.fleet import Fleet
from lengthwise.gateway.scheduling import WorkerState
from lengthwise.testing.engine_server import EngineServer, EngineSpec

CARE = ResilienceConfig(health_every_s=0.15, connect_s=1.0, failures=3, open_s=0.2, drain_s=0.3)
DISPATCH = Dispatch(adapt_every_s=0.1)


def config_of(
    *engines: Engine,
    resilience: ResilienceConfig = CARE,
    discovery: Discovery | None = None,
    order: Order | None = None,
    dispatch: Dispatch = DISPATCH,
) -> GatewayConfig:
    return GatewayConfig(
        engines=engines,
        resilience=resilience,
        discovery=discovery or Discovery(),
        dispatch=dispatch,
        order=order or Order(),
    )


class Received:
    """The states that ``on_change`` received."""

    def __init__(self) -> None:
        self.all: list[tuple[WorkerState, ...]] = []

    def __call__(self, states: Sequence[WorkerState]) -> None:
        self.all.append(tuple(states))

    @property
    def last(self) -> dict[str, WorkerState]:
        return {state.name: state for state in self.all[-1]} if self.all else {}

    def ups(self) -> int:
        return sum(state.up for state in self.last.values())


@asynccontextmanager
async def fleet_of(config: GatewayConfig, **extra: Any) -> AsyncIterator[tuple[Fleet, Received]]:
    received = Received()
    async with Fleet(config, on_change=received, **extra) as fleet:
        await fleet.wait_checked(10.0)
        yield fleet, received


@asynccontextmanager
async def engines(*specs: EngineSpec) -> AsyncIterator[list[EngineServer]]:
    servers = [EngineServer(spec) for spec in specs]
    try:
        for server in servers:
            await server.__aenter__()
        yield servers
    finally:
        for server in servers:
            await server.__aexit__()


async def until(true: Callable[[], bool], max_s: float = 60.0) -> None:
    async with asyncio.timeout(max_s):
        while not true():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.01)


def sockets() -> int:
    """Open sockets of this process."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(one.readlink()).startswith("socket:")
    return found


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs it; afterwards no task and no socket may be left."""
    gc.collect()
    gc.freeze()  # or each test would look through all that tests before it left behind, for a second
    before = sockets()

    async def watched() -> None:
        async with asyncio.timeout(60):
            await work()
        for _ in range(5):
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left

    asyncio.run(watched())
    assert sockets() <= before
