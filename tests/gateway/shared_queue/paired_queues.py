"""Runs one queue, and the same requests at R gateways that share a queue, at the same time; prints JSON.

Every gateway has the driver of ``lengthwise serve`` and its own connections to a PostgreSQL server, which this program
starts. An engine is a timer per request: SLOTS requests run at once, and service times are log-normal (sigma 1) and
known in advance. Both sides run in one process on one event loop, so that whatever delays the one delays the other.

    python paired_queues.py GATEWAYS SECONDS LOAD...
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import uvloop

sys.path.append(str(Path(__file__).parents[2] / "apps" / "ledger"))
from postgres_world import Server, programs

from lengthwise.gateway.config import Admission, Dispatch, Order, SharedQueueConfig
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.edge import Tenants
from lengthwise.gateway.request import LengthPrediction, Outcome, Request
from lengthwise.gateway.scheduler_driver import SchedulerDriver
from lengthwise.gateway.scheduling import WorkerState
from lengthwise.gateway.shared_queue import SharedQueue, SharedScheduler

SLOTS, MEAN_S, SIGMA, TOKEN_S = 64, 4.0, 1.0, 0.04
SETTINGS = Order(mode="srtf"), Admission(), Dispatch()
WORKERS = [WorkerState("engine", ("m",), concurrency=SLOTS)]


def cpu_of_store_s(url: str) -> float:
    """CPU seconds of all processes of the PostgreSQL server, also of those that have ended."""
    ticks, server = 0, (Path(url.partition("host=")[2].partition("&")[0]) / "data" / "postmaster.pid").read_text()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            name, words = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            if server.split()[0] in (name, words[1]):
                ticks += sum(map(int, words[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def side(drivers, due_s, seconds, chosen):
    """Run all requests at their drivers. Return [n, 2] seconds from arrival to dispatch, and to the end."""
    found = np.empty((len(due_s), 2))
    start_s = time.monotonic() + 0.2
    running = [0]

    async def one(number):
        await asyncio.sleep(start_s + due_s[number] - time.monotonic())
        driver, arrival_s = drivers[chosen[number]], start_s + due_s[number]
        tokens = max(1, round(seconds[number] / TOKEN_S))
        request = Request(number + 1, arrival_s, "m", 10, 1 << 20, length_prediction=LengthPrediction(float(tokens)))
        ticket = await driver.enter(request)
        dispatched_s = time.monotonic()
        running[0] += 1
        assert running[0] <= SLOTS, "the engine's limit holds over all gateways"
        await asyncio.sleep(seconds[number])
        running[0] -= 1
        ticket.on_progress(tokens)
        ticket.end(Outcome.FINISHED)
        found[number] = dispatched_s - arrival_s, time.monotonic() - arrival_s

    await asyncio.gather(*map(one, range(len(due_s))))
    return found


async def run(gateways, load, span_s, seed, url):
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(MEAN_S / (SLOTS * load), int(span_s * SLOTS * load / MEAN_S)))
    due_s[:SLOTS] = 0.0  # the engine starts full
    seconds = rng.lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA, len(due_s))
    chosen = rng.integers(gateways, size=len(due_s))
    single = SchedulerDriver(Scheduler(*SETTINGS))
    single.fleet_changed(WORKERS)
    async with contextlib.AsyncExitStack() as stack:
        drivers, config = [], SharedQueueConfig(url)
        for number in range(gateways):
            scheduler = SharedScheduler(*SETTINGS, gateway=f"{number:016x}", lease_s=2.0, tenants=Tenants())
            drivers.append(driver := SchedulerDriver(scheduler))
            driver.fleet_changed(WORKERS)
            await stack.enter_async_context(SharedQueue(config, scheduler, driver.clock, driver.wake))
        while not all(driver.statistics().shared_queue.shared for driver in drivers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        one, several = await asyncio.gather(
            side([single], due_s, seconds, np.zeros(len(due_s), int)), side(drivers, due_s, seconds, chosen)
        )
        cpu_s = []
        for where, which in (([single], chosen * 0), (drivers, chosen)):  # alone, 100 a second with free slots
            own_s, store_s, rows = time.process_time(), cpu_of_store_s(url), len(due_s) // 2
            alone = await side(where, np.arange(rows) / 100, np.full(rows, 0.1), which)
            used_s = time.process_time() - own_s, cpu_of_store_s(url) - store_s
            cpu_s.append([*(1e6 * used / rows for used in used_s), 1e3 * np.quantile(alone[:, 0], [0.5, 0.99])])
    steady = slice(len(due_s) // 10, None)
    jct_s = [float(found[steady, 1].mean()) for found in (one, several)]
    (own_us, _, own_ms), (shared_us, store_us, shared_ms) = cpu_s
    return {
        "jct_s": jct_s, "ratio": jct_s[1] / jct_s[0], "requests": len(due_s), "load": load, "gateways": gateways,
        "dispatch_ms": {"one": own_ms.tolist(), "shared": shared_ms.tolist()},
        "cpu_us": {"one": own_us, "shared": shared_us, "store": store_us},
    }  # fmt: skip


if __name__ == "__main__":
    server = Server(programs(), None)
    try:
        place = server.place("public").replace("&schema=public", "")
        gateways, span_s, *loads = sys.argv[1:]
        for load in loads:
            for seed in range(3):
                print(json.dumps(uvloop.run(run(int(gateways), float(load), float(span_s), seed, place))), flush=True)
    finally:
        server.stop()
