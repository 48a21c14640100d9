"""A client of OpenAI-compatible servers that tells when each piece of an answer came.

For vLLM, SGLang, llama.cpp, TGI and ``transformers serve``. What a server can do is found by asking it
(``Client.probe``), never assumed. Numbers of tokens come from the server's usage or token ids, never from
the number of chunks: one chunk can carry many tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any, Self

from lengthwise.backend.openai_protocol import (
    CHAT,
    COMPLETIONS,
    Abilities,
    Piece,
    PieceReader,
    RequestError,
    Server,
    SseReader,
    Usage,
    told,
    usage_of,
)
from lengthwise.schema.errors import InputError, MissingExtraError


def library() -> Any:
    """aiohttp; raises MissingExtraError where it is not installed."""
    try:
        import aiohttp
    except ImportError as error:
        raise MissingExtraError("asking a server", "bench") from error
    return aiohttp


def _unconnected(error: Any) -> RequestError:
    """Nobody listens there, or the name or the way is not known; of the address only what was asked for."""
    where = f"{error.host}:{error.port}"
    if isinstance(error.os_error, ConnectionRefusedError):
        return RequestError("refused", f"nobody listens at {where}")
    return RequestError("no connection", f"{where}: {error.os_error.strerror or error.os_error}")


@contextmanager
def named() -> Iterator[None]:
    """Turns what the network raises into a RequestError."""
    aiohttp = library()
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise RequestError("no connection", "not within the time for it") from error
    except aiohttp.SocketTimeoutError as error:
        raise RequestError("stalled", "no byte for the longest time allowed") from error
    except TimeoutError as error:
        raise RequestError("timed out", "the request took longer than allowed") from error
    except aiohttp.ClientConnectorError as error:
        raise _unconnected(error) from error
    except aiohttp.ClientPayloadError as error:
        raise RequestError("closed early", str(error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError) as error:
        raise RequestError("reset", str(error)) from error
    except aiohttp.ClientResponseError as error:
        raise RequestError("malformed", f"no HTTP: {error}"[:200]) from error
    except aiohttp.ClientError as error:
        raise RequestError("no connection", repr(error)) from error
    except ValueError as error:
        raise RequestError("malformed", str(error)) from error


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server wants to be left alone: the header Retry-After, a number or a date after its own Date."""
    told = headers.get("Retry-After", "").strip()
    try:
        seconds = float(told)
    except ValueError:
        seconds = _between(headers.get("Date", ""), told)
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _between(first: str, last: str) -> float:
    """Seconds between two dates of HTTP; NaN where one is none."""
    try:
        return (parsedate_to_datetime(last) - parsedate_to_datetime(first)).total_seconds()
    except (TypeError, ValueError):
        return math.nan


_SAMPLE = "one two three"


async def tokenizer_of(client: Client, model: str) -> str:
    """Whose form of ``/tokenize`` the server has: "vllm", "llama.cpp", "tgi"; "" where it has none."""
    for form in ("vllm", "llama.cpp", "tgi"):
        if await _ids(client, form, model, _SAMPLE):
            return form
    return ""


async def tokenize(client: Client, text: str) -> list[int] | None:
    """Token ids of a text, without those that begin a prompt; None where the server does not tell."""
    able = client.capabilities
    return await _ids(client, able.tokenizer, able.model, text) if able.tokenizer else None


async def _ids(client: Client, form: str, model: str, text: str) -> list[int] | None:
    fields = {
        "vllm": {"model": model, "prompt": text, "add_special_tokens": False},
        "llama.cpp": {"content": text, "add_special": False},
        "tgi": {"inputs": text, "add_special_tokens": False},
    }[form]
    try:
        status, body = await client.fetch("POST", f"{client.server.root}/tokenize", fields)
    except RequestError:
        return None
    return _read(body) if status == 200 else None


def _read(body: Any) -> list[int] | None:
    rows = body.get("tokens") if isinstance(body, dict) else body
    if not isinstance(rows, list):
        return None
    ids = [row.get("id") if isinstance(row, dict) else row for row in rows]
    known = [i for i in ids if isinstance(i, int)]
    return known if known and len(known) == len(ids) else None


_HELLO = "one two three four"
_IDS = (301, 302, 303, 304, 305, 306, 307)
_MIN_COUNT = 3
_METRICS = {"vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llama.cpp", "tgi_": "tgi"}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_WRONG = "neither"
"""A value that a server which knows the field must refuse."""


