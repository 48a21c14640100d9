"""Probe an engine's metrics, models, capacity and features by few and small requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import COMPLETIONS, Capabilities, RequestError, Server
from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.health import REFUSED, TIMEOUT, UNHEALTHY
from lengthwise.gateway.relay import read_bounded
from lengthwise.gateway.scheduling import Signals
from lengthwise.schema.deployment import NULL_BLOCKS

MAX_BYTES = 2 << 20
MAX_LINES = 1024  # lines that are read of one metric: an engine reports one for each data parallel rank
_LABELS, _VALUE = re.compile(rb"\{([^\n]*)\}"), re.compile(rb"[ \t]+([^ \t\r\n]+)")
_CACHE_TOKENS = re.compile(rb'kv_cache_size_tokens="(\d{1,15})"')
_BLOCKS = re.compile(rb'num_gpu_blocks="(\d{1,12})"')
_BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d{1,9})"')

RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs", b"llamacpp:requests_processing",
           b"tgi_batch_current_size")  # fmt: skip
WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred",
           b"tgi_queue_size")  # fmt: skip
KV_USED = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage",
           b"llamacpp:kv_cache_usage_ratio")  # fmt: skip
PREEMPTIONS = (b"vllm:num_preemptions_total", b"sglang:num_retracted_requests_total",
               b"sglang:num_retracted_reqs_total", b"sglang:num_retracted_reqs")  # fmt: skip
TOKENS = (b"vllm:generation_tokens_total", b"sglang:generation_tokens_total",
          b"llamacpp:tokens_predicted_total")  # fmt: skip
STARTED = b"process_start_time_seconds"
SLEEPING = b"vllm:engine_sleep_state"
CACHE = b"vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """Metrics of an engine at one time. A metric that the engine does not report is None."""

    signals: Signals
    tokens: float | None = None  # generated since the process started
    started_s: float | None = None  # start of the process, in seconds of the engine's clock
    kv_tokens: int | None = None  # size of the KV cache, in all ranks together
    sleeping: bool = False  # whether vLLM's sleep mode is on

    def follows(self, previous: MetricsSample) -> bool:
        """Return whether both samples may be of one process: equal start times or, without these, no fewer tokens."""
        if self.started_s is not None and previous.started_s is not None:
            return self.started_s == previous.started_s
        return self.tokens is None or previous.tokens is None or self.tokens >= previous.tokens


def parse_metrics(body: bytes, at_s: float) -> MetricsSample:
    """Parse metrics in Prometheus' text format, read at ``at_s``. An invalid metric counts as not reported."""
    text = b"\n" + body
    kv_used = _values(text, KV_USED)
    kv_tokens = 0
    for labels, _ in _lines(text, CACHE):
        if tokens := _CACHE_TOKENS.search(labels):
            kv_tokens += int(tokens[1])
        elif (blocks := _BLOCKS.search(labels)) and (size := _BLOCK_SIZE.search(b"{" + labels)):
            kv_tokens += max(0, int(blocks[1]) - NULL_BLOCKS) * int(size[1])
    return MetricsSample(
        Signals(
            running=_sum(text, RUNNING),
            waiting=_sum(text, WAITING),
            kv_used=min(1.0, max(kv_used)) if kv_used else None,  # of the fullest rank
            preemptions=_sum(text, PREEMPTIONS),
            at_s=at_s,
        ),
        tokens=_sum(text, TOKENS),
        started_s=_sum(text, (STARTED,)),
        kv_tokens=kv_tokens or None,
        sleeping=any(value == 0 for labels, value in _lines(text, SLEEPING) if b'"awake"' in labels),
    )


