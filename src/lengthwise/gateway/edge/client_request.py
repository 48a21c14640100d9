"""From a body and headers to what is asked for."""

from __future__ import annotations

import itertools
import re
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lengthwise.gateway.config import Key, Limits
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.errors import Fault, bad, shown
from lengthwise.gateway.request import EMPTY, PrefixHasher, PromptPrefix
from lengthwise.schema.workload import PER_BYTE, PER_DIGIT, PER_PIECE, estimated_tokens

CHAT, COMPLETIONS = "chat", "completions"


class ClientRequest(msgspec.Struct, kw_only=True, gc=False):
    """One request for a completion. Its body is as it came; what is read of it was checked.

    Attributes:
        api: CHAT or COMPLETIONS.
        body: JSON, untouched: an object, UTF-8, no field that is acted on stands twice.
        model: The name that was asked for.
        stream: Whether the answer is to come in events.
        text: The prompt as length predictors were trained on it: messages joined by blank lines.
        prompt_tokens: Estimated from the text, or the number of token ids.
        max_tokens: The longest output, where the client set one.
        n: Choices in all: ``n`` (or ``best_of``) for every prompt.
        key: Who asks; None where no keys are configured.
        tenant: Its number in ``keys.Tenants``; 0 is anonymous.
        priority: Class of the key; smaller goes first.
        session: What ties requests together, or "".
        leading: How its prompt begins, where that is compared.
        arrival_s: When the body had come, on the gateway's clock.
        deadline_s: When the client gives up, on the gateway's clock; inf unknown.
        request_id: What the client called it, or a new name.
        headers: What may go on to an engine.
        held_bytes: About what it holds in memory: body, text and fields; less once it has let go of them.
        address: Where it came from (of IPv6 the /64); "" nobody knows.
    """

    api: str
    body: bytes
    model: str
    stream: bool
    text: str
    prompt_tokens: int
    max_tokens: int | None
    n: int
    key: Key | None
    tenant: int
    priority: int
    session: str
    arrival_s: float
    deadline_s: float
    request_id: str
    headers: list[tuple[str, str]]
    memory_bytes: int = 0
    prefix: PromptPrefix = EMPTY
    parsed: dict[str, Any] | None = None
    address: str = ""

    def fields(self) -> dict[str, Any]:
        """The whole body as a dict, parsed when it is first asked for."""
        if self.parsed is None:
            self.parsed = msgspec.json.decode(self.body, type=dict[str, Any])
        return self.parsed

    def release(self, *, text: bool, others_bytes: int) -> None:
        """Forgets its body and fields: it is not sent anew.

        Args:
            text: Whether the text goes as well.
            others_bytes: What others hold for it from now on.
        """
        self.body, self.parsed = b"", None
        if text:
            self.text = ""
        self.memory_bytes = others_bytes + sys.getsizeof(self.text)


class ChunkWriter(Protocol):
    """Where pieces can go at once: a client's connection."""

    def can_write(self) -> bool:
        """Whether a further piece of the answer under way can be written now."""
        ...

    def write_chunk(self, piece: bytes) -> None:
        """Writes it; asked only where ``takes`` said so in the same moment."""
        ...


class Answer(Protocol):
    """An answer under way. ``aclose`` is called in any case, once it has ended or the client has gone."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """At least content-type; content-length where it is known."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def attach_writer(self, writer: ChunkWriter) -> None:
        """Further pieces may go there as they come, past who iterates; what it does not take is iterated over."""
        ...

    async def aclose(self) -> None:
        """Ends it, whatever is still to come."""
        ...


Exchange = Callable[[ClientRequest], Awaitable[Answer]]
"""Has a request answered. It is cancelled when the client goes while it waits; it may raise Fault, or any error
with a ``refusal``."""


Number = int | float | None
"""JSON knows no whole numbers: 1.0 is one as well."""
INNER = (
    "priority",
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "custom_logit_processor",
)
"""What engines take from those who run them, never from a client."""


class Part(msgspec.Struct, gc=False):
    """A piece of a message; only text is read."""

    type: str = ""
    text: str | None = None


class Message(msgspec.Struct, gc=False):
    """A turn."""

    role: str
    content: str | list[str | Part] | None = None


