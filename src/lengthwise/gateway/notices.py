"""What a user should know before relying on a gateway: settings and engines that are open, or do not fit."""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lengthwise.gateway.config import GatewayConfig, Listen
from lengthwise.gateway.protocols import monotonic
from lengthwise.gateway.scheduling import PASSTHROUGH_MODES

if TYPE_CHECKING:
    from lengthwise.gateway.fleet import Worker

_REQUEST_TIMEOUT_S = 2.0
_DEV_ROUTE = "/is_sleeping"
"""vLLM has it only with VLLM_SERVER_DEV_MODE=1, and with it /sleep, /collective_rpc and their like, without a key."""

_HOW_TO_ORDER = (
    "Only a vLLM that was started with --scheduling-policy priority, or an SGLang with --enable-priority-scheduling, "
    "orders by them"
)
_FILLS_IN = (
    "may fill in penalties or a longest output of its own, so that a cut could change an answer: only requests that "
    "state max_tokens, presence_penalty and frequency_penalty are cut there. Start vLLM with --generation-config vllm "
    'and set generation_defaults = "none" for it'
)
_SETTLE_S = 5.0


def notices(config: GatewayConfig) -> list[str]:
    """Warnings about settings alone, one sentence each."""
    listen = config.listen
    found = []
    if not config.keys and not is_local(listen.host) and not _wants_certificates(listen):
        found.append(
            f"there are no keys, and the gateway listens on {listen.host}: everybody who reaches it may ask. "
            "Add [[keys]], or listen on 127.0.0.1"
        )
    if listen.admin_port is not None and not is_local(listen.admin_host):
        found.append(
            f"the admin port listens on {listen.admin_host} and takes no key: let only Prometheus and yourself reach it"
        )
    if config.order.mode == "observe" and listen.journal is None:
        found.append(
            "observe keeps no journal: add --journal FILE to look back at a whole day with serve --report FILE"
        )
    if config.order.mode in PASSTHROUGH_MODES and (held := _reserved(config)):
        found.append(
            f"mode {config.order.mode} holds nothing back, but in_flight is set for {held}: what comes beyond it waits "
            "here, not in the engine. Leave in_flight out to send all"
        )
    if config.order.mode == "rra" and not math.isinf(config.order.max_wait_s):
        found.append(
            f"who has waited {config.order.max_wait_s:g} s is sent in the midst of a phase: where the queue is always "
            "longer, that is everybody, and no phase is kept. Raise order.max_wait_s, or set it to inf"
        )
    return found


async def engine_notices(workers: Iterable[Worker], mode: str) -> list[str]:
    """Warnings about engines, asked at the price of one GET each, within 2 s."""
    workers = tuple(workers)
    dev = await asyncio.gather(*(_dev_mode(worker) for worker in workers))
    found = [
        f"{worker.name} runs vLLM's development mode: whoever reaches it, without a key, can put it to sleep or "
        "run code in it. Unset VLLM_SERVER_DEV_MODE, or let only the gateway reach it"
        for worker, is_dev in zip(workers, dev, strict=True)
        if is_dev
    ]
    if mode in ("isrtf", "windowed"):
        found += [
            f"{worker.name} {told}" for worker in workers if worker.client_request and (told := _uncut(worker, mode))
        ]
    if mode == "engine-priority":
        found += [f"{worker.name} {told}. {_HOW_TO_ORDER}" for worker in workers if (told := worker.priorities())]
    return found


async def probe_notices(config: GatewayConfig) -> list[str]:
    """Warnings about the engines of a configuration, which are asked as at a start; none of them is used."""
    from lengthwise.gateway.fleet import Fleet

    async with Fleet(config) as fleet:
        await fleet.stable(_SETTLE_S)
        workers, now_s = fleet.workers(), monotonic()
        silent = [worker for worker in workers if not worker.client_request]
        found = await engine_notices(workers, config.order.mode)
    return found + [f"{worker.name} could not be asked: {worker.trouble(now_s)}" for worker in silent]


def is_local(host: str) -> bool:
    """Whether an address to listen at is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reserved(config: GatewayConfig) -> str:
    """The engines that are given no more than a set number at once, in words; "" none."""
    found = [engine.name or engine.display_url for engine in config.engines if engine.in_flight is not None]
    if config.discovery.engine.in_flight is not None:
        found.append("[discovery.engine]")
    return ", ".join(found)


def _wants_certificates(listen: Listen) -> bool:
    return listen.tls is not None and listen.tls.ca is not None


def _uncut(worker: Worker, mode: str) -> str:
    """Who is not cut there, and why, in words; "" all who may be cut are."""
    able = worker.capabilities
    if able.ids_each and able.token_ids:
        return _FILLS_IN if able.own_defaults is None else ""
    if not worker.engine.probe:
        why = "was not asked whether it tells token ids (probe = false)"
    elif not worker.metadata.received:
        return "has not said yet whether it tells token ids: until it does, nothing is cut there"
    else:
        why = "takes no token ids, or does not tell them with each piece (return_token_ids)"
    return f"{why}: nothing is cut there, and of mode {mode} the order of waiting alone holds"


async def _dev_mode(worker: Worker) -> bool:
    """Whether it answers what only development mode has."""
    import aiohttp

    if not worker.client_request or worker.kind != "vllm":
        return False
    try:
        async with (
            asyncio.timeout(_REQUEST_TIMEOUT_S),
            worker.session.get(worker.url + _DEV_ROUTE, allow_redirects=False) as told,
        ):
            return bool(told.status == 200)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False
