"""Types of an OpenAI-compatible server: its address, capabilities, and the events and chunks of its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from lengthwise.schema.errors import InputError, LengthwiseError

COMPLETIONS, CHAT = "completions", "chat"


class RequestError(LengthwiseError):
    """A failed request. ``detail`` is the message of the server or the system.

    The ``reason`` is "refused", "reset", "closed early", "no connection", "timed out", "stalled", "http 503", "server
    error" (inside the stream) or "malformed". ``retry_after_s`` is the time in the header Retry-After, or None.
    """

    def __init__(self, reason: str, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.retry_after_s = reason, detail, retry_after_s


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server, and the settings of requests to it."""

    url: str  # its address, with or without ``/v1`` at the end
    model: str | None = None  # None: the first that it lists
    api_key: str | None = field(default=None, repr=False)  # sent as a bearer token; never shown
    connect_s: float = 10.0
    stall_s: float = 120.0  # longest time without a byte of an answer, the wait for the first included
    timeout_s: float = 900.0  # time limit of a complete request
    body: Mapping[str, Any] = field(default_factory=dict)  # more fields of every request: ``{"temperature": 0}``

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise InputError(
                f"the address of a server must begin with http:// or https:// and name a host; it is {self.url!r}"
            )
        for name in ("connect_s", "stall_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0 seconds; it is {getattr(self, name)}")

    @property
    def root(self) -> str:
        """Return the address without ``/v1``, to which paths such as ``/metrics`` are appended."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def shown(self) -> str:
        """Return the address without a password."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a server. Unknown values are "" or None."""

    engine: str = ""  # "vllm", "sglang", "llama.cpp", "tgi" or "transformers"
    version: str = ""
    models: tuple[str, ...] = ()
    model: str = ""
    max_model_len: int | None = None  # longest prompt and output together
    api: str = COMPLETIONS  # "completions", or "chat" if only that works
    token_id_prompts: bool = False  # whether a prompt may be token ids
    usage: bool = False  # whether a stream ends in token counts
    usage_each: bool = False  # whether every chunk has token counts
    token_ids_each: bool = False  # whether every chunk has its token ids
    ignore_eos: bool | None = False  # whether the end can be ignored; None: accepted with unknown effect
    min_tokens: bool | None = False  # the same for the shortest output
    tokenizer: str = ""  # form of ``/tokenize``: "vllm", "llama.cpp" or "tgi"
    metrics: bool = False
    own_defaults: bool | None = None  # whether it may fill in penalties or a token limit


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts that a server reported."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of an answer."""

    at_s: float  # when its bytes had been read, on the clock of ``time.perf_counter``
    text: str  # may be empty while a character is incomplete
    tokens: int  # tokens that it adds; 0 if unknown: a chunk can hold many
    is_output: bool  # whether it is part of the output, not only a role, a usage or an end
    usage: Usage | None = None  # counts so far; the last one is the answer's
    finish_reason: str | None = None  # "stop", "length", ..., with the last chunk
    token_ids: tuple[int, ...] = ()  # tokens that it adds; () if unknown
    prompt_ids: tuple[int, ...] = ()  # tokens of the prompt, with the first chunk; () if unknown


MAX_BYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event: its data lines joined by newlines, its type ("message" by default) and its id."""

    data: str
    event: str = "message"
    id: str = ""


class SseReader:
    """Parses server-sent events, each as soon as its blank line has arrived.

    The HTML standard applies. Lines end in LF, CR LF or CR. A line that begins with a colon is a comment. Several data
    lines are one text. Invalid UTF-8 is replaced. An event that the end of the stream cuts off is dropped.
    ``max_bytes`` is the limit of a line, and of the data of an event.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._after_cr = self._started = False
        self._data: list[str] = []
        self._size, self._type, self._id = 0, "", ""

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that these bytes complete. Raises ValueError for an event above the limit."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        self._rest += chunk
        if len(self._rest) + self._size > self._max_bytes:
            raise ValueError(f"an event is longer than {self._max_bytes} bytes")
        if b"\n" not in chunk and b"\r" not in chunk:
            return []
        lines = bytes(self._rest).splitlines(keepends=True)
        self._rest = bytearray() if lines[-1].endswith((b"\n", b"\r")) else bytearray(lines.pop())
        self._after_cr = bool(lines) and not self._rest and lines[-1].endswith(b"\r")
        return [event for line in lines if (event := self._line(line.rstrip(b"\r\n"))) is not None]

    def _line(self, line: bytes) -> Event | None:
        if not self._started:
            line, self._started = line.removeprefix(_BOM), True
        if not line:
            data, kind = self._data, self._type or "message"
            self._data, self._type, self._size = [], "", 0
            return Event("\n".join(data), kind, self._id) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
            self._size += len(line)
        elif name == b"event":
            self._type = value.removeprefix(b" ").decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.removeprefix(b" ").decode("utf-8", "replace")
        return None