class _Both(msgspec.Struct, kw_only=True, gc=False):
    model: str
    stream: bool | None = None
    n: Number = None
    max_tokens: Number = None
    stop: str | list[str] | None = None
    prompt_logprobs: Number = None
    user: str | None = None
    prompt_cache_key: str | None = None
    priority: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    data_parallel_rank: Any = None
    custom_logit_processor: Any = None
    vllm_xargs: dict[str, Any] | None = None


class Chat(_Both, kw_only=True, gc=False):
    """Body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Number = None
    logprobs: bool | None = None
    top_logprobs: Number = None


class Completion(_Both, kw_only=True, gc=False):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    best_of: Number = None
    logprobs: Number = None


Body = TypeVar("Body", Chat, Completion)
CHATS: msgspec.json.Decoder[Chat] = msgspec.json.Decoder(Chat)
PROMPTS: msgspec.json.Decoder[Completion] = msgspec.json.Decoder(Completion)


def decoded(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """The fields of a body; raises a Fault that names the field that is wrong."""
    try:
        if not body.isascii():
            body.decode()
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$")
        raise bad(place.rstrip("`").lstrip(".") or None, f"{said}{_at(place)}.", "invalid_type") from None
    except UnicodeDecodeError as error:
        raise bad(None, f"The body must be UTF-8; byte {error.start} is not.", "invalid_utf8") from None
    except msgspec.DecodeError as error:
        raise bad(None, f"The body must be valid JSON: {error}.", "invalid_json") from None
    except RecursionError:
        raise bad(None, "The body is nested too deeply.", "too_deep") from None


def _at(place: str) -> str:
    return f" at {place.rstrip('`').lstrip('.')}" if place else ""


MOST_STOPS = 64
MOST_LOGPROBS = 20
MOST_NAME = 256
MOST_CHOICES = 128
"""Outputs of one request: choices times prompts. Each takes a seat of an engine."""
HINTS = "lengthwise_"
"""What vllm_xargs hold for the scheduler plug-in begins so."""
_NUMBERS = (int, float)
"""False is no number here."""


def check_chat(body: Chat, limits: Limits) -> tuple[int | None, int]:
    """The longest output and the choices asked for; raises a Fault where a limit is not kept."""
    _check_both(body)
    if not 1 <= len(body.messages) <= limits.messages:
        raise bad("messages", f"There must be 1 to {limits.messages} messages; there are {len(body.messages)}.")
    _complete("top_logprobs", body.top_logprobs, 0, MOST_LOGPROBS)
    longest = _complete("max_tokens", body.max_tokens, 1, limits.max_tokens)
    newer = _complete("max_completion_tokens", body.max_completion_tokens, 1, limits.max_tokens)
    return newer if newer is not None else longest, _complete("n", body.n, 1, limits.n) or 1


def check_completion(body: Completion, limits: Limits) -> tuple[int | None, int]:
    """The longest output and the choices asked for, over all prompts; raises a Fault where a limit is not kept."""
    _check_both(body)
    _complete("logprobs", body.logprobs, 0, MOST_LOGPROBS)
    longest = _complete("max_tokens", body.max_tokens, 1, limits.max_tokens)
    n, of = _complete("n", body.n, 1, limits.n) or 1, _complete("best_of", body.best_of, 1, limits.n) or 1
    choices = max(n, of) * _prompts(body.prompt, limits)
    if choices > MOST_CHOICES:
        raise bad("prompt", f"There may be {MOST_CHOICES} outputs, choices times prompts; there are {choices}.")
    return longest, choices


def _check_both(body: Chat | Completion) -> None:
    if not 1 <= len(body.model) <= MOST_NAME:
        raise bad("model", f"The model's name must have 1 to {MOST_NAME} letters; it has {len(body.model)}.")
    if isinstance(body.stop, list) and len(body.stop) > MOST_STOPS:
        raise bad("stop", f"There may be {MOST_STOPS} stop strings; there are {len(body.stop)}.")
    _complete("prompt_logprobs", body.prompt_logprobs, 0, MOST_LOGPROBS)
    for name in INNER:
        value = getattr(body, name)
        if value is not None and not (name == "priority" and type(value) in _NUMBERS and value == 0):
            raise bad(name, f"The field {name!r} is not for clients; leave it out.", "field_not_allowed")
    hint = next((key for key in body.vllm_xargs if key.startswith(HINTS)), None) if body.vllm_xargs else None
    if hint is not None:
        place = f"vllm_xargs.{hint}"[:MOST_NAME]
        raise bad(place, f"{HINTS}... is for the gateway to tell an engine; leave it out.", "field_not_allowed")


def _prompts(prompt: str | list[str | int | list[int]], limits: Limits) -> int:
    """How many prompts there are."""
    if isinstance(prompt, str):
        return 1
    kinds = set(map(type, prompt))
    if len(kinds) != 1 or (kinds == {list} and [] in prompt):
        raise bad("prompt", "The prompt must be a text, texts, token ids, or lists of token ids; not mixed, not empty.")
    if kinds == {int}:
        return 1
    if len(prompt) > limits.messages:
        raise bad("prompt", f"There may be {limits.messages} prompts; there are {len(prompt)}.")
    return len(prompt)


def _complete(name: str, value: Number, least: int, most: int) -> int | None:
    if value is None:
        return None
    if not (least <= value <= most and value == int(value)):
        raise bad(name, f"{name} must be a whole number from {least} to {most}; it is {str(value)[:40]}.")
    return int(value)


Raw = Iterable[tuple[bytes, bytes]]
_KNOWN_HEADERS = frozenset({
    b"accept", b"authorization", b"content-encoding", b"content-length", b"content-type", b"traceparent",
    b"tracestate", b"x-request-id", b"x-request-timeout-s", b"x-session-id", b"x-stainless-read-timeout",
})  # fmt: skip
_TOKEN = re.compile(rb"[A-Za-z0-9._:/=+\-]{1,128}\Z")
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_PRINTABLE = re.compile(rb"[\x20-\x7e]{1,512}\Z")
_FORWARDED = (
    (b"accept", "Accept", _PRINTABLE),
    (b"traceparent", "traceparent", _TRACE),
    (b"tracestate", "tracestate", _PRINTABLE),
    (b"x-session-id", "X-Session-Id", _TOKEN),
)
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?\Z")
_JSON_TYPE = re.compile(
    rb"application/(?:json|[a-z0-9.\-]+\+json)[ \t]*(?:;[ \t]*charset=\"?utf-?8\"?[ \t]*)?\Z", re.IGNORECASE
)
_START, _COUNT = secrets.token_hex(6), itertools.count(1)


def parse_headers(headers: list[tuple[bytes, bytes]], limits: Limits) -> dict[bytes, bytes]:
    """Those that the gateway knows, by name.

    Raises:
        Fault: 431, they are too many or too long; 400, one that may stand once stands twice.
    """
    if len(headers) > limits.headers:
        raise headers_too_large(f"There may be {limits.headers} header fields; there are {len(headers)}.")
    if sum([len(name) + len(value) + 4 for name, value in headers]) > limits.header_bytes:
        raise headers_too_large(f"The header fields may have {limits.header_bytes} bytes in all.")
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _KNOWN_HEADERS:
            if name in found and name != b"accept":
                raise Fault(400, "invalid", f"The header {name.decode()} must stand once.", code="duplicate_header")
            found[name] = value
    return found


def resolve_request_id(headers: dict[bytes, bytes]) -> str:
    """What the client calls the request, where that is short and plain; else a new name."""
    given = headers.get(b"x-request-id")
    if given is not None and _TOKEN.match(given):
        return given.decode()
    return f"req-{_START}-{next(_COUNT)}"


def forwarded_headers(headers: dict[bytes, bytes], name: str) -> list[tuple[str, str]]:
    """What goes on to an engine: nothing that would rank, route or pay."""
    on = [("Content-Type", "application/json"), ("X-Request-Id", name)]
    for field, title, form in _FORWARDED:
        value = headers.get(field)
        if value is not None and form.match(value):
            on.append((title, value.decode()))
    return on


def check_json(headers: dict[bytes, bytes]) -> None:
    """Raises a Fault if the body is not said to be plain JSON."""
    kind = headers.get(b"content-type", b"application/json")
    if kind != b"application/json" and not _JSON_TYPE.match(kind):
        raise Fault(415, "media", "The content-type must be application/json.", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise Fault(415, "media", "The body must not be compressed.", code="unsupported_media_type")


def session_id(headers: dict[bytes, bytes]) -> str:
    """The session that the client names, or ""."""
    given = headers.get(b"x-session-id", b"")
    return given.decode() if _TOKEN.match(given) else ""


def client_timeout_s(headers: dict[bytes, bytes]) -> float:
    """How long the client waits for an answer to begin; inf where it does not tell."""
    given = headers.get(b"x-request-timeout-s") or headers.get(b"x-stainless-read-timeout") or b""
    return float(given) if _SECONDS.match(given) else float("inf")


def headers_too_large(message: str) -> Fault:
    """431."""
    return Fault(431, "limit", message, code="headers_too_large", headers=[(b"connection", b"close")])


_SLICE, _ASCII_SLICE = 512, 1 << 14
_WORDS = bytes(ord("w") if chr(c).isalnum() or c == ord("_") else ord(" ") for c in range(128)) + bytes(128)
_PUNCTUATION = bytes(c for c in range(128) if not (chr(c).isalnum() or chr(c).isspace() or c == ord("_")))


def chat_text(body: Chat) -> str:
    """What is said in all messages, joined by blank lines: as training files of messages are read."""
    return "\n\n".join([_message(message) for message in body.messages])


def prompt_of(body: Completion) -> tuple[str, int]:
    """The text of all prompts and their tokens in all; token ids have no text."""
    if isinstance(body.prompt, str):
        return body.prompt, tokens_of(body.prompt)
    first = body.prompt[0]
    if isinstance(first, str):
        text = "\n\n".join([prompt for prompt in body.prompt if isinstance(prompt, str)])
        return text, tokens_of(text)
    if isinstance(first, int):
        return "", len(body.prompt)
    return "", sum([len(prompt) for prompt in body.prompt if isinstance(prompt, list)])


def leading_of(
    prefix_hasher: PrefixHasher, body: Chat | Completion, text: str, tokens: int, tenant: int
) -> PromptPrefix:
    """How the prompt begins; of several in one body nothing is said."""
    if isinstance(body, Chat) or isinstance(body.prompt, str):
        return prefix_hasher.of_text(text, tokens, model=body.model, tenant=tenant)
    only: object = body.prompt if isinstance(body.prompt[0], int) else body.prompt[0]
    if only is not body.prompt and len(body.prompt) > 1:
        return EMPTY
    if isinstance(only, list):
        return prefix_hasher.of_ids(only, model=body.model, tenant=tenant)
    return prefix_hasher.of_text(text, tokens, model=body.model, tenant=tenant)


def tokens_of(text: str) -> int:
    """Estimated tokens of a text; of a long one three slices are read, so that it takes no longer."""
    if text.isascii():
        return _sampled(text, _ASCII_SLICE, ascii_tokens)
    return _sampled(text, _SLICE, estimated_tokens)


def ascii_tokens(text: str) -> int:
    """What ``estimated_tokens`` says of an ASCII text, ten times as fast."""
    data = text.encode("ascii")
    marks = len(data) - len(data.translate(None, _PUNCTUATION))
    digits = len(data) - len(data.translate(None, b"0123456789"))
    words = data.translate(_WORDS)
    pieces = words.count(b" w") + words.startswith(b"w") + marks
    return max(1, round(PER_BYTE * len(data) + PER_PIECE * pieces + PER_DIGIT * digits))


def _sampled(text: str, size: int, count: Callable[[str], int]) -> int:
    if len(text) <= 3 * size:
        return count(text)
    middle = (len(text) - size) // 2
    slices = (text[:size], text[middle : middle + size], text[-size:])
    return round(sum(map(count, slices)) * len(text) / (3 * size))


def _message(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part if isinstance(part, str) else part.text or "" for part in content])


_STRUCTURAL = b'"[]{},'
_NON_STRUCTURAL = bytes(set(range(256)) - set(_STRUCTURAL))
_STEP = np.zeros(256, np.int32)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_PIECE = 1 << 18
_OBJECTS, _TEXTS = 16, 32
"""For each message that there may be; a message takes 1 object and 4 texts, with parts and calls three times that."""
_MESSAGES = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """The most that a body may be made of.

    Attributes:
        levels: Lists and objects in one another.
        objects: Lists and objects in all.
        texts: Texts in all, names of fields included.
        values: Members of lists and fields of objects in all.
    """

    levels: int
    objects: int
    texts: int
    values: int

    @staticmethod
    def of(limits: Limits) -> Shape:
        """By the limits."""
        return _shape(limits.depth, limits.messages, limits.values)


@lru_cache(8)
def _shape(depth: int, most_messages: int, values: int) -> Shape:
    messages = max(most_messages, _MESSAGES)
    return Shape(depth, _OBJECTS * messages, _TEXTS * messages, values)


def beyond(body: bytes, most: Shape) -> str:
    """Which of the most that there may be ("levels", ...) a body is beyond, "" none.

    Exact for every valid JSON; text that is none is refused by the decoder, which comes after.
    """
    is_short = len(body) <= min(most.objects, most.texts, most.values)
    if is_short and body.count(b"[") + body.count(b"{") <= most.levels:
        return ""
    quotes = depth = objects = values = 0
    for piece in _structural_chunks(body):
        is_quote = piece == ord('"')
        inside = (np.cumsum(is_quote, dtype=np.int32) + (quotes & 1)) & 1
        step = np.where(inside, 0, _STEP[piece])
        level = depth + np.cumsum(step, dtype=np.int32)
        if level.max() > most.levels:
            return "levels"
        quotes, depth = quotes + int(np.count_nonzero(is_quote)), int(level[-1])
        objects += int(np.count_nonzero(step > 0))
        values += int(np.count_nonzero((piece == ord(",")) & (inside == 0)))
        told = {"objects": objects, "texts": (quotes + 1) // 2, "values": values + 1}
        for name, count in told.items():
            if count > getattr(most, name):
                return name
    return ""


def _structural_chunks(body: bytes) -> Iterator[npt.NDArray[np.uint8]]:
    """All brackets, commas and quotation marks, those behind a backslash left out, some at a time."""
    at = 0
    while at < len(body):
        piece = body[at : at + _PIECE]
        slashes = len(piece) - len(piece.rstrip(b"\\"))
        if slashes % 2:  # what it stands before belongs to it
            piece = body[at : at + len(piece) + 1]
        at += len(piece)
        marks = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NON_STRUCTURAL)
        if marks:
            yield np.frombuffer(marks, np.uint8)


FIELDS = (
    "model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "max_tokens",
    "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs",
    "prompt_logprobs", "user", "prompt_cache_key", "priority", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format", "tools",
    "tool_choice", "functions", "function_call", "echo", "suffix", "ignore_eos", "structured_outputs",
    "use_beam_search", "return_token_ids", "continue_final_message", "add_generation_prompt",
    "kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "data_parallel_rank", "custom_logit_processor", "vllm_xargs",
)  # fmt: skip
_KNOWN = frozenset(FIELDS)
MOST = 256
"""Fields at the top of a body; all that engines know of are fewer than 100."""


class _Name:
    """A field's name, one object for each time that it stands there."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_NAMES = dict[_Name, msgspec.Raw]
