"""What an engine is and can do, asked once and sparingly."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import COMPLETIONS, Abilities, Piece, RequestError, Server
from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.health import REFUSED, SILENT, UNWELL
from lengthwise.gateway.scheduling import Signals

MAX_BYTES = 2 << 20
MOST_LINES = 1024
"""Of one metric that are read: an engine tells one for each of its parts."""
_LABELS, _VALUE = re.compile(rb"\{([^\n]*)\}"), re.compile(rb"[ \t]+([^ \t\r\n]+)")
_RESERVED = re.compile(rb'kv_cache_size_tokens="(\d{1,15})"')
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
class Reading:
    """One look at an engine.

    Attributes:
        signals: For the scheduler.
        tokens: Generated since it started; None where it does not tell.
        started: When its process started, on its own clock; None where it does not tell.
        kv_tokens: That its cache holds; None where it does not tell.
        sleeping: Whether it was told to sleep.
    """

    signals: Signals
    tokens: float | None = None
    started: float | None = None
    kv_tokens: int | None = None
    sleeping: bool = False

    def follows(self, before: Reading) -> bool:
        """Whether both can be of one process: the same start, or no count of tokens that fell."""
        if self.started is not None and before.started is not None:
            return self.started == before.started
        return self.tokens is None or before.tokens is None or self.tokens >= before.tokens


def read(body: bytes, at_s: float) -> Reading:
    """What the text says; what cannot be read is left out."""
    text = b"\n" + body
    return Reading(
        Signals(
            running=_sum(text, RUNNING),
            waiting=_sum(text, WAITING),
            kv_used=_share(text),
            preemptions=_sum(text, PREEMPTIONS),
            at_s=at_s,
        ),
        tokens=_sum(text, TOKENS),
        started=_sum(text, (STARTED,)),
        kv_tokens=_kv_tokens(text),
        sleeping=any(value == 0 for labels, value in _lines(text, SLEEPING) if b'"awake"' in labels),
    )


def _lines(text: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Labels and value of a metric's lines. A value of a label has no line end: prefixes suffice."""
    start, left = text.find(b"\n" + name), MOST_LINES
    while start >= 0 and left:
        left -= 1
        at = start + 1 + len(name)
        labels = _LABELS.match(text, at)
        found = _VALUE.match(text, labels.end() if labels else at)
        value = _number(found[1]) if found else None
        if value is not None:
            yield (labels[1] if labels else b""), value
        start = text.find(b"\n" + name, at)


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _sum(text: bytes, names: tuple[bytes, ...]) -> float | None:
    """Over an engine's parts (data parallel ranks tell one line each), by the first name that is there."""
    for name in names:
        values = [value for _, value in _lines(text, name)]
        if values:
            return sum(values)
    return None


def _share(text: bytes) -> float | None:
    """Of the fullest part, as a share."""
    for name in KV_USED:
        values = [value for _, value in _lines(text, name)]
        if values:
            return min(1.0, max(values))
    return None


def _kv_tokens(text: bytes) -> int | None:
    total = 0
    for labels, _ in _lines(text, CACHE):
        held = _RESERVED.search(labels)
        if held:
            total += int(held[1])
            continue
        blocks, size = _BLOCKS.search(labels), _BLOCK_SIZE.search(b"{" + labels)
        if blocks and size:
            total += int(blocks[1]) * int(size[1])
    return total or None


class MissError(Exception):
    """No answer came.

    Attributes:
        kind: REFUSED (nobody listens), SILENT (too late) or UNWELL (the connection broke).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


async def get(session: Any, url: str, *, within_s: float, max_bytes: int) -> tuple[int, bytes]:
    """Status and at most so many bytes of the body.

    Raises:
        MissError: No answer came in time.
    """
    import aiohttp

    try:
        async with asyncio.timeout(within_s), session.get(url, allow_redirects=False) as answer:
            parts, size = [], 0
            while size < max_bytes and (part := await answer.content.readany()):
                parts.append(part)
                size += len(part)
            if not answer.content.at_eof():
                answer.close()
            return int(answer.status), b"".join(parts)[:max_bytes]
    except TimeoutError:
        raise MissError(SILENT, f"no answer within {within_s:g} s") from None
    except aiohttp.ClientConnectorError as error:
        why = getattr(error, "os_error", error)  # one about a certificate has none
        refused = getattr(why, "errno", None) == errno.ECONNREFUSED
        detail = "nobody listens there" if refused else f"no connection: {why}"[:200]
        raise MissError(REFUSED if refused else UNWELL, detail) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise MissError(UNWELL, f"the connection broke: {error!r}"[:200]) from None


def parsed(body: bytes) -> Any:
    """JSON, or None where it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


