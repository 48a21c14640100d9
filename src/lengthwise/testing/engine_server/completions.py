"""Emulates completions: request parsing, a toy tokenizer and model, responses in OpenAI's format."""

from __future__ import annotations

import asyncio
import codecs
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.testing.engine_server.engine import EngineSpec

BEGIN = 1 << 29  # appended to every text prompt: the output starts after it
END = BEGIN + 1  # end of the output; counts as a token, has no text
_FIXED = BEGIN + 16  # _FIXED + n fixes the output length at n tokens
MAX_ID = _FIXED + (1 << 28)

_MASK = (1 << 64) - 1
_TOKENS = re.compile(rb"<out:(0|[1-9]\d{0,7})>| ?(?:(?!<out:\d)[!-~]){1,3}|[\x00-\xff]")
_CHARACTERS = tuple(c.encode() for c in "éßüاж中文字€🙂🚀")
_CONSONANTS, _VOWELS = b"bdfghjklmnprstvw", b"aeio"


def encode(text: str) -> list[int]:
    """Return the token ids of a text. ``<out:120>`` in the text becomes one token that fixes the output length."""
    matches = _TOKENS.finditer(text.encode("utf-8", "surrogatepass"))
    return [_FIXED + int(match[1]) if match[1] else pack(match[0]) for match in matches]


def pack(text: bytes) -> int:
    """Return the token id of a single byte, or of a run of up to four ASCII characters."""
    return text[0] if len(text) == 1 else 256 + functools.reduce(lambda number, byte: number << 7 | byte, text, 0)


def token_bytes(token: int) -> bytes:
    """Return the bytes that a token id stands for."""
    if token < 256:
        return bytes((token,))
    if token >= BEGIN:
        return b"<out:%d>" % (token - _FIXED) if token >= _FIXED else b""
    number, text = token - 256, bytearray()
    while number:
        text.append(number & 127)
        number >>= 7
    return bytes(reversed(text))


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids. Invalid UTF-8 becomes U+FFFD."""
    return b"".join(map(token_bytes, ids)).decode("utf-8", "replace")


class ToyModel:
    """Deterministic toy model. The next token depends on the model's name and all tokens so far.

    ``tail`` has the bytes of an incomplete UTF-8 character. ``fixed`` is the output length if the prompt or the request
    fixes it. ``num_output`` counts tokens since the output started.
    """

    __slots__ = ("_hash", "_mean", "fixed", "num_output", "tail")

    def __init__(self, name: str, ids: Sequence[int] = (), mean_tokens: int = 64) -> None:
        self._hash = functools.reduce(_mixed, name.encode(), 0)
        self._mean, self.tail, self.num_output = max(1, mean_tokens), b"", 0
        self.fixed: int | None = None
        self.read(ids)

    def read(self, ids: Iterable[int]) -> None:
        """Append tokens to the context."""
        for token in ids:
            self._hash = _mixed(self._hash, token)
            self.num_output += 1
            if token == BEGIN:
                self.num_output = 0
            elif token >= _FIXED:
                self.fixed = token - _FIXED
            tail = self.tail + bytes((token,)) if 0x80 <= token < 256 else b""
            self.tail = tail if any(c.startswith(tail) and c != tail for c in _CHARACTERS) else b""

    def next(self, *, may_end: bool = True) -> int:
        """Return the next token, which is END only if ``may_end``."""
        if self.fixed is not None:
            is_end = self.num_output + 1 >= self.fixed
        else:
            is_end = not self.tail and self.num_output > 0 and self._draw(1) % self._mean == 0
        if may_end and is_end:
            return END
        if candidates := [c for c in _CHARACTERS if self.tail and c.startswith(self.tail)]:
            return candidates[self._draw(2) % len(candidates)][len(self.tail)]
        # A multi-byte character takes up to 4 tokens; near a fixed end it would be cut.
        if self._draw(3) % 8 == 0 and (self.fixed is None or self.fixed - self.num_output > 5):
            return _CHARACTERS[self._draw(4) % len(_CHARACTERS)][0]
        a = self._draw(5)
        return pack(bytes((32, _CONSONANTS[a % 16], _VOWELS[a // 16 % 4], _CONSONANTS[a // 64 % 16])))

    def _draw(self, salt: int) -> int:
        return _mixed(self._hash, -salt) >> 8


def _mixed(value: int, by: int) -> int:
    """Return a 64-bit hash of two integers (finalizer of splitmix64)."""
    value = ((value ^ (by & _MASK)) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class RefusedError(Exception):
    """The engine rejects a request with an HTTP status."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Sampling:
    """The rules by which an output ends."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False  # whether the model may not end the output
    fixed_tokens: int | None = None  # exact length of the output, from ``vllm_xargs``
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ResponseOptions:
    """The form in which a response returns the output."""

    stream: bool = False
    usage: bool = False  # whether the stream ends with a usage chunk
    usage_each: bool = False  # whether every chunk has the usage so far
    ids: bool = False  # whether token ids are returned
    interval: int = 1  # minimum tokens of a chunk; the first and the last are sent at once
    logprobs: int | None = None  # alternatives per token; None: no log probabilities


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request for ``n`` outputs. ``prompt_ids`` include a chat's template, and BEGIN before text."""

    chat: bool
    model: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    options: ResponseOptions = ResponseOptions()
    n: int = 1
    priority: int = 0
    request_id: str = ""


