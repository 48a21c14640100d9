"""How the peak rate grows with the engines behind one gateway: engines emulated in real time."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from _gateway_cost import chat
from _gateway_processes import OTHER_CORE, OWN, Process, first_json, on_cores, running
from _harness import machine

STEP_S, MAX_NUM_SEQS, SHORTEST, LONGEST = 0.05, 4, 10, 30
ENGINE_RPS = MAX_NUM_SEQS / ((SHORTEST + LONGEST) / 2 * STEP_S)
"""Rate of an engine whose slots are all busy."""
MAX_DELAY_S = 0.5
PER_PROCESS = 25


def figures(_: Path, quick: bool) -> dict[str, Any]:
    """Return peak rates at a mean delay of at most MAX_DELAY_S with 10 and 50 engines, and their ratio."""
    with on_cores(OTHER_CORE):
        peaks = {engines: _peak(engines, quick=quick) for engines in (10, 50)}
    probes = {str(engines): probes for engines, (_, probes) in peaks.items()}
    ratio = peaks[50][0] / peaks[10][0]
    return {
        "gateway.scale_50_over_10": {"value": ratio} | probes | {"machine": machine()},
        "gateway.peak_rps_10": {"value": peaks[10][0], "unit": "requests/s"},
        "gateway.peak_rps_50": {"value": peaks[50][0], "unit": "requests/s"},
    }


def _peak(engines: int, *, quick: bool) -> tuple[float, list[dict[str, float]]]:
    """Return the largest rate with an acceptable delay, by bisection, and all probes."""
    span_s, halvings = (10.0, 3) if quick else (40.0, 5)
    low, high, probes = 0.5, 1.0, []
    with ExitStack() as stack:
        urls: list[str] = []
        for first in range(0, engines, PER_PROCESS):
            command = [sys.executable, "-m", "lengthwise.testing.engine_server"]
            command += ["--count", str(min(PER_PROCESS, engines - first)), "--max-num-seqs", str(MAX_NUM_SEQS)]
            command += ["--fixed-s", str(STEP_S), "--decode-s", "0", "--prompt-token-s", "0"]
            urls += first_json(*stack.enter_context(running(command, OTHER_CORE)))["urls"]
        gateway = stack.enter_context(OWN.started(urls, chat(), within_s=120.0))
        _probe(gateway, 0.5 * engines * ENGINE_RPS, 3.0 if quick else 8.0, seed=0)  # concurrency limits adapt
        for number in range(halvings + 1):
            share = low if number == 0 else (low + high) / 2
            probe = _probe(gateway, share * engines * ENGINE_RPS, span_s, seed=1)
            probes.append({"share": share} | probe)
            if probe["delay_s"] <= MAX_DELAY_S:
                low = share
            elif number == 0:
                raise AssertionError(f"the gateway does not sustain half of the load: {probe}")
            else:
                high = share
    return low * engines * ENGINE_RPS, probes


def _probe(gateway: Process, rate_rps: float, span_s: float, seed: int) -> dict[str, float]:
    """Send requests in an open loop; return seconds above the steps that a request needs, and the CPU share."""
    import aiohttp
    import uvloop

    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / rate_rps, int(rate_rps * span_s))).tolist()
    lengths = rng.integers(SHORTEST, LONGEST + 1, len(due_s)).tolist()

    async def open_loop() -> list[float]:
        loop = asyncio.get_running_loop()
        started_s = loop.time() + 0.1
        headers = {"Authorization": f"Bearer {gateway.key}"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

            async def request(due_s: float, tokens: int) -> float:
                await asyncio.sleep(started_s + due_s - loop.time())
                sent_s = loop.time()
                body = {"model": "toy", "prompt": "a fixed length", "max_tokens": tokens, "ignore_eos": True}
                async with session.post(f"{gateway.url}/v1/completions", json=body) as response:
                    content = await response.json()
                    assert response.status == 200, content
                assert content["usage"]["completion_tokens"] == tokens
                return loop.time() - sent_s - tokens * STEP_S

            return await asyncio.gather(*map(request, due_s, lengths))

    before, start = gateway.cpu_s(), time.perf_counter()
    delays_s = uvloop.run(open_loop())
    wall_s = time.perf_counter() - start
    assert min(delays_s) > -STEP_S, f"faster than its own steps: {min(delays_s)}"
    return {
        "rate_rps": rate_rps,
        "delay_s": statistics.fmean(delays_s),
        "max_delay_s": max(delays_s),
        "gateway_cpu_share": (gateway.cpu_s() - before) / wall_s,
    }