_OF_FEW: msgspec.json.Decoder[dict[_Name, msgspec.Raw]]
_OF_FEW = msgspec.json.Decoder(_NAMES, dec_hook=lambda _, text: _Name(text))
"""For a body that cannot have too many: to make a decoder for each request would take 1.5 us."""


def _names(body: bytes) -> dict[_Name, msgspec.Raw]:
    """All names at the top; the decoder stops at the first one too many, so that no more are built than may be."""
    if body.count(b":") <= MOST:
        return _OF_FEW.decode(body)
    left = MOST

    def name(_: type, text: str) -> _Name:
        nonlocal left
        left -= 1
        if left < 0:
            raise bad(None, f"The body may have {MOST} fields.", "too_many_fields")
        return _Name(text)

    return msgspec.json.Decoder(_NAMES, dec_hook=name).decode(body)


def check_once(body: bytes) -> None:
    """Raises a Fault if a field stands twice at the top of valid JSON, or strangely spelt, or they are too many."""
    seen = set()
    for name in _names(body):
        field = name.text.casefold()
        if field not in _KNOWN:
            continue
        if name.text != field:
            raise bad(field, f"The field must be spelt {field!r}; it is {shown(name.text)}.", "misspelt_field")
        if field in seen:
            raise bad(field, f"The field {field!r} must stand once in the body; it stands twice.", "duplicate_field")
        seen.add(field)


