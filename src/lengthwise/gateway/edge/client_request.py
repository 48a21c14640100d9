"""Parse and check completion requests: JSON bodies and headers."""

from __future__ import annotations

import itertools
import random
import re
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.errors import Fault, invalid, quoted
from lengthwise.gateway.request import NO_PREFIX, Client, ClientRequest, PrefixHasher, PromptPrefix
from lengthwise.schema.workload import PER_BYTE, PER_DIGIT, PER_WORD, estimated_tokens

CHAT, COMPLETIONS = "chat", "completions"

Number = int | float | None  # a JSON number; JSON does not distinguish integers, so 1.0 is a valid 1


class Part(msgspec.Struct, gc=False):
    """A part of a message. Only its text is read."""

    type: str = ""
    text: str | None = None


_NOTHING = msgspec.Raw(b"")


class Message(msgspec.Struct, gc=False):
    """A message of a chat."""

    role: str
    content: str | list[str | Part] | None = None
    name: msgspec.Raw = _NOTHING
    tool_calls: msgspec.Raw = _NOTHING
    function_call: msgspec.Raw = _NOTHING
    reasoning: msgspec.Raw = _NOTHING
    reasoning_content: msgspec.Raw = _NOTHING

    def text(self) -> str:
        """Return the text of all parts."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join([part if isinstance(part, str) else part.text or "" for part in self.content])


class _EngineFields(msgspec.Struct, kw_only=True, gc=False):
    priority: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    data_parallel_rank: Any = None
    custom_logit_processor: Any = None


ENGINE_FIELDS: tuple[str, ...] = _EngineFields.__struct_fields__
"""Fields internal to engines, which a client must not set."""


class _Body(_EngineFields, kw_only=True, gc=False):
    model: str
    stream: bool | None = None
    n: Number = None
    max_tokens: Number = None
    stop: str | list[str] | None = None
    prompt_logprobs: Number = None
    user: str | None = None
    prompt_cache_key: str | None = None
    vllm_xargs: dict[str, Any] | None = None


class Chat(_Body, kw_only=True, gc=False):
    """Body of /v1/chat/completions."""

    messages: list[Message]
    tools: msgspec.Raw = _NOTHING
    functions: msgspec.Raw = _NOTHING
    documents: msgspec.Raw = _NOTHING
    chat_template: msgspec.Raw = _NOTHING
    chat_template_kwargs: msgspec.Raw = _NOTHING
    max_completion_tokens: Number = None
    logprobs: bool | None = None
    top_logprobs: Number = None


class Completion(_Body, kw_only=True, gc=False):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: msgspec.Raw = _NOTHING
    best_of: Number = None
    logprobs: Number = None


_CHATS: msgspec.json.Decoder[Chat] = msgspec.json.Decoder(Chat)
_COMPLETIONS: msgspec.json.Decoder[Completion] = msgspec.json.Decoder(Completion)


def _decode(decoder: msgspec.json.Decoder[Chat] | msgspec.json.Decoder[Completion], body: bytes) -> Chat | Completion:
    try:
        if not body.isascii():
            body.decode()
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").lstrip(".")
        raise invalid(path or None, f"{message} at {path}." if path else f"{message}.", "invalid_type") from None
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body must be UTF-8; byte {error.start} is not.", "invalid_utf8") from None
    except msgspec.DecodeError as error:
        raise invalid(None, f"The body must be valid JSON: {error}.", "invalid_json") from None
    except RecursionError:
        raise invalid(None, "The body is nested too deeply.", "too_deep") from None


_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_EXPONENT, _DIGITS = b"0e000", b"0" * 200


def _check_numbers(body: bytes, prompt: Any) -> None:
    """Raise Fault for a number beyond the range of a double. A list of token ids is parsed only if it may have one."""
    if isinstance(prompt, list):
        marks = body.translate(_ZEROS, b"+")
        if _EXPONENT not in marks and _DIGITS not in marks:
            return
    try:
        msgspec.json.decode(body)  # for a prompt that is text, this is faster than the search above
    except msgspec.DecodeError as error:
        reason = str(error).partition(" - at ")[0]
        raise invalid(None, f"The body must be valid JSON: {reason}.", "invalid_json") from None


MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_NAME = 256
MAX_CHOICES = 128  # outputs of one request, choices times prompts; an engine runs each as a sequence
HINTS = "lengthwise_"  # prefix of entries of vllm_xargs that carry hints to the scheduler plug-in


def _check(body: Chat | Completion, limits: Limits) -> tuple[int | None, int]:  # noqa: C901 - one check per field
    """Return ``max_tokens`` (None if not stated) and the number of outputs. Raises Fault for an invalid field."""
    if not 1 <= len(body.model) <= MAX_NAME:
        raise invalid("model", f"The model's name must have 1 to {MAX_NAME} characters; it has {len(body.model)}.")
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOPS:
        raise invalid("stop", f"There must be at most {MAX_STOPS} stop strings; there are {len(body.stop)}.")
    _integer("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS)
    for name in ENGINE_FIELDS:
        value = getattr(body, name)
        if value is not None and not (name == "priority" and type(value) in (int, float) and value == 0):
            raise invalid(name, f"The field {name!r} is not for clients; leave it out.", "field_not_allowed")
    hint = next((key for key in body.vllm_xargs if key.startswith(HINTS)), None) if body.vllm_xargs else None
    if hint is not None:
        message = f"Only the gateway may send {HINTS}... to an engine; leave it out."
        raise invalid(f"vllm_xargs.{hint}"[:MAX_NAME], message, "field_not_allowed")
    max_tokens, n = _integer("max_tokens", body.max_tokens, 1, limits.max_tokens), _integer("n", body.n, 1, limits.n)
    if isinstance(body, Chat):
        if not 1 <= len(body.messages) <= limits.messages:
            raise invalid("messages", f"There must be 1 to {limits.messages} messages; there are {len(body.messages)}.")
        _integer("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
        newer = _integer("max_completion_tokens", body.max_completion_tokens, 1, limits.max_tokens)
        return newer if newer is not None else max_tokens, n or 1
    _integer("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    prompts, best_of = 1, _integer("best_of", body.best_of, 1, limits.n)
    if not isinstance(body.prompt, str):
        kinds = set(map(type, body.prompt))
        if len(kinds) != 1 or (kinds == {list} and [] in body.prompt):
            message = "The prompt must be a text, texts, token ids, or lists of token ids; not mixed, not empty."
            raise invalid("prompt", message)
        prompts = 1 if kinds == {int} else len(body.prompt)
        if prompts > limits.messages:
            raise invalid("prompt", f"There must be at most {limits.messages} prompts; there are {prompts}.")
    choices = max(n or 1, best_of or 1) * prompts
    if choices > MAX_CHOICES:
        message = f"There must be at most {MAX_CHOICES} outputs, choices times prompts; there are {choices}."
        raise invalid("prompt", message)
    return max_tokens, choices


def _integer(name: str, value: Number, minimum: int, maximum: int) -> int | None:
    if value is not None and not (minimum <= value <= maximum and value == int(value)):
        raise invalid(name, f"{name} must be an integer from {minimum} to {maximum}; it is {str(value)[:40]}.")
    return None if value is None else int(value)


Headers = dict[bytes, bytes]  # by lower-case name
_KNOWN_HEADERS = frozenset({
    b"accept", b"authorization", b"content-encoding", b"content-length", b"content-type", b"traceparent",
    b"tracestate", b"x-request-id", b"x-request-timeout-s", b"x-session-id", b"x-stainless-read-timeout",
})  # fmt: skip
_IDENTIFIER = re.compile(rb"[A-Za-z0-9._:/=+\-]{1,128}\Z")
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_PRINTABLE = re.compile(rb"[\x20-\x7e]{1,512}\Z")
_FORWARDED = (
    (b"accept", "Accept", _PRINTABLE),
    (b"traceparent", "traceparent", _TRACE),
    (b"tracestate", "tracestate", _PRINTABLE),
    (b"x-session-id", "X-Session-Id", _IDENTIFIER),
)
"""Headers that the engine receives. None lets a client rank, route or authorize its own request."""
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?\Z")
_JSON_TYPE = re.compile(
    rb"application/(?:json|[a-z0-9.\-]+\+json)[ \t]*(?:;[ \t]*charset=\"?utf-?8\"?[ \t]*)?\Z", re.IGNORECASE
)
_PROCESS, _NUMBERS = secrets.token_hex(6), itertools.count(1)


def parse_headers(headers: list[tuple[bytes, bytes]], limits: Limits) -> Headers:
    """Return the known headers by name. Raises Fault for too many or too long headers (431), or repeated ones (400)."""
    if len(headers) > limits.headers:
        raise headers_too_large(f"There must be at most {limits.headers} header fields; there are {len(headers)}.")
    if sum([len(name) + len(value) + 4 for name, value in headers]) > limits.header_bytes:
        raise headers_too_large(f"The header fields must have at most {limits.header_bytes} bytes in all.")
    found: Headers = {}
    for name, value in [pair for pair in headers if pair[0] in _KNOWN_HEADERS]:
        if name in found and name != b"accept":
            raise Fault(400, "invalid", f"The header {name.decode()} must occur once.", code="duplicate_header")
        found[name] = value
    return found


def resolve_request_id(headers: Headers) -> str:
    """Return the client's X-Request-Id if it has 1 to 128 letters, digits and ._:/=+-, otherwise a new id."""
    given = headers.get(b"x-request-id")
    return given.decode() if given is not None and _IDENTIFIER.match(given) else f"req-{_PROCESS}-{next(_NUMBERS)}"