def parse_request(
    body: dict[str, Any], headers: Mapping[str, str], spec: EngineSpec, *, chat: bool
) -> CompletionRequest:
    """Read the fields of a request. Raises RefusedError if an engine would refuse the request."""
    if body.get("model", spec.model) != spec.model:
        raise RefusedError(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
    if body.get("echo"):
        raise RefusedError(400, "echo is not supported")
    is_vllm, is_extended = spec.kind == "vllm", spec.kind != "openai"
    prompt = chat_ids(body) if chat else prompt_ids(body.get("prompt"))
    available = spec.max_model_len - len(prompt)
    requested = _integer(body, "max_completion_tokens", None) if chat else None
    requested = requested or _integer(body, "max_tokens", None) or (available if chat else 16)
    if available < 1 or (is_vllm and requested > available):
        limit = f"This model's maximum context length is {spec.max_model_len} tokens."
        given = f"you requested {requested} output tokens and your prompt contains {len(prompt)} input tokens."
        raise RefusedError(400, f"{limit} However, {given}")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise RefusedError(400, "stop must be a string or a list of strings, none of them empty")
    logprobs = body.get("logprobs")
    if logprobs is not None:
        logprobs = None if logprobs is False else int((body.get("top_logprobs") or 0) if chat else logprobs)
    stream_options = _typed(body, "stream_options", dict, {})
    extra = _typed(body, "vllm_xargs", dict, {}) if is_vllm else {}
    return CompletionRequest(
        chat=chat,
        model=spec.model,
        prompt_ids=tuple(prompt),
        sampling=Sampling(
            max_tokens=min(requested, available),
            min_tokens=(_integer(body, "min_tokens", 0, minimum=0) or 0) if is_extended else 0,
            ignore_eos=is_extended and _typed(body, "ignore_eos", bool, default=False),
            fixed_tokens=_integer(extra, "output_tokens", None),
            stop=tuple(stop),
            stop_ids=frozenset(_typed(body, "stop_token_ids", list, []) if is_extended else ()),
        ),
        options=ResponseOptions(
            stream=_typed(body, "stream", bool, default=False),
            usage=bool(stream_options.get("include_usage")),
            usage_each=spec.kind in {"vllm", "sglang"} and bool(stream_options.get("continuous_usage_stats")),
            ids=is_vllm and _typed(body, "return_token_ids", bool, default=False),
            interval=(_integer(body, "stream_interval", 1) or 1) if is_vllm else 1,
            logprobs=logprobs,
        ),
        n=_integer(body, "n", 1) or 1,
        priority=_priority(body, headers, spec),
        request_id=str(headers.get("x-request-id") or body.get("request_id") or ""),
    )


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the body as a JSON object. Raises RefusedError if it is not one."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError(400, "the body must be an object")
    return body


def _typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise RefusedError(400, f"{name}: Input should be a valid {kind.__name__}")
    return value


def _integer(body: dict[str, Any], name: str, default: int | None, minimum: int = 1) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise RefusedError(400, f"{name} must be an integer of at least {minimum}, got {value!r}.")
    return value


def _priority(body: dict[str, Any], headers: Mapping[str, str], spec: EngineSpec) -> int:
    if spec.kind not in {"vllm", "sglang"}:
        return 0
    header = headers.get("x-vllm-priority") if spec.kind == "vllm" else None
    try:
        priority = int(header) if header is not None else int(body.get("priority") or 0)
    except (TypeError, ValueError):
        raise RefusedError(400, "priority must be an integer") from None
    if priority and not spec.limits.by_priority:
        raise RefusedError(400, f"Got priority {priority} but Priority scheduling is not enabled.")
    return -priority if spec.kind == "sglang" else priority  # SGLang schedules larger values first


def prompt_ids(prompt: Any) -> list[int]:
    """Return the token ids of a prompt that is text or ids. Raises RefusedError for anything else."""
    if isinstance(prompt, str):
        return [*encode(prompt), BEGIN]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt_ids(prompt[0])
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < MAX_ID for i in prompt):
        return prompt
    raise RefusedError(400, "prompt must be a text or a list of token ids of the vocabulary")


