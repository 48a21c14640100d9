"""Client of OpenAI-compatible servers that records when each chunk of an answer arrives.

For vLLM, SGLang, llama.cpp, TGI and ``transformers serve``. ``Client.probe`` sends requests to find a server's
capabilities; none is assumed. Token counts come from the server's usage or token ids, never from the number of
chunks: one chunk can carry many tokens.
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
    Capabilities,
    Chunk,
    ChunkReader,
    RequestError,
    Server,
    SseReader,
    Usage,
    error_summary,
    usage_of,
)
from lengthwise.schema.errors import InputError, MissingExtraError

_SAMPLE = "one two three"
_PROMPT = "one two three four"
_PROMPT_IDS = (301, 302, 303, 304, 305, 306, 307)
_PROBE_TOKENS = 3
_METRICS_PREFIXES = {"vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llama.cpp", "tgi_": "tgi"}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_INVALID = "neither"  # a value that a server which knows the field must refuse


def aiohttp_module() -> Any:
    """Return the module aiohttp. Raises MissingExtraError if it is not installed."""
    try:
        import aiohttp
    except ImportError as error:
        raise MissingExtraError("asking a server", "bench") from error
    return aiohttp


@contextmanager
def request_errors() -> Iterator[None]:  # noqa: C901 - one branch for each kind of error
    """Within the block, raise errors of the network as RequestErrors."""
    aiohttp = aiohttp_module()
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise RequestError("no connection", "not within the time for it") from error
    except aiohttp.SocketTimeoutError as error:
        raise RequestError("stalled", "no byte for the longest time allowed") from error
    except TimeoutError as error:
        raise RequestError("timed out", "the request took longer than allowed") from error
    except aiohttp.ClientConnectorError as error:
        where = f"{error.host}:{error.port}"  # the error's own text would show all addresses of the host
        if isinstance(error.os_error, ConnectionRefusedError):
            raise RequestError("refused", f"no server listens at {where}") from error
        raise RequestError("no connection", f"{where}: {error.os_error.strerror or error.os_error}") from error
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
    """Return the seconds to wait by the header Retry-After (a number or a date), or None if the header is invalid."""
    text = headers.get("Retry-After", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            wait = parsedate_to_datetime(text) - parsedate_to_datetime(headers.get("Date", ""))
        except (TypeError, ValueError):
            return None
        seconds = wait.total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


async def _identity(client: Client, entry: dict[str, Any], metrics: Any) -> tuple[str, str]:
    """Return the name and version of the server's engine, which each engine reports at a different path."""
    kind = _OWNERS.get(str(entry.get("owned_by", "")).lower(), "")
    if not kind and isinstance(metrics, str):
        kind = next((name for prefix, name in _METRICS_PREFIXES.items() if f"\n{prefix}" in f"\n{metrics}"), "")
    body = await client.fetch_if_ok("/version")
    version = str(body["version"]) if isinstance(body, dict) and "version" in body else ""
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
        body = await client.fetch_if_ok(path)
        if isinstance(body, dict) and isinstance(body.get(key), str):
            kind, version = name, body[key]
    return kind, version


async def _stream(client: Client, fields: dict[str, Any]) -> list[Chunk]:
    able = client.capabilities
    body = {"model": able.model, "max_tokens": _PROBE_TOKENS, "stream": True, **prompt_fields(_PROMPT, able.api)}
    sent = body | dict(client.server.body) | fields
    return [chunk async for chunk in client.stream(sent, usage_each="stream_options" in fields)]


async def _reports_usage(client: Client) -> bool:
    with contextlib.suppress(RequestError):
        chunks = await _stream(client, {"stream_options": {"include_usage": True}})
        last = next((chunk.usage for chunk in reversed(chunks) if chunk.usage is not None), None)
        return last is not None and 0 < last.output_tokens <= _PROBE_TOKENS and last.prompt_tokens > 0
    return False


async def _reports_each(client: Client, fields: dict[str, Any]) -> bool:
    with contextlib.suppress(RequestError):
        counts = [chunk.tokens for chunk in await _stream(client, fields) if chunk.is_output or chunk.text]
        return bool(counts) and all(tokens > 0 for tokens in counts) and sum(counts) <= _PROBE_TOKENS
    return False


async def _knows(client: Client, valid: dict[str, Any], invalid: dict[str, Any]) -> bool | None:
    """Return whether the server knows a field of requests.

    The result is False if the server refuses the valid value, True if it refuses only the invalid one, else None.
    """
    accepted = []
    for fields in (valid, invalid):
        try:
            await _stream(client, fields)
        except RequestError as error:
            if not (error.reason.startswith("http 4") or error.reason == "malformed"):
                raise InputError(f"{client.server.shown} failed while it was probed: {error}") from error
            break
        accepted.append(fields)
    return {0: False, 1: True, 2: None}[len(accepted)]