def check_json(headers: Headers) -> None:
    """Raise Fault (415) if the headers state a body that is compressed or not JSON."""
    kind = headers.get(b"content-type", b"application/json")
    if kind != b"application/json" and not _JSON_TYPE.match(kind):
        raise Fault(415, "media", "The content-type must be application/json.", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise Fault(415, "media", "The body must not be compressed.", code="unsupported_media_type")


def headers_too_large(message: str) -> Fault:
    """Return the Fault 431."""
    return Fault(431, "limit", message, code="headers_too_large", headers=[(b"connection", b"close")])


_SLICE, _ASCII_SLICE = 512, 1 << 14
_WORDS = bytes(ord("w") if chr(c).isalnum() or c == ord("_") else ord(" ") for c in range(128)) + bytes(128)
_PUNCTUATION = bytes(c for c in range(128) if not (chr(c).isalnum() or chr(c).isspace() or c == ord("_")))


def _prompt(body: Chat | Completion, hasher: PrefixHasher | None, tenant: int) -> tuple[str, int, PromptPrefix]:
    """Return the prompts' text ("" for token ids), number of tokens, and hashed prefix (NO_PREFIX for several)."""
    prompts: list[Any] = []
    if isinstance(body, Chat):
        prompts.append("\n\n".join([message.text() for message in body.messages]))
    elif isinstance(body.prompt, str) or isinstance(body.prompt[0], int):
        prompts.append(body.prompt)
    else:
        prompts += body.prompt
    is_text = isinstance(prompts[0], str)
    text = "\n\n".join(prompts) if is_text else ""
    tokens = estimate_prompt_tokens(text) if is_text else sum(map(len, prompts))
    if hasher is None or len(prompts) > 1:
        return text, tokens, NO_PREFIX
    if is_text:
        return text, tokens, hasher.of_text(text, tokens, model=body.model, tenant=tenant)
    return text, tokens, hasher.of_ids(prompts[0], model=body.model, tenant=tenant)


_FRAME_BYTES = 256  # a body with more bytes than this beside its text may contain other text


def _other_tokens(body: Chat | Completion) -> int:
    """Estimate the tokens of other fields that become part of the prompt, such as ``tools`` and ``suffix``."""
    if isinstance(body, Completion):
        raws = [body.suffix]
    else:
        raws = [body.tools, body.functions, body.documents, body.chat_template, body.chat_template_kwargs]
        for one in body.messages:
            raws += (one.name, one.tool_calls, one.function_call, one.reasoning, one.reasoning_content)
    other = b"".join([bytes(raw) for raw in raws if bytes(raw) != b"null"])
    return estimate_prompt_tokens(other.decode()) if other else 0


def estimate_prompt_tokens(text: str) -> int:
    """Estimate the number of tokens of a text.

    Of a long text only three slices are read (constant time), at random places, so that no client can blank them out.
    """
    size, count = (_ASCII_SLICE, ascii_tokens) if text.isascii() else (_SLICE, estimated_tokens)
    if len(text) <= 3 * size:
        return count(text)
    starts = [round((third + random.random()) * (len(text) / 3 - size)) + third * size for third in range(3)]  # noqa: S311
    slices = [text[start : start + size] for start in starts]
    return round(sum(map(count, slices)) * len(text) / (3 * size))


def ascii_tokens(text: str) -> int:
    """Return the result of ``estimated_tokens`` for an ASCII text, ten times as fast."""
    data = text.encode("ascii")
    marks = len(data) - len(data.translate(None, _PUNCTUATION))
    digits = len(data) - len(data.translate(None, b"0123456789"))
    words = data.translate(_WORDS)
    pieces = words.count(b" w") + words.startswith(b"w") + marks
    return max(1, round(PER_BYTE * len(data) + PER_WORD * pieces + PER_DIGIT * digits))


_NON_STRUCTURAL = bytes(set(range(256)) - set(b'"[]{},'))
_STEP = np.zeros(256, np.int32)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_CHUNK = 1 << 18
_OBJECTS, _TEXTS = 16, 32
"""Limits for each allowed message. A plain message has 1 object and 4 strings; one with a part and a tool call has 6
and 17 (lists count as objects)."""
_MIN_MESSAGES = 4096  # the limits for a body are those for one message, times the allowed messages or this, if larger


@dataclass(frozen=True, slots=True)
class BodyShape:
    """Limits on the form of a JSON body: the nesting depth, and the numbers of objects, strings and values."""

    levels: int  # nesting depth
    objects: int  # lists and objects
    texts: int  # all strings, also names of fields
    values: int  # commas between members, plus 1

    def exceeded(self, body: bytes) -> str:
        """Return the name of a limit that a body exceeds, or "" if it exceeds none. The counts assume valid JSON."""
        is_short = len(body) <= min(self.objects, self.texts, self.values)
        if is_short and body.count(b"[") + body.count(b"{") <= self.levels:
            return ""
        quotes = depth = objects = values = 0
        for marks in _structural_chunks(body):
            is_quote = marks == ord('"')
            inside = (np.cumsum(is_quote, dtype=np.int32) + (quotes & 1)) & 1
            step = np.where(inside, 0, _STEP[marks])
            level = depth + np.cumsum(step, dtype=np.int32)
            if level.max() > self.levels:
                return "levels"
            quotes, depth = quotes + int(np.count_nonzero(is_quote)), int(level[-1])
            objects += int(np.count_nonzero(step > 0))
            values += int(np.count_nonzero((marks == ord(",")) & (inside == 0)))
            if objects > self.objects:
                return "objects"
            if (quotes + 1) // 2 > self.texts:
                return "texts"
            if values + 1 > self.values:
                return "values"
        return ""


def _structural_chunks(body: bytes) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield all brackets, braces, commas and unescaped quotation marks of a body, in chunks."""
    at = 0
    while at < len(body):
        chunk = body[at : at + _CHUNK]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:  # the last backslash escapes the next byte
            chunk = body[at : at + len(chunk) + 1]
        at += len(chunk)
        marks = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NON_STRUCTURAL)
        if marks:
            yield np.frombuffer(marks, np.uint8)


_FIELDS = frozenset({
    "model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "max_tokens",
    "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs",
    "prompt_logprobs", "user", "prompt_cache_key", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format", "tools",
    "tool_choice", "functions", "function_call", "echo", "suffix", "ignore_eos", "structured_outputs",
    "use_beam_search", "return_token_ids", "continue_final_message", "add_generation_prompt", "vllm_xargs",
    *ENGINE_FIELDS,
})  # fmt: skip
MAX_FIELDS = 256  # fields at the top level of a body; engines know fewer than 100


class _Name:
    """The name of a field. Equal names are different dict keys, so that a decoded dict shows duplicates."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_NAMES = dict[_Name, msgspec.Raw]
_NAME_DECODER: msgspec.json.Decoder[dict[_Name, msgspec.Raw]]
_NAME_DECODER = msgspec.json.Decoder(_NAMES, dec_hook=lambda _, text: _Name(text))
"""Decoder of bodies that cannot have too many fields. A new decoder for each request would take 1.5 us."""


def _check_duplicates(body: bytes) -> None:
    """Raise Fault for too many fields, and for a known field that is repeated or in another case: parsers differ."""
    decoder, left = _NAME_DECODER, MAX_FIELDS
    if body.count(b":") > MAX_FIELDS:  # stop at the first field too many, before the rest is decoded

        def name_of(_: type, text: str) -> _Name:
            nonlocal left
            left -= 1
            if left < 0:
                raise invalid(None, f"The body must have at most {MAX_FIELDS} fields.", "too_many_fields")
            return _Name(text)

        decoder = msgspec.json.Decoder(_NAMES, dec_hook=name_of)
    seen = set()
    for name in decoder.decode(body):
        field = name.text.casefold()
        if field not in _FIELDS:
            continue
        if name.text != field:
            raise invalid(field, f"The field must be spelt {field!r}; it is {quoted(name.text)}.", "misspelt_field")
        if field in seen:
            raise invalid(field, f"The field {field!r} must occur once in the body, not twice.", "duplicate_field")
        seen.add(field)


_TEXT_BYTES, _VALUE_BYTES, _OBJECT_BYTES = 60, 40, 120
"""Overhead of a string, a member, and a list or object in CPython."""
_NON_DELIMITERS = bytes(set(range(256)) - set(b'",{['))
_ASTRAL = (b"\\ud", b"\\uD", *(bytes([first]) for first in range(0xF0, 0xF5)))
"""Starts of characters beyond U+FFFF, escaped or in UTF-8."""


def _memory_bytes(body: bytes, text: str) -> int:
    """Return an upper estimate of the memory of a body, its text and its fields. A character takes up to 4 bytes."""
    is_latin = body.isascii() and b"\\u" not in body
    width = 1 if is_latin else 4 if any(start in body for start in _ASTRAL) else 2
    # Counting in the delimiters alone is faster than in the complete body and text.
    marks = body.translate(None, _NON_DELIMITERS)
    in_text = text.encode(errors="surrogatepass").translate(None, _NON_DELIMITERS)
    texts = max(0, marks.count(b'"') - in_text.count(b'"')) // 2
    values = max(0, marks.count(b",") - in_text.count(b",")) + 1
    objects = max(0, marks.count(b"{") + marks.count(b"[") - in_text.count(b"{") - in_text.count(b"["))
    characters = max(0, len(body) - len(text)) * width
    parsed = characters + _TEXT_BYTES * texts + _VALUE_BYTES * values + _OBJECT_BYTES * objects
    return len(body) + 2 * sys.getsizeof(text) + parsed


class RequestParser:
    """Parses and checks requests. ``hasher`` hashes their prompts (None: no hashes), by tenant if ``by_tenant``."""

    def __init__(self, limits: Limits, hasher: PrefixHasher | None = None, *, by_tenant: bool = True) -> None:
        self._limits, self._hasher, self._by_tenant = limits, hasher, by_tenant
        messages = max(limits.messages, _MIN_MESSAGES)
        self._shape = BodyShape(limits.depth, _OBJECTS * messages, _TEXTS * messages, limits.values)

    def parse(
        self, api: str, body: bytes, caller: Caller, headers: Headers, request_id: str, now_s: float, address: str = ""
    ) -> ClientRequest:
        """Return the request in a body and its headers. Raises Fault if it is invalid or exceeds a limit."""
        limits = self._limits
        if (exceeded := self._shape.exceeded(body)) == "levels":
            raise invalid(None, f"The body must be nested at most {limits.depth} levels deep.", "too_deep")
        if exceeded:
            name = "lists and objects" if exceeded == "objects" else exceeded
            message = f"The body must contain at most {getattr(self._shape, exceeded)} {name}."
            raise invalid(None, message, "too_many_values")
        content = _decode(_CHATS, body) if api == CHAT else _decode(_COMPLETIONS, body)
        max_tokens, choices = _check(content, limits)
        text, tokens, prefix = _prompt(content, self._hasher, caller.tenant if self._by_tenant else 0)
        if len(body) - len(text) > _FRAME_BYTES:
            tokens += _other_tokens(content)
        _check_numbers(body, None if api == CHAT else content.prompt)  # type: ignore[union-attr]
        _check_duplicates(body)
        given = headers.get(b"x-session-id", b"")
        session = given.decode() if _IDENTIFIER.match(given) else (content.prompt_cache_key or content.user or "")[:128]
        timeout = headers.get(b"x-request-timeout-s") or headers.get(b"x-stainless-read-timeout") or b""
        forwarded = [("Content-Type", "application/json"), ("X-Request-Id", request_id)]
        for field, title, pattern in _FORWARDED:
            if (value := headers.get(field)) is not None and pattern.match(value):
                forwarded.append((title, value.decode()))
        deadline_s = now_s + float(timeout if _SECONDS.match(timeout) else "inf")
        priority = caller.key.priority if caller.key else 0
        return ClientRequest(
            api=api, body=body, model=content.model, stream=bool(content.stream), text=text, prompt_tokens=tokens,
            prefix=prefix, max_tokens=max_tokens, choices=choices, arrival_s=now_s, headers=forwarded,
            client=Client(caller.tenant, priority, session, address, deadline_s),
            memory_bytes=_memory_bytes(body, text),
        )  # fmt: skip