async def probe(client: Client) -> Abilities:
    """See ``Client.probe``."""
    able = await identify(client)
    able = replace(able, api=await _api(client, able.model))
    client.capabilities = able
    usage = await _tells(client, {"stream_options": {"include_usage": True}})
    each = {"include_usage": True, "continuous_usage_stats": True}
    usage_each = await _tells_each(client, {"stream_options": each}) if usage else False
    completes = able.api == COMPLETIONS
    return replace(
        able,
        usage=usage,
        usage_each=usage_each,
        ids_each=completes and await _tells_each(client, {"return_token_ids": True}),
        token_ids=completes and await _takes_ids(client, able),
        ignore_eos=await _knows(client, {"ignore_eos": True}, {"ignore_eos": _WRONG}),
        min_tokens=await _knows(client, {"min_tokens": _MIN_COUNT}, {"min_tokens": _WRONG}),
        tokenizer=await tokenizer_of(client, able.model),
    )


async def identify(client: Client) -> Abilities:
    """See ``Client.identify``."""
    entries, came = await _models(client)
    names = tuple(str(row["id"]) for row in entries if isinstance(row, dict) and "id" in row)
    model = client.server.model or (names[0] if names else "")
    if not model:
        raise InputError(
            f"{client.server.shown} lists no models ({came}); check that it is an OpenAI-compatible server, "
            "or name the model to ask for"
        )
    if names and model not in names:
        names_there = ", ".join(names[:8])
        raise InputError(f"{client.server.shown} has no model {model!r}; it lists {names_there}")
    mine = next((row for row in entries if isinstance(row, dict) and row.get("id") == model), {})
    longest = mine.get("max_model_len")
    metrics = await _get(client, "/metrics")
    engine, version = await _engine(client, mine, metrics)
    return Abilities(
        engine=engine,
        version=version,
        models=names,
        model=model,
        max_model_len=longest if isinstance(longest, int) else None,
        metrics=isinstance(metrics, str) and "# TYPE" in metrics,
    )


async def _models(client: Client) -> tuple[list[Any], str]:
    """What it lists, and what came in a few words."""
    shown = client.server.shown
    try:
        status, kind, body = await client.answer("GET", f"{client.server.root}/v1/models")
    except RequestError as error:
        if error.reason == "refused":
            raise InputError(f"nobody listens at {shown}; is the server up?") from error
        raise InputError(f"no server answers at {shown}: {error}; start it, or check the address") from error
    if status in {401, 403}:
        raise InputError(f"{shown} refuses the API key (http {status}); give the right one")
    rows = body.get("data") if status == 200 and isinstance(body, dict) else None
    return rows if isinstance(rows, list) else [], f"/v1/models: http {status}, {told(body, kind)}"


async def _engine(client: Client, model: dict[str, Any], metrics: Any) -> tuple[str, str]:
    """Kind and version, from what each kind tells of itself."""
    kind = _OWNERS.get(str(model.get("owned_by", "")).lower(), "")
    if not kind and isinstance(metrics, str):
        kind = next((name for prefix, name in _METRICS.items() if f"\n{prefix}" in f"\n{metrics}"), "")
    tells = await _get(client, "/version")
    version = str(tells["version"]) if isinstance(tells, dict) and "version" in tells else ""
    if version and not kind:
        kind = "vllm"
    for path, name, key in (
        ("/server_info", "sglang", "version"),
        ("/get_server_info", "sglang", "version"),
        ("/props", "llama.cpp", "build_info"),
        ("/info", "tgi", "version"),
    ):
        if version or kind not in {"", name}:
            continue
        metadata = await _get(client, path)
        if isinstance(metadata, dict) and isinstance(metadata.get(key), str):
            kind, version = name, metadata[key]
    return kind, version


async def _get(client: Client, path: str) -> Any:
    try:
        status, body = await client.fetch("GET", f"{client.server.root}{path}")
    except RequestError:
        return None
    return body if status == 200 else None


async def _api(client: Client, model: str) -> str:
    """Which of the two ways to ask works."""
    reasons = []
    for api in (COMPLETIONS, CHAT):
        client.capabilities = Abilities(model=model, api=api)
        try:
            await _stream(client, {})
        except RequestError as error:
            reasons.append(f"{api}: {error}")
        else:
            return api
    raise InputError(f"{client.server.shown} completes no prompt of {model!r}: {'; '.join(reasons)}")


