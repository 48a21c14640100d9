"""Where an OpenAI-compatible server is, what it can do, and what it answers: plain records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from lengthwise.schema.errors import InputError, LengthwiseError

COMPLETIONS, CHAT = "completions", "chat"


class RequestError(LengthwiseError):
    """A request that failed.

    Attributes:
        reason: Of what, in a few words that repeat: "refused", "reset", "closed early", "no connection",
            "timed out", "stalled", "http 503", "server error" (told inside the stream), "malformed".
        detail: What the server or the system said.
        retry_after_s: When the server wants to be asked again, from now on; None: it did not say.
    """

    def __init__(self, reason: str, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.retry_after_s = reason, detail, retry_after_s


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server and how it is asked.

    Attributes:
        url: Its address, with or without ``/v1`` at the end.
        model: The model's name there; None: the first that it lists.
        api_key: Sent as a bearer token; never shown.
        connect_s: Longest time to be connected.
        stall_s: Longest time without a byte of an answer, the wait for the first included.
        timeout_s: Longest time of a whole request.
        body: Fields that every request has besides its own, such as ``{"temperature": 0}``.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    connect_s: float = 10.0
    stall_s: float = 120.0
    timeout_s: float = 900.0
    body: Mapping[str, Any] = field(default_factory=dict)

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
        """The address without ``/v1``: where ``/metrics`` and ``/tokenize`` are."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def shown(self) -> str:
        """The address without a password, for reports."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


@dataclass(frozen=True)
class Abilities:
    """What a server was found to do by asking it.

    Attributes:
        engine: "vllm", "sglang", "llama.cpp", "tgi", "transformers"; "" where it did not tell.
        version: Of the engine, "" where it did not tell.
        models: What it lists.
        model: The one that is asked for.
        max_model_len: Longest prompt and output together, where it tells.
        api: "completions", or "chat" where only that works.
        token_ids: Whether a prompt may be token ids, and is then as long as they are many.
        usage: Whether a stream ends in the numbers of tokens.
        usage_each: Whether every piece of a stream tells them.
        ids_each: Whether every piece tells its token ids.
        ignore_eos: Whether the end of text can be ignored; None: the field is taken, nobody knows how.
        min_tokens: Likewise for the shortest output.
        tokenizer: Whose form of ``/tokenize`` it has: "vllm", "llama.cpp", "tgi" or "".
        metrics: Whether it has ``/metrics``.
        own_defaults: Whether it may fill in penalties or a longest output that a request leaves out; None: nobody
            knows.
    """

    engine: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    model: str = ""
    max_model_len: int | None = None
    api: str = COMPLETIONS
    token_ids: bool = False
    usage: bool = False
    usage_each: bool = False
    ids_each: bool = False
    ignore_eos: bool | None = False
    min_tokens: bool | None = False
    tokenizer: str = ""
    metrics: bool = False
    own_defaults: bool | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a server says that there were."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    Attributes:
        at_s: When its bytes had been read, on the clock of ``time.perf_counter``.
        text: What it adds; may be empty where a token shows only with the next.
        tokens: How many tokens it adds; 0 where nobody tells: a piece can hold many.
        is_output: Whether it is a part of the output, not only a role, a usage or an end.
        usage: The numbers so far; the last one is the answer's.
        finish_reason: "stop", "length", ..., with the last piece.
        token_ids: The tokens that it adds, where the server tells them.
        prompt_ids: The prompt's tokens, where the server tells them (with the first piece).
    """

    at_s: float
    text: str
    tokens: int
    is_output: bool
    usage: Usage | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()