_TEXT_BYTES, _VALUE_BYTES, _OBJECT_BYTES = 60, 40, 120
"""What a text, a member or field, and a list or object take beside their letters once parsed by CPython."""

_NON_DELIMITERS = bytes(set(range(256)) - set(b'",{['))
_OUT_OF_RANGE = (b"\\ud", b"\\uD", *(bytes([first]) for first in range(0xF0, 0xF5)))
"""What a letter beyond U+FFFF begins with, escaped or in UTF-8."""


def memory_bytes(body: bytes, text: str) -> int:
    """About what is held: the body, its prompt as text, and all of its fields parsed; rather too much than too little.

    A text with one letter beyond U+FFFF takes four bytes for each of its letters, with one beyond U+00FF two.

    Args:
        body: As it came.
        text: Its prompt, "" where it has none.
    """
    prompt = sys.getsizeof(text)
    others = max(0, len(body) - len(text)) * _max_width(body)
    marks, said = _delimiters(body), _delimiters(text.encode(errors="surrogatepass"))
    texts = max(0, marks.count(b'"') - said.count(b'"')) // 2
    values = max(0, marks.count(b",") - said.count(b",")) + 1
    objects = max(0, marks.count(b"{") + marks.count(b"[") - said.count(b"{") - said.count(b"["))
    parsed = prompt + others + _TEXT_BYTES * texts + _VALUE_BYTES * values + _OBJECT_BYTES * objects
    return len(body) + prompt + parsed