ASK_S, HELLO_S = 5.0, 10.0
_MAX_BYTES, _MOST_PIECES = 2 << 20, 64
_IDS = (301, 302, 303, 304, 305, 306, 307)
SMALLER, LARGER = 1, -1
"""Which priority goes first; 0: none does."""


@dataclass(frozen=True)
class EngineMetadata:
    """Of one engine.

    Attributes:
        capabilities: For the relay.
        slots: The most it runs at once; None where it does not tell.
        kv_tokens: That its cache holds; None where it does not tell.
        priority_sign: SMALLER or LARGER priorities go first; 0: it takes none.
        orders: Whether it orders by them; None: it does not tell (vLLM takes them under every order of its own).
        received: Whether it answered the tiny prompt (or is not to be sent one): else it is asked again.
    """

    capabilities: Abilities = field(default_factory=Abilities)
    slots: int | None = None
    kv_tokens: int | None = None
    priority_sign: int = 0
    orders: bool | None = None
    received: bool = False


class _Straight:
    """A session whose requests end where they were sent: what an engine redirects to is not asked."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def post(self, url: str, **more: Any) -> Any:
        """As aiohttp's."""
        return self._session.post(url, allow_redirects=False, **more)


class _Asking(Client):
    """The client, on a session of others, with short answers and short waits."""

    def __init__(self, engine: Engine, session: Any) -> None:
        super().__init__(Server(engine.url, api_key=engine.api_key))
        self._session, self._plain = _Straight(session), session

    async def answer(self, method: str, url: str, fields: Any = None) -> tuple[int, str, Any]:
        """As ``Client.answer``; only what is told is asked for here."""
        assert method == "GET", (method, fields)
        try:
            status, body = await get(self._plain, url, within_s=ASK_S, max_bytes=_MAX_BYTES)
        except MissError as miss:
            raise RequestError(miss.kind, str(miss)) from None
        found = parsed(body)
        text = body.decode("utf-8", "replace")
        return status, "text/plain" if found is None else "application/json", text if found is None else found


async def find_facts(engine: Engine, session: Any, *, priority: bool) -> EngineMetadata:
    """All that can be known of an engine, at the price of one tiny prompt (none with ``engine.probe`` off).

    Args:
        engine: Where it is.
        session: Its own.
        priority: Whether it matters that it takes priorities.

    Raises:
        InputError: It lists no models, refuses the key, or does not answer.
    """
    client = _Asking(engine, session)
    able = await client.identify()
    kind = able.engine if engine.kind == "auto" else engine.kind
    fills_in = False if engine.generation_defaults == "none" else None
    able = replace(able, engine=kind or "openai", own_defaults=fills_in)
    metadata = await _with_size(client, EngineMetadata(able), priority=priority)
    if not engine.probe:
        return replace(metadata, received=True)
    return await greeted(engine, session, metadata, priority=priority)


async def find_models(engine: Engine, session: Any) -> tuple[str, ...] | None:
    """The models that it lists now; None where it does not answer."""
    try:
        status, _, body = await _Asking(engine, session).answer("GET", f"{Server(engine.url).root}/v1/models")
    except RequestError:
        return None
    rows = body.get("data") if status == 200 and isinstance(body, dict) else None
    if not isinstance(rows, list):
        return None
    return tuple(str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row)


async def greeted(engine: Engine, session: Any, metadata: EngineMetadata, *, priority: bool) -> EngineMetadata:
    """The facts with what one tiny prompt shows: token ids are taken, told with each piece, priorities taken.

    The prompt is token ids, and the answer says how many tokens it was. An engine that refuses priorities does
    so before it costs anything, and is asked once more without.
    """
    client = _Asking(engine, session)
    client.capabilities = metadata.capabilities
    probes = priority and metadata.capabilities.engine == "vllm" and metadata.orders is not False
    try:
        pieces = await _hello(client, {"priority": 1} if probes else {})
        sign = SMALLER if probes else metadata.priority_sign
    except RequestError as error:
        if not probes or not error.reason.startswith("http 4"):
            return replace(metadata, received=_is_no(error))
        return await greeted(engine, session, replace(metadata, orders=False), priority=False)
    usage = next((piece.usage for piece in reversed(pieces) if piece.usage is not None), None)
    outputs = [piece for piece in pieces if piece.is_output or piece.text]
    able = replace(
        metadata.capabilities,
        usage=usage is not None,
        token_ids=usage is not None and usage.prompt_tokens == len(_IDS),
        ids_each=bool(outputs) and all(piece.tokens > 0 for piece in outputs),
    )
    return replace(metadata, capabilities=able, priority_sign=sign, received=True)


