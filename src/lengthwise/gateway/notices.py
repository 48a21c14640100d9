"""Warnings before a gateway serves, about settings and engines that are unsafe or do not fit together."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
from collections.abc import Iterable
from itertools import compress
from typing import TYPE_CHECKING

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.protocols import monotonic
from lengthwise.gateway.scheduling import PASSTHROUGH_MODES

if TYPE_CHECKING:
    from lengthwise.gateway.fleet import EngineWorker

_REQUEST_TIMEOUT_S = 2.0
_FIRST_CHECK_S = 5.0
_DEV_ROUTE = "/is_sleeping"
"""vLLM has this route only with VLLM_SERVER_DEV_MODE=1, and then also /sleep and /collective_rpc, without a key."""


def notices(config: GatewayConfig) -> list[str]:  # noqa: C901 - one warning after another
    """Return warnings about the settings, which need no engine."""
    listen, order = config.listen, config.order
    found = []
    if not (config.needs_key or is_loopback(listen.host) or (listen.tls is not None and listen.tls.ca is not None)):
        found.append(
            f"there are no keys, and the gateway listens on {listen.host}: every client that reaches it may send "
            "requests. Add [[keys]], or listen on 127.0.0.1"
        )
    if listen.admin_port is not None and not is_loopback(listen.admin_host):
        where = f"the admin port listens on {listen.admin_host}"
        if config.is_admin_open:
            found.append(f"{where} and takes no key: restrict it to Prometheus and yourself, or add [[listen.admins]]")
        if listen.admin_tls is None and (config.tenants.store or not config.is_admin_open):
            found.append(f"{where} without TLS: tokens would cross the network in clear. Set listen.admin_tls")
    if config.tenants.store is not None and listen.admin_port is None:
        found.append("there is a store of tenants, but no admin port: keys cannot be added. Set listen.admin_port")
    if order.mode == "observe" and listen.journal is None:
        found.append("observe writes no journal: add --journal FILE to evaluate a whole day with serve --report FILE")
    if order.mode == "windowed":
        found.append(
            "mode windowed ends requests and sends them again at every window while others wait. Each time a slot is "
            f"empty for a step: with window_tokens = {order.window_tokens} that is "
            f"{100 / (order.window_tokens + 1):.1f} % of its time. The time to compute prompt and output again comes "
            "on top, unless the engine caches prefixes. In measurements the mode was slower than fcfs. Use isrtf, "
            "which preempts only where that pays"
        )
    limited = [engine.name or engine.display_url for engine in config.engines if engine.concurrency is not None]
    limited += ["[discovery.engine]"] if config.discovery.engine.concurrency is not None else []
    if order.mode in PASSTHROUGH_MODES and limited:
        found.append(
            f"mode {order.mode} dispatches at once, but concurrency is set for {', '.join(limited)}: further requests "
            "wait in the gateway, not in the engine. Leave concurrency out to dispatch all"
        )
    if len({key.tenant for key in config.keys}) > 1 and order.fairness == "none" and not math.isinf(order.max_wait_s):
        found.append(
            f"requests that have waited {order.max_wait_s:g} s precede all others, of any tenant and class, so that a "
            'tenant with a long queue delays all others. Set order.fairness = "vtc"'
        )
    unbounded = sorted({key.tenant for key in config.keys if key.concurrency is None})
    if order.fairness == "vtc" and unbounded:
        found.append(
            "fairness vtc decides which tenant is next, but ends no request: a tenant whose outputs hold all slots "
            f"delays all others. Set concurrency for the keys of {', '.join(unbounded[:8])}"
        )
    if order.mode == "rra" and not math.isinf(order.max_wait_s):
        found.append(
            f"requests that have waited {order.max_wait_s:g} s are dispatched within a phase: where the queue is "
            "always longer, those are all requests, and no phase is kept. Raise order.max_wait_s, or set it to inf"
        )
    return found


async def engine_notices(workers: Iterable[EngineWorker], mode: str) -> list[str]:
    """Return warnings about engines. Send at most one GET to each engine, and wait for at most 2 s."""
    workers = tuple(workers)
    in_dev_mode = compress(workers, await asyncio.gather(*map(_is_in_dev_mode, workers)))
    found = [
        f"{worker.name} runs vLLM's development mode: every client that reaches it, without a key, can put it to "
        "sleep or run code in it. Unset VLLM_SERVER_DEV_MODE, or let only the gateway reach it"
        for worker in in_dev_mode
    ]
    if mode in ("isrtf", "windowed"):
        known = [worker for worker in workers if worker.identified]
        found += [f"{worker.name} {notice}" for worker in known if (notice := _preemption_notice(worker, mode))]
    if mode == "engine-priority":
        found += [
            f"{worker.name} {notice}. Only a vLLM that was started with --scheduling-policy priority, or an SGLang "
            "with --enable-priority-scheduling, orders by them"
            for worker in workers
            if (notice := worker.priority_notice())
        ]
    return found


async def probe_notices(config: GatewayConfig) -> list[str]:
    """Probe the engines of a configuration as at startup, and return warnings about them."""
    from lengthwise.gateway.fleet import Fleet

    async with Fleet(config) as fleet:
        await fleet.wait_checked(_FIRST_CHECK_S)
        workers, now_s = fleet.workers(), monotonic()
        silent = [worker for worker in workers if not worker.identified]
        found = await engine_notices(workers, config.order.mode)
    return found + [f"{worker.name} could not be probed: {worker.unavailable_reason(now_s)}" for worker in silent]


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or localhost, which only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _preemption_notice(worker: EngineWorker, mode: str) -> str:
    """Return the reason for which the gateway preempts no or few requests at this worker, or "" if there is none."""
    capabilities = worker.capabilities
    if capabilities.token_ids_each and capabilities.token_id_prompts:
        if capabilities.own_defaults is not None:
            return ""
        return (
            "may fill in penalties or a maximum length of its own, so that a preemption could change an answer: only "
            "requests that state max_tokens, presence_penalty and frequency_penalty are preempted there. Start vLLM "
            'with --generation-config vllm and set generation_defaults = "none" for it'
        )
    if not worker.engine.probe:
        reason = "was not probed for token ids (probe = false)"
    elif not worker.metadata.prompted:
        return "has not reported yet whether it returns token ids: until it does, no request is preempted there"
    else:
        reason = "takes no token ids, or does not return them with each chunk (return_token_ids)"
    return f"{reason}: no request is preempted there, and mode {mode} only orders waiting requests"


async def _is_in_dev_mode(worker: EngineWorker) -> bool:
    import aiohttp

    if not worker.identified or worker.kind != "vllm":
        return False
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            async with worker.session.get(worker.url + _DEV_ROUTE, allow_redirects=False) as response:
                return bool(response.status == 200)
    return False