async def _stream(client: Client, fields: dict[str, Any]) -> list[Piece]:
    """The pieces of a few tokens, asked for with further fields."""
    able = client.capabilities
    body = {"model": able.model, "max_tokens": _MIN_COUNT, "stream": True, **prompted(_HELLO, able.api)}
    sent = body | dict(client.server.body) | fields
    return [piece async for piece in client.stream(sent, usage_each="stream_options" in fields)]


async def _tells(client: Client, fields: dict[str, Any]) -> bool:
    """Whether a stream ends in numbers of tokens."""
    try:
        pieces = await _stream(client, fields)
    except RequestError:
        return False
    last = next((p.usage for p in reversed(pieces) if p.usage is not None), None)
    return last is not None and 0 < last.output_tokens <= _MIN_COUNT and last.prompt_tokens > 0


async def _tells_each(client: Client, fields: dict[str, Any]) -> bool:
    """Whether every piece of output tells how many tokens it has."""
    try:
        pieces = await _stream(client, fields)
    except RequestError:
        return False
    counts = [piece.tokens for piece in pieces if piece.is_output or piece.text]
    return bool(counts) and all(tokens > 0 for tokens in counts) and sum(counts) <= _MIN_COUNT


async def _takes_ids(client: Client, capabilities: Abilities) -> bool:
    fields = {"model": capabilities.model, "max_tokens": 1, "prompt": list(_IDS)}
    try:
        _, usage = await client.send(fields)
    except RequestError:
        return False
    return usage is not None and usage.prompt_tokens == len(_IDS)


async def _knows(client: Client, right: dict[str, Any], wrong: dict[str, Any]) -> bool | None:
    """Whether a field is known: the right value is taken, a wrong one refused. None: both are taken."""
    if not await _taken(client, right):
        return False
    return None if await _taken(client, wrong) else True


async def _taken(client: Client, fields: dict[str, Any]) -> bool:
    try:
        await _stream(client, fields)
    except RequestError as error:
        if error.reason.startswith("http 4") or error.reason == "malformed":
            return False
        raise InputError(f"{client.server.shown} failed while it was asked what it can do: {error}") from error
    return True


_DRAIN_S = 0.5
Prompt = str | Sequence[int]
IDLE_S = 2.0
"""Shorter than servers keep an idle connection (uvicorn: 5 s), so that none is lost while it is being reused."""


