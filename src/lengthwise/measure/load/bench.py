"""A workload meets a real server: an open- or closed-loop load generator that says how honest it was."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lengthwise.backend.openai import Abilities, Client, Server
from lengthwise.measure._prefix_cache import prefix_facts
from lengthwise.measure.load._deployment import of_deployment
from lengthwise.measure.load._outcome import measured_of
from lengthwise.measure.load._run import Run
from lengthwise.measure.load._scrape import Scrape, look
from lengthwise.measure.load._watch import Watch, machine
from lengthwise.measure.load.prompts import prompts_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured
from lengthwise.schema.workload import Workload
from lengthwise.workload import Poisson

INTERRUPTED = "an interruption"
_LOOK_S = 2.0
"""How long a server may take to tell its counters before a run and after it."""


def bench(
    server: Server | str,
    workload: Workload,
    *,
    rate_rps: float | None = None,
    concurrency: int | None = None,
    seed: int = 0,
    salt: int | None = None,
    warmup_requests: int = 0,
    time_limit_s: float = math.inf,
    exact: bool = True,
    shared_prefix: float = 0.0,
    priorities: bool = False,
    scrape: bool = False,
    give_up_after: int = 10,
    abilities: Abilities | None = None,
    deployment: Mapping[str, Any] | None = None,
    told: Callable[[int, int], None] = lambda *_: None,
) -> Measured:
    """What a server does with a workload, in the records of a simulation.

    Open loop: each request is sent when it is due, whatever became of those before, and latencies count from
    then. Closed loop: the next is due when one ends. Ctrl-C ends the run and keeps what there is, and so do
    the time limit and a server that is gone.

    Args:
        server: Its address, or all of how it is asked.
        workload: Arrivals, or a concurrency, and lengths; texts where ``extra`` has "prompt".
        rate_rps: Poisson arrivals of this rate instead of the workload's own.
        concurrency: A closed loop of so many requests instead.
        seed: Of the arrivals and of the prompts.
        salt: Of the prompts as well: with another one they share nothing, so that no prefix cache knows them. None:
            a new one, kept in ``facts["arguments"]``; the same again sends the same bytes.
        warmup_requests: So many requests before, which nobody counts.
        time_limit_s: Ends the run; what is under way then is UNFINISHED.
        exact: Ask for outputs of exactly the workload's lengths; otherwise these are the most there may be.
        shared_prefix: Share of each prompt's tokens, from its beginning, that all prompts have in common.
        priorities: Send the workload's priorities, to servers that know them.
        scrape: Ask the server's ``/metrics`` every second, into ``facts["metrics"]``.
        give_up_after: So many lost requests in a row end the run.
        abilities: What the server can do, where that was probed before.
        deployment: What is known to be behind the address, for ``facts["deployment"]`` (see ``Measured``).
        told: Called with the requests that ended and those there are.

    Raises:
        InputError: Rate and concurrency are given both, a number is out of range, or no server answers.
        MissingExtraError: aiohttp is not installed.
    """
    asked = server if isinstance(server, Server) else Server(server)
    if salt is not None and salt < 0:
        raise InputError(f"salt must be from 0; it is {salt}: leave it out for a new one")
    if warmup_requests < 0 or give_up_after < 1 or not time_limit_s > 0:
        raise InputError(
            "warmup_requests must be from 0, give_up_after from 1 and time_limit_s above 0; they are "
            f"{warmup_requests}, {give_up_after} and {time_limit_s}"
        )
    loaded = under_load(workload, rate_rps, concurrency, seed)
    options: dict[str, Any] = {
        "seed": seed,
        "salt": secrets.randbits(32) if salt is None else salt,
        "warmup_requests": warmup_requests,
        "time_limit_s": time_limit_s if math.isfinite(time_limit_s) else None,
        "exact": exact,
        "shared_prefix": shared_prefix,
        "priorities": priorities,
        "give_up_after": give_up_after,
        "rate_rps": rate_rps,
        "concurrency": loaded.concurrency,
    }
    measured = asyncio.run(_bench(asked, loaded, options, abilities, told, scrape=scrape))
    return measured if deployment is None else of_deployment(measured, deployment)


def under_load(workload: Workload, rate_rps: float | None, concurrency: int | None, seed: int) -> Workload:
    """The workload with other arrivals, where these are given; raises InputError."""
    workload.require_nobody_after("a load on a real server")
    if rate_rps is not None and concurrency is not None:
        raise InputError("a rate (open loop) excludes a concurrency (closed loop); give one of them")
    if concurrency is not None:
        zeros = np.zeros(len(workload))
        return dataclasses.replace(workload, arrival_s=zeros, concurrency=concurrency)
    if rate_rps is not None:
        arrival_s = Poisson(rate_rps).sample(len(workload), np.random.default_rng([seed, 3]))
        return dataclasses.replace(workload, arrival_s=arrival_s, concurrency=None)
    return workload


async def _bench(
    server: Server,
    workload: Workload,
    options: dict[str, Any],
    abilities: Abilities | None,
    told: Callable[[int, int], None],
    *,
    scrape: bool,
) -> Measured:
    seed = options["seed"]
    async with Client(server, abilities) as client:
        if abilities is None:
            await client.probe()
        prompts = await prompts_of(
            client, workload, seed=seed, salt=options["salt"], shared=options["shared_prefix"]
        )
        run = Run(
            client, workload, prompts, options["exact"], options["priorities"], options["give_up_after"],
            lambda done: told(done, len(workload)),
        )  # fmt: skip
        run.prepare()
        with _interruptible(run):
            await run.warm_up(options["warmup_requests"])
            before = await look(client, _LOOK_S)
            watch = Watch()
            seen = Scrape(client, watch.start_s) if scrape else None
            await _watched(run, watch, seen, options["time_limit_s"])
            end_s = time.perf_counter()
            after = await look(client, _LOOK_S)
        facts = _facts(client, watch, options, seen) | prefix_facts(before, after)
        return measured_of(run, watch, end_s, facts, seed)


async def _watched(run: Run, watch: Watch, seen: Scrape | None, limit_s: float | None) -> None:
    beside = [asyncio.ensure_future(watch.run())]
    beside += [asyncio.ensure_future(seen.run())] if seen is not None else []
    try:
        await run.go(limit_s)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


@contextlib.contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C stops the run, where this thread may listen for it; a second one ends the program."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        run.stop(INTERRUPTED)

    try:
        loop.add_signal_handler(signal.SIGINT, interrupted)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # Windows, or not the main thread: the usual KeyboardInterrupt stays
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _facts(client: Client, watch: Watch, options: dict[str, Any], seen: Scrape | None) -> dict[str, Any]:
    able = client.abilities
    facts = {
        "url": client.server.shown,
        "engine": able.engine,
        "version": able.version,
        "model": able.model,
        "abilities": dataclasses.asdict(able) | {"models": list(able.models)},
        "arguments": options,
        "start": watch.start.isoformat(),
        "clock": "time.perf_counter (monotonic)",
        "machine": machine(),
    }
    return facts if seen is None else facts | {"metrics": seen.columns()}