def _lines(text: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield (labels, value) of a metric's lines. A label contains no line end, so it cannot look like a line."""
    start = text.find(b"\n" + name)
    for _ in range(MAX_LINES):
        if start < 0:
            return
        at = start + 1 + len(name)
        labels = _LABELS.match(text, at)
        match = _VALUE.match(text, labels.end() if labels else at)
        with contextlib.suppress(ValueError):
            if match and 0 <= (value := float(match[1])) < math.inf:
                yield (labels[1] if labels else b""), value
        start = text.find(b"\n" + name, at)


def _values(text: bytes, names: tuple[bytes, ...]) -> list[float]:
    return next((values for name in names if (values := [value for _, value in _lines(text, name)])), [])


def _sum(text: bytes, names: tuple[bytes, ...]) -> float | None:
    return sum(values) if (values := _values(text, names)) else None


class FetchError(Exception):
    """A request got no response. ``kind`` is REFUSED, TIMEOUT or UNHEALTHY (the connection broke)."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


async def get(session: Any, url: str, *, timeout_s: float, max_bytes: int) -> tuple[int, bytes]:
    """Return status and body (up to ``max_bytes``) of a URL. Raises FetchError if there is no response in time."""
    import aiohttp

    try:
        async with asyncio.timeout(timeout_s), session.get(url, allow_redirects=False) as response:
            return int(response.status), await read_bounded(response, max_bytes)
    except TimeoutError:
        raise FetchError(TIMEOUT, f"no response within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorError as error:
        cause = getattr(error, "os_error", error)  # a certificate error has none
        if getattr(cause, "errno", None) == errno.ECONNREFUSED:
            raise FetchError(REFUSED, "connection refused: no server listens at the address") from None
        raise FetchError(UNHEALTHY, f"no connection: {cause}"[:200]) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise FetchError(UNHEALTHY, f"the connection broke: {error!r}"[:200]) from None


FETCH_TIMEOUT_S, PROMPT_TIMEOUT_S = 5.0, 10.0
_MAX_CHUNKS = 64
_PROMPT_IDS = (301, 302, 303, 304, 305, 306, 307)
SMALLER, LARGER = 1, -1  # values of ``priority_sign``: the priorities that an engine runs first


@dataclass(frozen=True)
class EngineMetadata:
    """Properties of an engine that a probe has found."""

    capabilities: Capabilities = field(default_factory=Capabilities)
    slots: int | None = None  # maximum number of sequences that run at once; None: unknown
    kv_tokens: int | None = None  # size of the KV cache; None: unknown
    priority_sign: int = 0  # SMALLER or LARGER; 0 if the engine accepts no priorities, or none are used
    orders_by_priority: bool | None = None  # None: unknown, because every vLLM accepts priorities
    prompted: bool = False  # whether the response to the tiny prompt is final; False: it must be sent (again)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # entries in /v1/models by model


class _ProbeClient(Client):
    """A client on an existing session, with short timeouts and bounded responses."""

    def __init__(self, engine: Engine, session: Any) -> None:
        super().__init__(Server(engine.url, api_key=engine.api_key))
        self._session = SimpleNamespace(post=partial(session.post, allow_redirects=False))
        self._get_session = session
        self.entries: dict[str, dict[str, Any]] = {}

    async def request(self, method: str, url: str, fields: Any = None) -> tuple[int, str, Any]:
        assert method == "GET", (method, fields)
        try:
            status, body = await get(self._get_session, url, timeout_s=FETCH_TIMEOUT_S, max_bytes=MAX_BYTES)
        except FetchError as error:
            raise RequestError(error.kind, str(error)) from None
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return status, "text/plain", body.decode("utf-8", "replace")
        if url.endswith("/v1/models"):
            self.entries = _model_entries(fields)
        return status, "application/json", fields

    async def fetch_object(self, path: str) -> dict[str, Any]:
        body = await self.fetch_if_ok(path)
        return body if isinstance(body, dict) else {}


async def probe_metadata(engine: Engine, session: Any, *, priority: bool) -> EngineMetadata:
    """Return the properties of an engine, from its reports and its response to a tiny prompt.

    The prompt is sent only if ``engine.probe`` is set. ``priority`` states that the gateway uses priorities. Raises
    InputError if the engine cannot be used.
    """
    client = _ProbeClient(engine, session)
    capabilities = await client.identify()
    kind = capabilities.engine if engine.kind == "auto" else engine.kind
    own_defaults = False if engine.generation_defaults == "none" else None
    capabilities = replace(capabilities, engine=kind or "openai", own_defaults=own_defaults)
    metadata = await _probe_capacity(client, EngineMetadata(capabilities, entries=client.entries), priority=priority)
    if not engine.probe:
        return replace(metadata, prompted=True)
    return await send_prompt(engine, session, metadata, priority=priority)


_ENTRY = {"created": int, "owned_by": str, "max_model_len": int, "parent": str}
"""Fields of a model's entry that clients get, without ``root`` (a path on the engine's disk) and permissions."""


async def list_models(engine: Engine, session: Any) -> dict[str, dict[str, Any]]:
    """Return each model's entry in the engine's /v1/models, or {} if the engine does not answer."""
    client = _ProbeClient(engine, session)
    await client.fetch_object("/v1/models")
    return client.entries


def _model_entries(body: Any) -> dict[str, dict[str, Any]]:
    rows = body.get("data") if isinstance(body, dict) else None
    found = [row for row in rows if isinstance(row, dict) and "id" in row] if isinstance(rows, list) else []
    return {
        str(row["id"]): {name: row[name] for name, kind in _ENTRY.items() if type(row.get(name)) is kind}
        for row in found
    }


async def send_prompt(engine: Engine, session: Any, metadata: EngineMetadata, *, priority: bool) -> EngineMetadata:
    """Send a tiny prompt. Return the metadata, extended by the support of token ids and priorities.

    The reported prompt length shows whether the engine accepts token ids, and the chunks show whether it streams them.
    An engine that rejects priorities does so before it generates, and then gets the prompt again without a priority.
    If the response is late or too long, the metadata is unchanged.
    """
    client = _ProbeClient(engine, session)
    client.capabilities = replace(metadata.capabilities, api=COMPLETIONS)
    probes = priority and metadata.capabilities.engine == "vllm" and metadata.orders_by_priority is not False
    body = {
        "model": client.capabilities.model,
        "prompt": list(_PROMPT_IDS),
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    } | ({"priority": 1} if probes else {})
    chunks = []
    try:
        async with asyncio.timeout(PROMPT_TIMEOUT_S):
            async for chunk in client.stream(json.dumps(body).encode(), usage_each=False):
                chunks.append(chunk)
                if len(chunks) > _MAX_CHUNKS:
                    return metadata
    except TimeoutError:
        return metadata
    except RequestError as error:
        if probes and error.reason.startswith("http 4"):
            return await send_prompt(engine, session, replace(metadata, orders_by_priority=False), priority=False)
        # A rejection (4xx) is final. A busy or broken engine gets the prompt again later.
        return replace(metadata, prompted=error.reason.startswith("http 4") and error.reason != "http 429")
    usage = next((chunk.usage for chunk in reversed(chunks) if chunk.usage is not None), None)
    outputs = [chunk for chunk in chunks if chunk.is_output or chunk.text]
    capabilities = replace(
        metadata.capabilities,
        usage=usage is not None,
        token_id_prompts=usage is not None and usage.prompt_tokens == len(_PROMPT_IDS),
        token_ids_each=bool(outputs) and all(chunk.tokens > 0 for chunk in outputs),
    )
    sign = SMALLER if probes else metadata.priority_sign
    return replace(metadata, capabilities=capabilities, priority_sign=sign, prompted=True)


async def _probe_capacity(client: _ProbeClient, metadata: EngineMetadata, *, priority: bool) -> EngineMetadata:
    capabilities = metadata.capabilities
    if capabilities.engine == "vllm":
        text = await client.fetch_if_ok("/metrics") if capabilities.metrics else None
        kv_tokens = parse_metrics(text.encode(), 0.0).kv_tokens if isinstance(text, str) else None
        policy: Any = None
        if priority:  # vLLM reports its policy only in development mode
            policy = await client.fetch_object("/server_info?config_format=json")
            for key in ("vllm_config", "scheduler_config", "policy"):
                policy = policy.get(key) if isinstance(policy, dict) else None
        orders = policy == "priority" if isinstance(policy, str) else None
        return replace(metadata, kv_tokens=kv_tokens, orders_by_priority=orders)
    if capabilities.engine == "llama.cpp":
        props = await client.fetch_object("/props")
        settings = props.get("default_generation_settings")
        slots = _positive_int(props.get("total_slots"))
        length = _positive_int(settings.get("n_ctx")) if isinstance(settings, dict) else None
        capabilities = replace(capabilities, max_model_len=capabilities.max_model_len or length)
        kv_tokens = slots * length if slots and length else None
        return replace(metadata, capabilities=capabilities, slots=slots, kv_tokens=kv_tokens)
    if capabilities.engine == "sglang":
        info = await client.fetch_object("/server_info") or await client.fetch_object("/get_server_info")
        if not info:
            return metadata
        orders = info.get("enable_priority_scheduling") is True
        sign = SMALLER if info.get("schedule_low_priority_values_first") is True else LARGER
        states = info.get("internal_states")
        ranks = [rank for rank in states if isinstance(rank, dict)] if isinstance(states, list) else []
        rank_slots = sum(_positive_int(rank.get("effective_max_running_requests_per_dp")) or 0 for rank in ranks)
        return replace(
            metadata,
            slots=_positive_int(info.get("max_running_requests")) or rank_slots or None,
            kv_tokens=_positive_int(info.get("max_total_num_tokens")),
            priority_sign=sign if priority and orders else 0,
            orders_by_priority=orders,
        )
    return metadata


def _positive_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