def chat_ids(body: dict[str, Any]) -> list[int]:
    """Return the token ids of a chat. Each message is a line "role: text", and BEGIN precedes the output."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RefusedError(400, "messages must be a list of objects, and not empty")
    if is_continued := bool(body.get("continue_final_message")):
        *messages, last = messages
    text = "".join(f"{m.get('role', 'user')}: {_content(m)}\n" for m in messages)
    ids = [*encode(f"{text}assistant:"), BEGIN]
    return ids + encode(_content(last)) if is_continued else ids


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an output: text and ids, the output's tokens so far, and the finish reason if it is the last part."""

    text: str
    ids: list[int]
    total_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class OutputStream:
    """One output of a request. It generates a token in each step of the batch, and returns chunks.

    Text is withheld as in vLLM: bytes until their character is complete, and as many characters as could start a stop
    string. An incomplete character at the end is not shown. If a later request continues the ids, its text shows it.
    ``num_taken`` of the generated ``ids`` have been returned. ``finish_reason`` finally is "stop", "length" or "abort".
    """

    def __init__(self, request: CompletionRequest, spec: EngineSpec, choice: int, on_change: asyncio.Event) -> None:
        self._sampling, self._interval, self._on_change = request.sampling, request.options.interval, on_change
        name = f"{spec.model}#{choice}" if choice else spec.model
        self._model = ToyModel(name, request.prompt_ids, spec.mean_tokens)
        if BEGIN not in request.prompt_ids:
            self._model.num_output = 0
        if request.sampling.fixed_tokens is not None:
            self._model.fixed = request.sampling.fixed_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._model.tail)
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._text = ""
        self._text_lengths: list[int] = []
        self._num_shown = self.num_taken = 0
        self._all_taken = False

    def on_token(self, _now_s: float) -> bool:
        """Generate a token, and return whether it is the last one."""
        sampling = self._sampling
        token = self._model.next(may_end=not sampling.ignore_eos and len(self.ids) + 1 > sampling.min_tokens)
        self._model.read((token,))
        self.ids.append(token)
        self._text += self._decoder.decode(token_bytes(token))
        self._text_lengths.append(len(self._text))
        if token == END:
            self.finish_reason = "stop"
        elif token in sampling.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif len(self.ids) > sampling.min_tokens and (
            matches := [(at, s) for s in sampling.stop if (at := self._text.find(s)) >= 0]
        ):
            at, self.stop_reason = min(matches)
            self.finish_reason, self._text = "stop", self._text[:at]
        elif len(self.ids) == sampling.max_tokens:
            self.finish_reason = "length"
        self._on_change.set()
        return self.finish_reason is not None

    def next_size(self) -> int | None:
        """Return the size of the next chunk in tokens, or None if no chunk is due yet or all were returned."""
        available, minimum = len(self.ids) - self.num_taken, self._interval if self.num_taken else 1
        if available >= minimum:
            return minimum
        return available if self.finish_reason and not self._all_taken else None

    def take(self, max_tokens: int = 1 << 30) -> Chunk:
        """Return the next chunk of at most ``max_tokens`` tokens."""
        end = min(len(self.ids), self.num_taken + max_tokens)
        ids, self.num_taken = self.ids[self.num_taken : end], end
        self._all_taken = self.finish_reason is not None and end == len(self.ids)
        shown, text_end = self._num_shown, len(self._text)
        if not self._all_taken:
            withheld = max((len(s) - 1 for s in self._sampling.stop), default=0)
            text_end = max(shown, min(self._text_lengths[end - 1] if ids else shown, text_end) - withheld)
        self._num_shown = text_end
        reasons = (self.finish_reason, self.stop_reason) if self._all_taken else (None, None)
        return Chunk(self._text[shown:text_end], ids, end, *reasons)