def _delimiters(letters: bytes) -> bytes:
    """Those that tell how much is parsed: to count them in here is faster than in the whole."""
    return letters.translate(None, _NON_DELIMITERS)


def _max_width(body: bytes) -> int:
    """Bytes that a letter of the body may take in a text."""
    if body.isascii() and (b"\\" not in body or b"\\u" not in body):
        return 1
    return 4 if any(mark in body for mark in _OUT_OF_RANGE) else 2


def asked(
    api: str,
    body: bytes,
    limits: Limits,
    caller: Caller,
    headers: dict[bytes, bytes],
    request_id: str,
    now_s: float,
    prefix_hasher: PrefixHasher | None = None,
    of_tenant: bool = True,
) -> ClientRequest:
    """What is asked for; raises a Fault where the body cannot be used or asks for too much.

    Args:
        api: CHAT or COMPLETIONS.
        body: As it came.
        limits: What may be asked for.
        caller: Who asks.
        headers: As they came, by name in lower case.
        request_id: What the request is called.
        now_s: When the body had come.
        prints: Of beginnings of prompts; None: they are not compared.
        of_tenant: Whether only with those of the same tenant.
    """
    _check_shape(body, limits)
    read: Chat | Completion
    if api == CHAT:
        read = talk = decoded(CHATS, body)
        longest, n = check_chat(talk, limits)
        text = chat_text(talk)
        tokens = tokens_of(text)
    else:
        read = prompt = decoded(PROMPTS, body)
        longest, n = check_completion(prompt, limits)
        text, tokens = prompt_of(prompt)
    check_once(body)
    prefix = EMPTY
    if prefix_hasher is not None:
        prefix = leading_of(prefix_hasher, read, text, tokens, caller.tenant if of_tenant else 0)
    return ClientRequest(
        api=api,
        body=body,
        model=read.model,
        stream=bool(read.stream),
        text=text,
        prompt_tokens=tokens,
        max_tokens=longest,
        n=n,
        key=caller.key,
        tenant=caller.tenant,
        priority=caller.key.priority if caller.key else 0,
        session=session_id(headers) or (read.prompt_cache_key or read.user or "")[:128],
        arrival_s=now_s,
        deadline_s=now_s + client_timeout_s(headers),
        request_id=request_id,
        headers=forwarded_headers(headers, request_id),
        memory_bytes=memory_bytes(body, text),
        prefix=prefix,
    )


def _check_shape(body: bytes, limits: Limits) -> None:
    most = Shape.of(limits)
    what = beyond(body, most)
    if what == "levels":
        raise bad(None, f"The body may be nested {limits.depth} levels deep.", "too_deep")
    if what:
        named = "lists and objects" if what == "objects" else what
        raise bad(None, f"The body may hold {getattr(most, what)} {named}.", "too_many_values")