_SHOWN, _PAGE = 200, 80


class ChunkReader:
    """Parses the chunks of one answer, until ``done``. With ``usage_each``, every chunk has the token counts so far."""

    def __init__(self, *, usage_each: bool) -> None:
        self.done = False
        self._usage_each = usage_each
        self._tokens_so_far = 0

    def read(self, event: Event, at_s: float) -> Chunk | None:
        """Return the chunk in an event, or None at the end. Raises RequestError for an error or an invalid chunk."""
        if event.data == "[DONE]":
            self.done = True
            return None
        try:
            body = json.loads(event.data)
        except ValueError:
            raise RequestError("malformed", f"not JSON: {event.data[:_SHOWN]!r}") from None
        if not isinstance(body, dict):
            raise RequestError("malformed", f"not an object: {event.data[:_SHOWN]!r}")
        if event.event == "error" or body.get("error"):
            raise RequestError("server error", error_summary(body))
        try:
            return self._chunk(body, at_s)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestError("malformed", f"{error!r} in {event.data[:_SHOWN]!r}") from None

    def _chunk(self, body: dict[str, Any], at_s: float) -> Chunk:
        usage = usage_of(body)
        choices = body.get("choices") or ()
        if not choices:
            return Chunk(at_s, "", 0, is_output=False, usage=usage)
        choice = choices[0]
        text, shows = _text(choice)
        tokens = self._tokens(choice, usage)
        end = choice.get("finish_reason")
        is_output = bool(text) or tokens > 0 or (shows and end is None and usage is None)
        prompt = _ids(body.get("prompt_token_ids") or choice.get("prompt_token_ids"))
        return Chunk(at_s, text, tokens, is_output, usage, end, _ids(choice.get("token_ids")), prompt)

    def _tokens(self, choice: dict[str, Any], usage: Usage | None) -> int:
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self._tokens_so_far += len(ids)
            return len(ids)
        if usage is None or not self._usage_each:
            return 0
        new = usage.output_tokens - self._tokens_so_far
        self._tokens_so_far = usage.output_tokens
        return max(0, new)


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) and all(type(one) is int for one in value) else ()


def _text(choice: dict[str, Any]) -> tuple[str, bool]:
    """Return a choice's text, and whether an empty text may count as output.

    In chats it does not, because the first chunk has a role and no text.
    """
    if "delta" in choice:
        delta = choice["delta"] or {}
        parts = (delta.get(name) for name in ("reasoning_content", "reasoning", "content"))
        return "".join(part for part in parts if isinstance(part, str)), False
    text = choice["text"] or ""
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    return text, True


def usage_of(body: dict[str, Any]) -> Usage | None:
    """Return an answer's or chunk's token counts, or None without any. Raises RequestError if they are invalid."""
    usage = body.get("usage")
    if not usage:
        return None
    prompt, output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    if not all(isinstance(n, int) and n >= 0 for n in (prompt, output)):
        raise RequestError("malformed", f"usage must be whole numbers from 0; it is {usage!r}"[:_SHOWN])
    return Usage(prompt, output)


def error_summary(body: Any, kind: str = "") -> str:
    """Return the message in an error's body as a short line. ``kind`` is the content type, shown for plain text."""
    if isinstance(body, str) and body:
        limit = _PAGE if body.lstrip().startswith("<") else _SHOWN
        return f"{kind or 'text'} {' '.join(body.split())[:limit]!r}"
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:_SHOWN]