class ResponseFormatter:
    """Formats the events or the body of one response, here of chats and completions. ``body`` is the request's."""

    def __init__(self, request: CompletionRequest, response_id: str, created_s: int, body: dict[str, Any]) -> None:
        self._request, self._body = request, body
        kind = "chat.completion" if request.chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": created_s, "model": request.model}
        self._is_first = [True] * request.n

    def first_events(self) -> list[bytes]:
        """Return the events before the first token. Only a chat has one, which states the role."""
        request = self._request
        if not request.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(request.n)]
        return [self._event(choices, 0, **self._prompt_ids())]

    def chunk(self, index: int, chunk: Chunk, num_output: int, padding: int = 0) -> bytes:
        """Return the event of a chunk. ``num_output`` counts the tokens of all choices."""
        choice = self._choice(index, chunk, padding, "delta")
        if self._is_first[index] and not self._request.chat:
            choice |= self._prompt_ids()
        self._is_first[index] = False
        return self._event([choice], num_output)

    def last_events(self, num_output: int, *, done: bool = True, double_usage: bool = False) -> list[bytes]:
        """Return the events after the last token: the usage if it is requested, and [DONE]."""
        usage = event(self._chunk_head() | {"choices": [], "usage": self._usage(num_output)})
        return [*[usage] * (self._request.options.usage * (1 + double_usage)), *[DONE] * done]

    def error(self, message: str) -> bytes:
        """Return an event that reports an error."""
        return event(error_body(message, "InternalServerError", 500))

    def complete(self, streams: Sequence[OutputStream], padding: int = 0) -> bytes:
        """Return the body of a response that is not streamed. ``padding`` blanks follow each text."""
        choices = [self._choice(i, s.take(), padding, "message") | self._prompt_ids() for i, s in enumerate(streams)]
        usage = self._usage(sum(len(stream.ids) for stream in streams))
        return json.dumps(self._head | {"choices": choices, "usage": usage}, ensure_ascii=False).encode()

    def _choice(self, index: int, chunk: Chunk, padding: int, chat_field: str) -> dict[str, Any]:
        text = chunk.text + " " * padding
        role = {"role": "assistant"} if chat_field == "message" else {}
        output: dict[str, Any] = {chat_field: role | {"content": text}} if self._request.chat else {"text": text}
        choice = {"index": index} | output | {"logprobs": self._logprobs(chunk.ids)}
        choice |= {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
        return choice | ({"token_ids": chunk.ids} if self._request.options.ids else {})

    def _event(self, choices: list[dict[str, Any]], num_output: int, **extra: Any) -> bytes:
        body = self._chunk_head() | {"choices": choices} | extra
        if self._request.options.usage_each:
            body["usage"] = self._usage(num_output)
        return event(body)

    def _chunk_head(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._request.chat else {})

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._request.prompt_ids)} if self._request.options.ids else {}

    def _usage(self, num_output: int) -> dict[str, int]:
        prompt = len(self._request.prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": num_output, "total_tokens": prompt + num_output}

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        if self._request.options.logprobs is None:
            return None
        texts = [(token_bytes(i).decode("utf-8", "replace"), list(token_bytes(i))) for i in ids]
        if self._request.chat:
            return {"content": [{"token": t, "logprob": 0.0, "bytes": b, "top_logprobs": []} for t, b in texts]}
        tokens = [text for text, _ in texts]
        return {"tokens": tokens, "token_logprobs": [0.0] * len(ids), "top_logprobs": None, "text_offset": []}


def event(body: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
