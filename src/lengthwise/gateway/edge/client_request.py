"""Parse and check requests for engines: JSON bodies, forms and headers."""

from __future__ import annotations

import itertools
import math
import random
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lengthwise.gateway.apis import APIS, ENGINE_FIELDS, Api, Body, Chat, Completion, Messages, Number, Responses
from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.errors import Fault, invalid, quoted
from lengthwise.gateway.edge.media_urls import MediaUrls
from lengthwise.gateway.request import NO_PREFIX, Client, ClientRequest, PrefixHasher, PromptPrefix, SloClass
from lengthwise.schema.workload import PER_BYTE, PER_DIGIT, PER_WORD, estimated_tokens

T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the decoded body. Raises Fault (400), which names the first invalid field."""
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


_DECODERS = {one.body: msgspec.json.Decoder(one.body) for one in APIS.values()}


# With every digit as 0, only a number with an exponent of three digits, or with 200 digits, can exceed a double.
_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_EXPONENT, _DIGITS = b"0e000", b"0" * 200


def _check_numbers(body: bytes, prompt: Any) -> Any:
    """Return the decoded body. Raises Fault for a number beyond the range of a double.

    A list of token ids is decoded only if it may have such a number; otherwise the result is None.
    """
    if isinstance(prompt, list):
        marks = body.translate(_ZEROS, b"+")
        if _EXPONENT not in marks and _DIGITS not in marks:
            return None
    try:
        return msgspec.json.decode(body)  # for a prompt that is text, this is faster than the search above
    except msgspec.DecodeError as error:
        reason = str(error).partition(" - at ")[0]
        raise invalid(None, f"The body must be valid JSON: {reason}.", "invalid_json") from None


MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_NAME = 256
MAX_CHOICES = 128  # outputs of one request, choices times prompts; an engine runs each as a sequence
HINTS = "lengthwise_"  # prefix of entries of vllm_xargs that carry hints to the scheduler plug-in


def _check(body: Body, limits: Limits) -> tuple[int | None, int]:
    """Return the maximum output (None if not stated) and the number of outputs. Raises Fault for an invalid field."""
    if not 1 <= len(body.model) <= MAX_NAME:
        raise invalid("model", f"The model's name must have 1 to {MAX_NAME} characters; it has {len(body.model)}.")
    for name in ("stop", "stop_sequences"):
        if isinstance(stops := getattr(body, name, None), list) and len(stops) > MAX_STOPS:
            raise invalid(name, f"There must be at most {MAX_STOPS} stop strings; there are {len(stops)}.")
    _check_engine_fields(body)
    for name in body.logprobs_fields:
        _integer(name, getattr(body, name), 0, MAX_LOGPROBS)
    max_tokens = None
    for name in body.caps[::-1]:
        max_tokens = _integer(name, getattr(body, name), 1, limits.max_tokens) or max_tokens
    n = 1 if (given := getattr(body, "n", None)) is None else _integer("n", given, 1, limits.n) or 1
    if isinstance(body, (Chat, Messages)) and not 1 <= len(body.messages) <= limits.messages:
        raise invalid("messages", f"There must be 1 to {limits.messages} messages; there are {len(body.messages)}.")
    if isinstance(body, Responses) and body.background:
        message = "A response in the background would bypass the queue; leave the field 'background' out."
        raise invalid("background", message, "field_not_allowed")
    return max_tokens, _num_outputs(body, limits, n) if isinstance(body, Completion) else n


def _check_engine_fields(body: Body) -> None:
    for name in ENGINE_FIELDS:
        value = getattr(body, name)
        if value is not None and not (name == "priority" and type(value) in (int, float) and value == 0):
            raise _not_for_clients(name)
    hint = next((key for key in body.vllm_xargs if key.startswith(HINTS)), None) if body.vllm_xargs else None
    if hint is not None:
        message = f"Only the gateway may send {HINTS}... to an engine; leave it out."
        raise invalid(f"vllm_xargs.{hint}"[:MAX_NAME], message, "field_not_allowed")


def _not_for_clients(name: str) -> Fault:
    return invalid(name, f"The field {name!r} is not for clients; leave it out.", "field_not_allowed")


def _num_outputs(body: Completion, limits: Limits, n: int) -> int:
    prompts, best_of = 1, _integer("best_of", body.best_of, 1, limits.n)
    if not isinstance(body.prompt, str):
        kinds = set(map(type, body.prompt))
        if len(kinds) != 1 or (kinds == {list} and [] in body.prompt):
            message = "The prompt must be a text, texts, token ids, or lists of token ids; not mixed, not empty."
            raise invalid("prompt", message)
        prompts = 1 if kinds == {int} else len(body.prompt)
        if prompts > limits.messages:
            raise invalid("prompt", f"There must be at most {limits.messages} prompts; there are {prompts}.")
    choices = max(n, best_of or 1) * prompts
    if choices > MAX_CHOICES:
        message = f"There must be at most {MAX_CHOICES} outputs, choices times prompts; there are {choices}."
        raise invalid("prompt", message)
    return choices


def _integer(name: str, value: Number, minimum: int, maximum: int) -> int | None:
    if value is not None and not (minimum <= value <= maximum and value == int(value)):
        raise invalid(name, f"{name} must be an integer from {minimum} to {maximum}; it is {str(value)[:40]}.")
    return None if value is None else int(value)


Headers = dict[bytes, bytes]  # by lower-case name
_KNOWN_HEADERS = frozenset({
    b"accept", b"authorization", b"content-encoding", b"content-length", b"content-type", b"traceparent",
    b"tracestate", b"x-api-key", b"x-request-id", b"x-request-timeout-s", b"x-session-id", b"x-slo-class",
    b"x-stainless-read-timeout",
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
_FORM_TYPE = re.compile(
    rb"multipart/form-data[ \t]*;[ \t]*boundary=(\"?)([A-Za-z0-9'()+_,./:=?\-]{1,70})\1\Z", re.IGNORECASE
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


def check_media_type(api: Api, headers: Headers) -> None:
    """Raise Fault (415) if the headers state a body that is compressed or not of the route's media type."""
    kind = headers.get(b"content-type", b"" if api.is_form else b"application/json")
    if api.is_form and not _FORM_TYPE.match(kind):
        message = "The content-type must be multipart/form-data with a boundary."
        raise Fault(415, "media", message, code="unsupported_media_type")
    if not api.is_form and kind != b"application/json" and not _JSON_TYPE.match(kind):
        message = f"The header Content-Type must be application/json; it is {quoted(kind.decode('latin-1'))}."
        raise Fault(415, "media", message, code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise Fault(415, "media", "The body must not be compressed.", code="unsupported_media_type")


def headers_too_large(message: str) -> Fault:
    """Return the Fault 431."""
    return Fault(431, "limit", message, code="headers_too_large", headers=[(b"connection", b"close")])


_SLICE, _ASCII_SLICE = 512, 1 << 14
_WORDS = bytes(ord("w") if chr(c).isalnum() or c == ord("_") else ord(" ") for c in range(128)) + bytes(128)
_PUNCTUATION = bytes(c for c in range(128) if not (chr(c).isalnum() or chr(c).isspace() or c == ord("_")))


def _prompt(body: Body, hasher: PrefixHasher | None, tenant: int) -> tuple[str, int, PromptPrefix]:
    """Return the prompts' text ("" for token ids), number of tokens, and hashed prefix (NO_PREFIX for several)."""
    prompts = body.prompts()
    texts = [one for one in prompts if isinstance(one, str)]
    text = "\n\n".join(texts)
    tokens = estimate_prompt_tokens(text) if texts else 0
    tokens += sum([len(one) for one in prompts if not isinstance(one, str)])
    if hasher is None or len(prompts) != 1:
        return text, tokens, NO_PREFIX
    if texts:
        return text, tokens, hasher.of_text(text, tokens, model=body.model, tenant=tenant)
    return text, tokens, hasher.of_ids(prompts[0], model=body.model, tenant=tenant)


_FRAME_BYTES = 256  # a body with more bytes than this beside its text may contain other text


def _other_tokens(body: Body) -> int:
    """Estimate the tokens of other fields that become part of the prompt, such as ``tools`` and ``suffix``."""
    other = b"".join([bytes(raw) for raw in body.others() if bytes(raw) != b"null"])
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
    "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "top_logprobs",
    "prompt_logprobs", "user", "prompt_cache_key", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format", "tools",
    "tool_choice", "functions", "function_call", "echo", "suffix", "ignore_eos", "structured_outputs",
    "use_beam_search", "return_token_ids", "continue_final_message", "add_generation_prompt", "vllm_xargs", "logprobs",
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


_FIELDS_OF = {one.body: _FIELDS.union(one.body.__struct_fields__) for one in APIS.values()}


def _check_duplicates(body: bytes, fields: frozenset[str]) -> None:
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
        if field not in fields:
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
    """Parses and checks requests. ``hasher`` hashes their prompts (None: no hashes), by tenant if ``by_tenant``.

    ``media`` checks the URLs that engines would fetch (None: no check).
    """

    def __init__(
        self,
        limits: Limits,
        hasher: PrefixHasher | None = None,
        *,
        by_tenant: bool = True,
        slo_classes: Iterable[SloClass] = (),
        media: MediaUrls | None = None,
    ) -> None:
        self._limits, self._hasher, self._by_tenant, self._media = limits, hasher, by_tenant, media
        self._slo_classes = {one.name: one for one in slo_classes}
        messages = max(limits.messages, _MIN_MESSAGES)
        self._shape = BodyShape(limits.depth, _OBJECTS * messages, _TEXTS * messages, limits.values)

    def parse(
        self, api: str, body: bytes, caller: Caller, headers: Headers, request_id: str, now_s: float, address: str = ""
    ) -> ClientRequest:
        """Return the request in a body and its headers. Raises Fault if it is invalid or exceeds a limit."""
        route = APIS[api]
        content = self._parse_form(body, headers) if route.is_form else self._parse_json(route, body)
        max_tokens, choices = _check(content, self._limits)
        text, tokens, prefix = _prompt(content, self._hasher, caller.tenant if self._by_tenant else 0)
        if len(body) - len(text) > _FRAME_BYTES:
            tokens += _other_tokens(content)
        if not route.is_form:
            decoded = _check_numbers(body, content.prompt if isinstance(content, Completion) else None)
            if self._media is not None:
                self._media.check(body, decoded)
            _check_duplicates(body, _FIELDS_OF[route.body])
        given = headers.get(b"x-session-id", b"")
        session = given.decode() if _IDENTIFIER.match(given) else content.session()[:128]
        timeout = headers.get(b"x-request-timeout-s") or headers.get(b"x-stainless-read-timeout") or b""
        media_type = headers[b"content-type"].decode("latin-1") if route.is_form else "application/json"
        forwarded = [("Content-Type", media_type), ("X-Request-Id", request_id)]
        for field, title, pattern in _FORWARDED:
            if (value := headers.get(field)) is not None and pattern.match(value):
                forwarded.append((title, value.decode()))
        slo = self._slo(caller, headers.get(b"x-slo-class"))
        limit_s = math.inf if slo is None else min(slo.ttft_s if content.stream else math.inf, slo.jct_s)
        deadline_s = now_s + min(limit_s, float(timeout if _SECONDS.match(timeout) else "inf"))
        priority = caller.key.priority if caller.key else 0
        return ClientRequest(
            api=api, body=body, model=content.model, stream=bool(content.stream), text=text, prompt_tokens=tokens,
            prefix=prefix, max_tokens=max_tokens, choices=choices, arrival_s=now_s, headers=forwarded,
            client=Client(caller.tenant, priority, session, address, deadline_s, slo=slo),
            memory_bytes=2 * len(body) if route.is_form else _memory_bytes(body, text),
        )  # fmt: skip

    def _slo(self, caller: Caller, header: bytes | None) -> SloClass | None:
        name = header.decode("latin-1") if header is not None else caller.key.slo_class if caller.key else None
        if name is None or (found := self._slo_classes.get(name)) is not None:
            return None if name is None else found
        if header is None:  # of a key of the store, and the configuration does not have the class any more
            return None
        known = ", ".join(self._slo_classes) or "none"
        raise invalid(
            None, f"X-SLO-Class must name a class of this gateway ({known}); it is {quoted(name)}.", "slo_class"
        )

    def _parse_json(self, route: Api, body: bytes) -> Body:
        limits = self._limits
        if (exceeded := self._shape.exceeded(body)) == "levels":
            raise invalid(None, f"The body must be nested at most {limits.depth} levels deep.", "too_deep")
        if exceeded:
            name = "lists and objects" if exceeded == "objects" else exceeded
            message = f"The body must contain at most {getattr(self._shape, exceeded)} {name}."
            raise invalid(None, message, "too_many_values")
        return decode(_DECODERS[route.body], body)

    def _parse_form(self, body: bytes, headers: Headers) -> Body:
        """Return the fields that the gateway reads of a form.

        Parts are read strictly, so that no engine can find another model in the same form.
        """
        stated = _FORM_TYPE.match(headers.get(b"content-type", b""))
        assert stated is not None, "the media type is checked before the body is read"
        mark = b"\r\n--" + stated[2]
        first, *parts = (b"\r\n" + body).split(mark, MAX_FIELDS + 2)
        is_lenient = body.count(mark[1:]) > len(parts) - 1  # lines that a parser may take that needs no CR
        if first or is_lenient or not parts or parts.pop().rstrip(b"\r\n") != b"--" or len(parts) > MAX_FIELDS:
            message = f"The body must be a form of at most {MAX_FIELDS} parts, from its first boundary to its last one."
            raise invalid(None, message, "invalid_form")
        fields: dict[str, bytes] = {}
        for part in parts:
            head, separator, value = part.partition(b"\r\n\r\n")
            found = _PART_HEAD.fullmatch(head)
            if not separator or found is None:
                message = "Each part of the form must have a Content-Disposition with a name, and may have a type."
                raise invalid(None, message, "invalid_form")
            name = found[1].decode("utf-8", "replace")
            if name.casefold() in ENGINE_FIELDS or (name == "vllm_xargs" and HINTS.encode() in value):
                raise _not_for_clients(name)
            if self._media is not None and b"; filename" not in head.lower():
                self._media.check_form_field(name, value)
            if name.casefold() in ("model", "stream"):
                if name in fields or name != name.casefold():
                    message = f"The field {name!r} must occur once, in small letters."
                    raise invalid(name.casefold(), message, "duplicate_field")
                fields[name] = value
        if "model" not in fields:
            raise invalid("model", "The form must have the field 'model'.", "invalid_type")
        return Body(
            model=fields["model"].decode("utf-8", "replace"),
            stream=fields.get("stream", b"").strip().lower() in (b"true", b"1", b"on", b"yes", b"t", b"y"),
        )


_PART_HEAD = re.compile(
    rb"(?:\r\nContent-Type: [^\r\n]*)?"
    rb"\r\nContent-Disposition: form-data; name=\"([^\"\\\r\n]+)\""
    rb"(?:; filename=\"[^\"\\\r\n]*\")?(?:; filename\*=[^;\"\r\n]+)?"
    rb"(?:\r\nContent-(?:Type|Length): [^\r\n]*)*",
    re.IGNORECASE,
)
"""The head of a part of a form, as HTTP clients write it."""
