"""How the peak rate grows with the workers behind one gateway: engines emulated in real time."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from _gateway_peers import ours
from _gateway_procs import Process, cores, running, told
from _harness import machine

STEP_S, SEATS, SHORTEST, LONGEST = 0.05, 4, 10, 30
MEAN_TOKENS = (SHORTEST + LONGEST) / 2
WORKER_RPS = SEATS / (MEAN_TOKENS * STEP_S)
"""What a worker does when all its seats are taken all the time."""
MOST_DELAY_S = 0.5
PER_PROCESS = 25


def figures(shared: Path | None, fast: bool) -> dict[str, Any]:
    """The peak rates at a mean queueing delay of at most half a second with 10 and 50 workers, and their ratio."""
    del shared
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores()[1])
    try:
        found = {workers: _peak(workers, fast=fast) for workers in (10, 50)}
    except LookupError as error:
        return {"gateway.scale.skipped": {"skipped": str(error)}}
    finally:
        os.sched_setaffinity(0, mine)
    ratio = found[50][0] / found[10][0]
    details = {str(workers): probes for workers, (_, probes) in found.items()}
    return {
        "gateway.scale_50_over_10": {"value": ratio} | details | {"machine": machine()},
        "gateway.peak_rps_10": {"value": found[10][0], "unit": "requests/s"},
        "gateway.peak_rps_50": {"value": found[50][0], "unit": "requests/s"},
    }


def _peak(workers: int, *, fast: bool) -> tuple[float, list[dict[str, float]]]:
    """The largest rate that keeps the delay, by halving between what surely does and what cannot for long."""
    low, high, probes = 0.5, 1.0, []  # nothing above 1 could go on for ever
    span_s, halvings = (10.0, 3) if fast else (40.0, 5)
    with _engines(workers) as urls, ours().up(urls, within_s=120.0) as gateway:
        _probe(gateway, 0.5 * workers * WORKER_RPS, 3.0 if fast else 8.0, seed=0)  # caps find their height
        for number in range(halvings + 1):
            share = low if number == 0 else (low + high) / 2
            probe = _probe(gateway, share * workers * WORKER_RPS, span_s, seed=1)
            probes.append({"share": share} | probe)
            if probe["delay_s"] <= MOST_DELAY_S:
                low = share
            elif number == 0:
                raise AssertionError(f"half of the load is too much: {probe}")
            else:
                high = share
    return low * workers * WORKER_RPS, probes


@contextmanager
def _engines(count: int) -> Iterator[list[str]]:
    urls: list[str] = []
    with ExitStack() as stack:
        for first in range(0, count, PER_PROCESS):
            here = min(PER_PROCESS, count - first)
            argv = [sys.executable, "-m", "lengthwise.testing.engine_server", "--count", str(here)]
            argv += ["--fixed-s", str(STEP_S), "--decode-s", "0", "--prompt-token-s", "0"]
            process, log = stack.enter_context(running([*argv, "--max-num-seqs", str(SEATS)], cores()[1]))
            urls += told(process, log)["urls"]
        yield urls


def _probe(gateway: Process, rate_rps: float, span_s: float, seed: int) -> dict[str, float]:
    """An open loop: mean seconds beyond those of the steps that a request needs, and the CPU it cost."""
    import uvloop

    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate_rps, int(rate_rps * span_s))
    lengths = rng.integers(SHORTEST, LONGEST + 1, len(gaps))
    before, start = gateway.cpu_s(), time.perf_counter()
    delays = uvloop.run(_open_loop(gateway, np.cumsum(gaps).tolist(), lengths.tolist()))
    wall_s = time.perf_counter() - start
    assert len(delays) == len(gaps)
    assert min(delays) > -STEP_S, f"faster than its own steps: {min(delays)}"
    return {
        "rate_rps": rate_rps,
        "delay_s": statistics.fmean(delays),
        "worst_s": max(delays),
        "gateway_cpu_share": (gateway.cpu_s() - before) / wall_s,
    }


async def _open_loop(gateway: Process, deadline_s: list[float], lengths: list[int]) -> list[float]:
    import aiohttp

    loop = asyncio.get_running_loop()
    started_s = loop.time() + 0.1
    headers = {"Authorization": f"Bearer {gateway.key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def one(due: float, tokens: int) -> float:
            await asyncio.sleep(started_s + due - loop.time())
            sent_s = loop.time()
            body = {"model": "toy", "prompt": "as long as told", "max_tokens": tokens, "ignore_eos": True}
            async with session.post(f"{gateway.url}/v1/completions", json=body) as answer:
                told = await answer.json()
                assert answer.status == 200, told
            assert told["usage"]["completion_tokens"] == tokens
            return loop.time() - sent_s - tokens * STEP_S

        ends = await asyncio.gather(*map(one, deadline_s, lengths))
    return [end for end in ends if not math.isnan(end)]