def _is_no(error: RequestError) -> bool:
    """Whether asking again would be of no use: it said no, and not only that it is busy."""
    return error.reason.startswith("http 4") and error.reason != "http 429"


async def _hello(client: Client, fields: dict[str, Any]) -> list[Piece]:
    """The pieces of two tokens."""
    body = {
        "model": client.capabilities.model,
        "prompt": list(_IDS),
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    client.capabilities = replace(client.capabilities, api=COMPLETIONS)
    try:
        async with asyncio.timeout(HELLO_S):
            pieces = []
            async for piece in client.stream(json.dumps(body | fields).encode(), usage_each=False):
                pieces.append(piece)
                if len(pieces) > _MOST_PIECES:
                    raise RequestError("malformed", f"more than {_MOST_PIECES} pieces for two tokens")
            return pieces
    except TimeoutError:
        raise RequestError("timed out", f"no answer to two tokens within {HELLO_S:g} s") from None


async def _with_size(client: Client, metadata: EngineMetadata, *, priority: bool) -> EngineMetadata:
    """The facts with slots and cache, from where each kind tells them."""
    kind, root = metadata.capabilities.engine, client.server.root
    if kind == "vllm":
        text = await _report(client, f"{root}/metrics") if metadata.capabilities.metrics else None
        kv_tokens = read(text.encode(), 0.0).kv_tokens if isinstance(text, str) else None
        orders = await _policy_of_vllm(client) if priority else None
        return replace(metadata, kv_tokens=kv_tokens, orders=orders)
    if kind == "llama.cpp":
        return _of_llama(metadata, await _report(client, f"{root}/props"))
    if kind == "sglang":
        for path in ("/server_info", "/get_server_info"):
            told = await _report(client, root + path)
            if isinstance(told, dict):
                return _of_sglang(metadata, told, priority=priority)
    return metadata


async def _policy_of_vllm(client: Client) -> bool | None:
    """Whether it orders by priority: its development mode alone tells; None: it is not on."""
    told = await _report(client, f"{client.server.root}/server_info?config_format=json")
    config = told.get("vllm_config") if isinstance(told, dict) else None
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    policy = scheduler.get("policy") if isinstance(scheduler, dict) else None
    return policy == "priority" if isinstance(policy, str) else None


async def _report(client: Client, url: str) -> Any:
    try:
        status, body = await client.fetch("GET", url)
    except RequestError:
        return None
    return body if status == 200 else None


def _of_llama(metadata: EngineMetadata, props: Any) -> EngineMetadata:
    if not isinstance(props, dict):
        return metadata
    settings = props.get("default_generation_settings")
    slots = _count(props.get("total_slots"))
    length = _count(settings.get("n_ctx")) if isinstance(settings, dict) else None
    able = replace(metadata.capabilities, max_model_len=metadata.capabilities.max_model_len or length)
    return replace(metadata, capabilities=able, slots=slots, kv_tokens=slots * length if slots and length else None)


def _of_sglang(metadata: EngineMetadata, report: dict[str, Any], *, priority: bool) -> EngineMetadata:
    sign, orders = 0, report.get("enable_priority_scheduling") is True
    if priority and orders:
        sign = SMALLER if report.get("schedule_low_priority_values_first") is True else LARGER
    return replace(
        metadata,
        slots=_count(report.get("max_running_requests")) or _slots_of_ranks(report.get("internal_states")),
        kv_tokens=_count(report.get("max_total_num_tokens")),
        priority_sign=sign,
        orders=orders,
    )


def _slots_of_ranks(states: Any) -> int | None:
    """Over SGLang's data parallel ranks, where nobody set a number."""
    rows = [row for row in states if isinstance(row, dict)] if isinstance(states, list) else []
    slots = [_count(row.get("effective_max_running_requests_per_dp")) for row in rows]
    return sum(one for one in slots if one) or None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