_DRAIN_S = 0.5
_PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
Prompt = str | Sequence[int]
IDLE_S = 2.0  # below servers' keep-alive (uvicorn: 5 s), so that none closes a connection in reuse


class Client:
    """Client of a server, for ``async with``. Each running request has its own connection. Needs aiohttp."""

    def __init__(self, server: Server, capabilities: Capabilities | None = None) -> None:
        self.server = server
        self.capabilities = capabilities or Capabilities(model=server.model or "")
        self._aiohttp = aiohttp_module()
        self._session: Any = None

    async def __aenter__(self) -> Self:
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.server.api_key:
            headers["Authorization"] = f"Bearer {self.server.api_key}"
        server, aiohttp = self.server, self._aiohttp
        trace = aiohttp.TraceConfig()

        async def on_sent(_session: Any, context: SimpleNamespace, _params: Any) -> None:
            if context.trace_request_ctx is not None:
                context.trace_request_ctx(time.perf_counter())

        trace.on_request_headers_sent.append(on_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(
                total=server.timeout_s, sock_connect=server.connect_s, sock_read=server.stall_s
            ),
            headers=headers,
            trace_configs=[trace],
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def probe(self) -> Capabilities:
        """Find the server's capabilities with test requests. Raises InputError if the server completes no prompt."""
        found = await self.identify()
        reasons = []
        for api in (COMPLETIONS, CHAT):
            self.capabilities = Capabilities(model=found.model, api=api)
            try:
                await _stream(self, {})
                break
            except RequestError as error:
                reasons.append(f"{api}: {error}")
        else:
            raise InputError(f"{self.server.shown} completes no prompt of {found.model!r}: {'; '.join(reasons)}")
        self.capabilities = found = replace(found, api=api)
        usage, token_ids, tokenizer = await _reports_usage(self), False, ""
        each = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if api == COMPLETIONS:
            with contextlib.suppress(RequestError):
                _, counted = await self.send({"model": found.model, "max_tokens": 1, "prompt": list(_PROMPT_IDS)})
                token_ids = counted is not None and counted.prompt_tokens == len(_PROMPT_IDS)
        for form in ("vllm", "llama.cpp", "tgi"):
            if await self.tokenize(_SAMPLE, form):
                tokenizer = form
                break
        self.capabilities = replace(
            found,
            usage=usage,
            usage_each=usage and await _reports_each(self, each),
            token_ids_each=api == COMPLETIONS and await _reports_each(self, {"return_token_ids": True}),
            token_id_prompts=token_ids,
            ignore_eos=await _knows(self, {"ignore_eos": True}, {"ignore_eos": _INVALID}),
            min_tokens=await _knows(self, {"min_tokens": _PROBE_TOKENS}, {"min_tokens": _INVALID}),
            tokenizer=tokenizer,
        )
        return self.capabilities

    async def identify(self) -> Capabilities:
        """Return engine, version and models without generating. Raises InputError if the server lists no models."""
        shown = self.server.shown
        try:
            status, kind, body = await self.request("GET", f"{self.server.root}/v1/models")
        except RequestError as error:
            if error.reason == "refused":
                raise InputError(f"no server listens at {shown}; is it up?") from error
            raise InputError(f"no server answers at {shown}: {error}; start it, or check the address") from error
        if status in {401, 403}:
            raise InputError(f"{shown} refuses the API key (http {status}); give the right one")
        rows = body.get("data") if status == 200 and isinstance(body, dict) else None
        entries = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        names = tuple(str(row["id"]) for row in entries if "id" in row)
        model = self.server.model or (names[0] if names else "")
        if not model:
            raise InputError(
                f"{shown} lists no models (/v1/models: http {status}, {error_summary(body, kind)}); check that it is "
                "an OpenAI-compatible server, or name the model to ask for"
            )
        if names and model not in names:
            raise InputError(f"{shown} has no model {model!r}; it lists {', '.join(names[:8])}")
        entry = next((row for row in entries if row.get("id") == model), {})
        longest = entry.get("max_model_len")
        metrics = await self.fetch_if_ok("/metrics")
        engine, version = await _identity(self, entry, metrics)
        return Capabilities(
            engine=engine,
            version=version,
            models=names,
            model=model,
            max_model_len=longest if isinstance(longest, int) else None,
            metrics=isinstance(metrics, str) and "# TYPE" in metrics,
        )

    def body(self, prompt: Prompt, max_tokens: int | None, *, exact: bool = True, priority: int | None = None) -> bytes:
        """Return the body of a streaming request with all token counts that the server can report.

        The prompt is text, or token ids if ``capabilities.token_id_prompts`` is true. ``exact`` requests exactly
        ``max_tokens``, with the fields that the server knows; None sets no limit. A smaller ``priority`` is scheduled
        first.
        """
        able = self.capabilities
        fields: dict[str, Any] = {"model": able.model, "stream": True}
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        fields |= prompt_fields(prompt, able.api)
        if able.usage:
            fields["stream_options"] = {"include_usage": True}
            if able.usage_each:
                fields["stream_options"]["continuous_usage_stats"] = True
        if able.token_ids_each and not able.usage_each:
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
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of an answer as they arrive. The last ones have usage and finish reason.

        ``sent`` is called with the time (``perf_counter``) at which the request's headers were sent. ``usage_each``
        states whether every chunk has the token counts so far, and ``api`` which API is called. If None, both are as
        the probe found. Raises RequestError if the request fails, after earlier chunks were yielded.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.server.root}{_PATHS[api or self.capabilities.api]}"
        events = SseReader()
        reader = ChunkReader(usage_each=self.capabilities.usage_each if usage_each is None else usage_each)
        with request_errors():
            async with self._session.post(url, data=data, trace_request_ctx=sent) as answer:
                await _require_stream(answer)
                while data := await answer.content.readany():
                    at_s = time.perf_counter()
                    for event in events.feed(data):
                        chunk = reader.read(event, at_s)
                        if chunk is not None:
                            yield chunk
                    if reader.done:
                        # Until the body has ended, the connection cannot be used again.
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(_DRAIN_S):
                                await answer.content.readany()
                        break
        if not reader.done:
            raise RequestError("closed early", "the stream ended without its [DONE]")

    async def send(self, fields: dict[str, Any], api: str = COMPLETIONS) -> tuple[str, Usage | None]:
        """Send a request without streaming. Return the answer's text and usage. Raises RequestError if it fails."""
        status, kind, body = await self.request("POST", f"{self.server.root}{_PATHS[api]}", fields)
        if status != 200:
            raise RequestError(f"http {status}", error_summary(body, kind))
        try:
            choice = body["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"].get("content")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestError("malformed", f"{error!r} in {str(body)[:200]}") from None
        return str(text or ""), usage_of(body)

    async def fetch_if_ok(self, path: str) -> Any:
        """Return the body at a path as JSON or else text, or None if the request fails or the status is not 200."""
        with contextlib.suppress(RequestError):
            status, _, body = await self.request("GET", self.server.root + path)
            return body if status == 200 else None
        return None

    async def request(self, method: str, url: str, fields: Any = None) -> tuple[int, str, Any]:
        """Send a request. Return status, content type, and the body as JSON or else text. Raises RequestError."""
        data = None if fields is None else json.dumps(fields).encode()
        with request_errors():
            async with self._session.request(method, url, data=data) as answer:
                text = await answer.text(errors="replace")
        try:
            return answer.status, answer.content_type, json.loads(text)
        except ValueError:
            return answer.status, answer.content_type, text

    async def tokenize(self, text: str, form: str | None = None) -> list[int] | None:
        """Return the token ids of a text, or None if that fails. ``form`` is the engine whose ``/tokenize`` is used."""
        forms: dict[str, dict[str, Any]] = {
            "vllm": {"model": self.capabilities.model, "prompt": text, "add_special_tokens": False},
            "llama.cpp": {"content": text, "add_special": False},
            "tgi": {"inputs": text, "add_special_tokens": False},
        }
        fields = forms.get(self.capabilities.tokenizer if form is None else form)
        if fields is None:
            return None
        try:
            status, _, body = await self.request("POST", f"{self.server.root}/tokenize", fields)
        except RequestError:
            return None
        rows = body.get("tokens") if isinstance(body, dict) else body
        if status != 200 or not isinstance(rows, list):
            return None
        ids = [row.get("id") if isinstance(row, dict) else row for row in rows]
        numbers = [i for i in ids if isinstance(i, int)]
        return numbers if numbers and len(numbers) == len(ids) else None


def prompt_fields(prompt: Prompt, api: str) -> dict[str, Any]:
    """Return the fields of a request that contain the prompt, as this API names them."""
    if api == COMPLETIONS:
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    return {"messages": [{"role": "user", "content": prompt}]}


async def _require_stream(answer: Any) -> None:
    kind = answer.content_type
    if answer.status == 200 and kind == "text/event-stream":
        return
    data = await answer.content.read(2000)
    try:
        text = error_summary(json.loads(data), kind)
    except ValueError:
        text = error_summary(data.decode("utf-8", "replace"), kind)
    if answer.status != 200:
        raise RequestError(f"http {answer.status}", text, retry_after_s(answer.headers))
    shown = text if text.startswith(kind) else kind
    raise RequestError("malformed", f"the answer must be a stream of events; it is {shown}")