class Client:
    """Connections to a server, as many as requests are under way: none waits for another.

    Use as an async context manager. Needs aiohttp (extra ``bench``).

    Args:
        server: Whom to ask.
        capabilities: What ``probe`` found, where it is known already.
    """

    def __init__(self, server: Server, capabilities: Abilities | None = None) -> None:
        self.server = server
        self.capabilities = capabilities or Abilities(model=server.model or "")
        self._aiohttp = library()
        self._session: Any = None

    async def __aenter__(self) -> Self:
        """Opens the session."""
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.server.api_key:
            headers["Authorization"] = f"Bearer {self.server.api_key}"
        server, aiohttp = self.server, self._aiohttp
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(
                total=server.timeout_s, sock_connect=server.connect_s, sock_read=server.stall_s
            ),
            headers=headers,
            trace_configs=[_dispatch(aiohttp)],
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes all connections."""
        await self._session.close()

    async def probe(self) -> Abilities:
        """Asks what the server is and can do, keeps it for further requests, and returns it.

        Raises:
            InputError: Nobody answers there, the key is refused, or it completes no prompt.
        """
        self.capabilities = await probe(self)
        return self.capabilities

    async def identify(self) -> Abilities:
        """Who the server is, by what it tells of itself alone: nothing is generated for it.

        Raises:
            InputError: Nobody answers there, the key is refused, or it lists no models.
        """
        return await identify(self)

    def body(self, prompt: Prompt, max_tokens: int, *, exact: bool = True, priority: int | None = None) -> bytes:
        """What is sent for a prompt: a stream with all that the server can tell of its tokens.

        Args:
            prompt: Text, or token ids where ``abilities.token_ids``.
            max_tokens: Longest output.
            exact: Ask for exactly so many tokens, by what the server has for it.
            priority: Sent where given; smaller goes first.
        """
        able = self.capabilities
        fields: dict[str, Any] = {"model": able.model, "max_tokens": max_tokens, "stream": True}
        fields |= prompted(prompt, able.api)
        if able.usage:
            fields["stream_options"] = {"include_usage": True}
            if able.usage_each:
                fields["stream_options"]["continuous_usage_stats"] = True
        if able.ids_each and not able.usage_each:
            fields["return_token_ids"] = True
        if exact and able.ignore_eos is not False:
            fields["ignore_eos"] = True
        if exact and able.min_tokens is not False:
            fields["min_tokens"] = max_tokens
        if priority is not None:
            fields["priority"] = priority
        return json.dumps(fields | dict(self.server.body)).encode()

    async def stream(
        self,
        body: bytes | dict[str, Any],
        *,
        sent: Callable[[float], None] | None = None,
        usage_each: bool | None = None,
        api: str | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of an answer as they come; the last ones hold usage and finish reason.

        Args:
            body: Of ``body``, or fields of one's own.
            sent: Called with the time (``perf_counter``) at which the request's headers went out.
            usage_each: Whether every piece tells the numbers so far; None: as probed.
            api: "completions" or "chat"; None: as probed.

        Raises:
            RequestError: It failed; pieces before that have been handed out.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        events = SseReader()
        reader = PieceReader(usage_each=self.capabilities.usage_each if usage_each is None else usage_each)
        with named():
            request = self._session.post(self._path(api), data=data, trace_request_ctx=sent)
            async with request as answer:
                await _require_stream(answer)
                while chunk := await answer.content.readany():
                    at_s = time.perf_counter()
                    for event in events.feed(chunk):
                        piece = reader.read(event, at_s)
                        if piece is not None:
                            yield piece
                    if reader.done:
                        await _drained(answer)
                        break
        if not reader.done:
            raise RequestError("closed early", "the stream ended without its [DONE]")

    async def send(self, fields: dict[str, Any], api: str = COMPLETIONS) -> tuple[str, Usage | None]:
        """Text and usage of an answer that comes whole; raises RequestError."""
        status, kind, body = await self.answer("POST", f"{self.server.root}{_PATHS[api]}", fields)
        if status != 200:
            raise RequestError(f"http {status}", told(body, kind))
        try:
            choice = body["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"].get("content")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestError("malformed", f"{error!r} in {str(body)[:200]}") from None
        return str(text or ""), usage_of(body)

    async def fetch(self, method: str, url: str, fields: Any = None) -> tuple[int, Any]:
        """Status and body of a request: JSON where it is, else text; raises RequestError."""
        status, _, body = await self.answer(method, url, fields)
        return status, body

    async def answer(self, method: str, url: str, fields: Any = None) -> tuple[int, str, Any]:
        """Status, content type and body of a request, as ``fetch``; raises RequestError."""
        data = None if fields is None else json.dumps(fields).encode()
        with named():
            async with self._session.request(method, url, data=data) as answer:
                text = await answer.text(errors="replace")
        try:
            return answer.status, answer.content_type, json.loads(text)
        except ValueError:
            return answer.status, answer.content_type, text

    async def tokenize(self, text: str) -> list[int] | None:
        """The token ids of a text by the server's own tokenizer; None where it has no door to it."""
        return await tokenize(self, text)

    def _path(self, api: str | None) -> str:
        return f"{self.server.root}{_PATHS[api or self.capabilities.api]}"


_PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}


def prompted(prompt: Prompt, api: str) -> dict[str, Any]:
    """The fields that hold a prompt."""
    if api == COMPLETIONS:
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    return {"messages": [{"role": "user", "content": prompt}]}


def _dispatch(aiohttp: Any) -> Any:
    """Hands the time at which a request's headers went out to whoever asked for it."""
    config = aiohttp.TraceConfig()

    async def on_sent(_session: Any, context: SimpleNamespace, _params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx(time.perf_counter())

    config.on_request_headers_sent.append(on_sent)
    return config


async def _drained(answer: Any) -> None:
    """Waits a little for the end of the body, without which the connection could not be used again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await answer.content.readany()


async def _require_stream(answer: Any) -> None:
    kind = answer.content_type
    if answer.status != 200:
        said = _error_text(await answer.content.read(2000), kind)
        raise RequestError(f"http {answer.status}", said, retry_after_s(answer.headers))
    if kind != "text/event-stream":
        came = _error_text(await answer.content.read(2000), kind)
        shown = came if came.startswith(kind) else kind
        raise RequestError("malformed", f"the answer must be a stream of events; it is {shown}")


def _error_text(data: bytes, kind: str) -> str:
    try:
        return told(json.loads(data), kind)
    except ValueError:
        return told(data.decode("utf-8", "replace"), kind)
