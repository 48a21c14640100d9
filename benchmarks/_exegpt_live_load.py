"""The requests of ``_exegpt_live``, and what is read of a run: phases, rates, the latency of the longest outputs."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from _circle import Lengths
from _gateway_gain_engines import ONE_PROCESS

from lengthwise import Deployment, Workload, simulate
from lengthwise.schedule import Controls
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Scheduler

Floats = npt.NDArray[np.float64]
LENGTHS = Lengths(prompt=(64, 0.7, 8, 400), output=(32, 0.5, 8, 96))
_GRAIN = 8
"""Outputs are multiples of it, so that the 99th percentile is a length that many requests have."""
_BLOCK = 50
GROUPS: dict[str, int] = {}
"""Process group of the engine at a URL."""


def workload(n: int, seed: int) -> Workload:
    """Requests that are all there from the beginning.

    Outputs are drawn from every fiftieth of their distribution in turn, in random order: of each fifty one is longest.
    """
    made = LENGTHS.workload(n, seed, None, "rra")
    median, sigma, least, most = LENGTHS.output
    rng = np.random.default_rng([seed, n])
    strata = np.concatenate([rng.permutation(_BLOCK) for _ in range(-(-n // _BLOCK))])[:n]
    normal = NormalDist(math.log(median), sigma)
    levels = np.clip((strata + rng.random(n)) / _BLOCK, 1e-9, 1 - 1e-9)
    output = np.clip(np.exp([normal.inv_cdf(level) for level in levels.tolist()]), least, most)
    return replace(made, output_tokens=(-(-output // _GRAIN) * _GRAIN).astype(np.int64))


def longest() -> int:
    """The 99th-percentile output, which is the longest there is."""
    return LENGTHS.output[3]


def ramp(controls: Controls) -> int:
    """Phases until the decode batch is full."""
    return -(-longest() // controls.decode_steps) + 1


@dataclass(frozen=True)
class Served:
    """[n] when requests were sent and ended, on the machine's monotonic clock; their names at the engine."""

    sent_s: Floats
    finished_s: Floats
    names: tuple[str, ...]


async def sent(url: str, model: str, made: Workload, tag: str, concurrency: int, *, stream: bool = False) -> Served:
    """So many requests are under way at a time; AssertionError where an answer has not its length."""
    import aiohttp

    rng = np.random.default_rng([len(made), sum(tag.encode())])
    gate = asyncio.Semaphore(concurrency)
    names = tuple(f"{tag}{k}" for k in range(len(made)))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def one(name: str, prompt: list[int], tokens: int) -> tuple[float, float]:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "request_id": name}
            body |= {"ignore_eos": True, "temperature": 0, "stream": stream}
            if stream:
                body["stream_options"] = {"include_usage": True}
            async with gate:
                sent_s = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    told = await answer.read()
                finished_s = time.monotonic()
            assert answer.status == 200, told[:500]
            assert f'"completion_tokens":{tokens}' in told.decode(), (tokens, told[-500:])
            return sent_s, finished_s

        prompts = [rng.integers(10, 8000, n).tolist() for n in made.prompt_tokens.tolist()]
        rows = zip(names, prompts, made.output_tokens.tolist(), strict=True)
        times = np.array(await asyncio.gather(*(one(*row) for row in rows)))
    return Served(times[:, 0], times[:, 1], names)


def seen(phases: Sequence[dict[str, Any]], served: Served, made: Workload, controls: Controls) -> dict[str, Any]:
    """What an engine that is held to a schedule did while the decode batch was full and somebody waited.

    The first phases may be smaller: requests come in one by one.
    """
    full = [k for k, one in enumerate(phases) if one["admitted"] == controls.encode_batch]
    window = phases[full[0] + ramp(controls) : full[-1]]
    assert len(window) > 5 + ramp(controls), f"{len(window)} phases of {len(phases)} are in the window"
    started_s = np.array([one["started_s"] for one in window])
    exact = [_exact(one, then, controls) for one, then in itertools.pairwise(window)]
    number = {name: k for k, name in enumerate(served.names)}
    waits = []
    for phase in window[: -ramp(controls)]:  # later ones end when nobody is encoded any more
        for name in phase["requests"]:
            k = number[name.removeprefix("cmpl-").split("-")[0]]
            if made.output_tokens[k] == longest():
                waits.append(served.finished_s[k] - phase["started_s"])
    assert waits, "no request of the longest output is in the window"
    return {
        "throughput_rps": sum(one["admitted"] for one in window[:-1]) / float(started_s[-1] - started_s[0]),
        "latency_s": float(np.mean(waits)),
        "decode_batch": float(np.mean([one["decode_batch"] for one in window])),
        "cycle_s": float(np.diff(started_s).mean()),
        "encode_s": float(np.mean([one["encode_s"] for one in window])),
        "decode_s": float(np.mean([one["decode_s"] / one["decode_steps"] for one in window])),
        "exact_phases": float(np.mean(exact)),
        "phases": len(window),
        "longest": len(waits),
    }


def _exact(one: dict[str, Any], then: dict[str, Any], controls: Controls) -> bool:
    """Whether a phase was as it should be: shorter only if nobody was left, so that the next has new ones alone."""
    left_none = then["decode_batch"] <= then["admitted"]
    steps, wanted = one["decode_steps"], controls.decode_steps
    return one["admitted"] == controls.encode_batch and (steps == wanted or (steps < wanted and left_none))


def seen_plain(served: Served, made: Workload) -> dict[str, Any]:
    """The same of an engine with its own scheduler, all of whose requests run as soon as they are sent."""
    finished_s = np.sort(served.finished_s)
    low, high = len(finished_s) // 5, (4 * len(finished_s)) // 5
    middle = (served.finished_s > finished_s[low]) & (served.finished_s <= finished_s[high])
    long = middle & (made.output_tokens == longest())
    assert long.any(), "no request of the longest output is in the window"
    return {
        "throughput_rps": float((high - low) / (finished_s[high] - finished_s[low])),
        "latency_s": float((served.finished_s - served.sent_s)[long].mean()),
    }


def simulated(d: Deployment, tables: CostTables, controls: Controls, n: int) -> dict[str, float]:
    """The event engine on the same schedule and requests."""
    batching = f"rra(encode_batch={controls.encode_batch}, decode_steps={controls.decode_steps})"
    priced = replace(d, cost=tables, scheduler=Scheduler(batching=batching))
    made = workload(n, 100)
    r = simulate(made, priced).requests
    started_s = np.unique(r.scheduled_s)
    window = started_s[ramp(controls) : -1]
    inside = (r.scheduled_s >= window[0]) & (r.scheduled_s < window[-1])
    long = inside & (made.output_tokens == longest()) & (r.scheduled_s < window[-ramp(controls)])
    return {
        "throughput_rps": round(float(inside.sum() / (window[-1] - window[0])), 4),
        "latency_s": round(float((r.finished_s - r.scheduled_s)[long].mean()), 4),
    }


__all__ = ["GROUPS", "LENGTHS", "ONE_PROCESS", "ramp", "seen", "seen_plain", "sent", "simulated", "workload"]