MAX_BYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its data lines joined by newlines, its type ("message" where none is given), its id."""

    data: str
    event: str = "message"
    id: str = ""


class SseReader:
    """Turns the bytes of a stream into events as soon as the blank line behind each has come.

    By the rules of the HTML standard: lines end in LF, CR LF or CR; a line that begins with a colon is a
    comment; several data lines are one text; what is not UTF-8 is replaced; an event that is cut off by the
    end of the stream is none. It knows nothing of what the events mean.

    Args:
        max_bytes: A line, or the data of an event, may not be longer.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._rest = bytearray()
        self._after_cr = False
        self._started = False
        self._data: list[str] = []
        self._size = 0
        self._type = self._id = ""
        self._most = max_bytes

    @property
    def unfinished(self) -> bool:
        """Whether bytes have come that make no whole event yet."""
        return bool(self._rest or self._data)

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that these bytes complete.

        Raises:
            ValueError: A line or an event is longer than ``most_bytes``.
        """
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        self._rest += chunk
        if len(self._rest) + self._size > self._most:
            raise ValueError(f"an event is longer than {self._most} bytes")
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
            return self._dispatched()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
            self._size += len(line)
        elif name == b"event":
            self._type = value.removeprefix(b" ").decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.removeprefix(b" ").decode("utf-8", "replace")
        return None

    def _dispatched(self) -> Event | None:
        data, kind = self._data, self._type or "message"
        self._data, self._type, self._size = [], "", 0
        return Event("\n".join(data), kind, self._id) if data else None


_SHOWN, _PAGE = 200, 80


class PieceReader:
    """Reads one answer: completions or chat, whatever is told of tokens.

    Args:
        usage_each: Whether every piece comes with the numbers so far; otherwise only the last does, and what
            it adds is no part of the last piece.

    Attributes:
        done: Whether the stream said that it is over.
    """

    def __init__(self, *, usage_each: bool) -> None:
        self.done = False
        self._usage_each = usage_each
        self._report = 0

    def read(self, event: Event, at_s: float) -> Piece | None:
        """What an event says; None where it only ends the stream.

        Raises:
            RequestError: It is not what a stream of completions holds, or it tells of an error.
        """
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
            raise RequestError("server error", told(body))
        try:
            return self._piece(body, at_s)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestError("malformed", f"{error!r} in {event.data[:_SHOWN]!r}") from None

    def _piece(self, body: dict[str, Any], at_s: float) -> Piece:
        usage = usage_of(body)
        choices = body.get("choices") or ()
        if not choices:
            return Piece(at_s, "", 0, is_output=False, usage=usage)
        choice = choices[0]
        text, shows = _text(choice)
        tokens = self._tokens(choice, usage)
        end = choice.get("finish_reason")
        is_output = bool(text) or tokens > 0 or (shows and end is None and usage is None)
        prompt = _ids(body.get("prompt_token_ids") or choice.get("prompt_token_ids"))
        return Piece(at_s, text, tokens, is_output, usage, end, _ids(choice.get("token_ids")), prompt)

    def _tokens(self, choice: dict[str, Any], usage: Usage | None) -> int:
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self._report += len(ids)
            return len(ids)
        if usage is None or not self._usage_each:
            return 0
        new = usage.output_tokens - self._report
        self._report = usage.output_tokens
        return max(0, new)


def _ids(report: Any) -> tuple[int, ...]:
    """Token ids where there are any."""
    return tuple(report) if isinstance(report, list) and all(type(one) is int for one in report) else ()


def _text(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text of a choice, and whether even an empty one stands for a token (a chat begins with a role)."""
    if "delta" in choice:
        delta = choice["delta"] or {}
        parts = (delta.get(name) for name in ("reasoning_content", "reasoning", "content"))
        return "".join(part for part in parts if isinstance(part, str)), False
    text = choice["text"] or ""
    if not isinstance(text, str):
        raise TypeError("a text that is none")
    return text, True


def usage_of(body: dict[str, Any]) -> Usage | None:
    """The numbers of tokens in an answer or a chunk; None where there are none.

    Raises:
        RequestError: They are no whole numbers from 0.
    """
    usage = body.get("usage")
    if not usage:
        return None
    prompt, output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    prompt, output = prompt or 0, output or 0
    if not all(isinstance(n, int) and n >= 0 for n in (prompt, output)):
        raise RequestError("malformed", f"usage must be whole numbers from 0; it is {usage!r}"[:_SHOWN])
    return Usage(prompt, output)


def told(body: Any, kind: str = "") -> str:
    """What an error's body says, in one short line; what is no JSON by its kind and its beginning (less of a page)."""
    if isinstance(body, str) and body:
        most = _PAGE if body.lstrip().startswith("<") else _SHOWN
        return f"{kind or 'text'} {' '.join(body.split())[:most]!r}"
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:_SHOWN]
