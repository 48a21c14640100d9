"""A request's body as an engine reads it: checked, its prompt as token ids."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.testing.engine_server.engine import EngineSpec

BEGIN = 1 << 29
"""Stands behind every prompt that came as text: an answer begins."""
END = BEGIN + 1
"""End of the answer; a token as others are, without text."""
_FIXED = BEGIN + 16
"""And so many more: the answer will have so many tokens."""
MOST_ID = _FIXED + (1 << 28)

_MASK = (1 << 64) - 1
_MARK = rb"<out:(0|[1-9]\d{0,7})>"
_PIECES = re.compile(_MARK + rb"| ?(?:(?!<out:\d)[!-~]){1,3}|[\x00-\xff]")
_CHARACTERS = tuple(c.encode() for c in "éßüاж中文字€🙂🚀")
_CONSONANTS, _VOWELS = b"bdfghjklmnprstvw", b"aeio"


def encode(text: str) -> list[int]:
    """Token ids of a text; ``<out:120>`` in it is one token that fixes the answer's length."""
    return [_id(found) for found in _PIECES.finditer(text.encode("utf-8", "surrogatepass"))]


def _id(found: re.Match[bytes]) -> int:
    return _FIXED + int(found[1]) if found[1] else pack(found[0])


def pack(piece: bytes) -> int:
    """The id of a single byte or of a run of up to four ASCII characters."""
    if len(piece) == 1:
        return piece[0]
    number = 0
    for byte in piece:
        number = number << 7 | byte
    return 256 + number


def spelled(token: int) -> bytes:
    """The bytes of an id."""
    if token < 256:
        return bytes((token,))
    if token >= _FIXED:
        return b"<out:%d>" % (token - _FIXED)
    if token >= BEGIN:
        return b""
    number, piece = token - 256, bytearray()
    while number:
        piece.append(number & 127)
        number >>= 7
    return bytes(reversed(piece))


def decode(ids: Iterable[int]) -> str:
    """The text of token ids; what is no UTF-8 becomes U+FFFD."""
    return b"".join(map(spelled, ids)).decode("utf-8", "replace")


class Mind:
    """What the model knows after reading ids: enough to tell the next one.

    Args:
        model: Its name, which is its weights.
        ids: Read at once.
        mean_tokens: Mean length of answers whose length nothing fixes.
    """

    __slots__ = ("_hash", "_mean", "fixed", "tail", "written")

    def __init__(self, model: str, ids: Sequence[int] = (), mean_tokens: int = 64) -> None:
        self._hash = 0
        for byte in model.encode():
            self._hash = _mixed(self._hash, byte)
        self._mean = max(1, mean_tokens)
        self.tail = b""
        """The bytes of a character that has begun and not ended."""
        self.written = 0
        """Tokens since the answer began."""
        self.fixed: int | None = None
        """How many it will have, where that is fixed."""
        self.read(ids)

    def read(self, ids: Iterable[int]) -> None:
        """Takes further tokens in."""
        for token in ids:
            self._hash = _mixed(self._hash, token)
            self.written += 1
            if token == BEGIN:
                self.written = 0
            elif token >= _FIXED:
                self.fixed = token - _FIXED
            self.tail = _unfinished(self.tail + bytes((token,))) if 0x80 <= token < 256 else b""

    def next(self, *, ends: bool = True) -> int:
        """The next token; END only where it ``ends``."""
        if ends and self._ends():
            return END
        if begun := [c for c in _CHARACTERS if self.tail and c.startswith(self.tail)]:
            return begun[self._draw(2) % len(begun)][len(self.tail)]
        if self._draw(3) % 8 == 0 and (self.fixed is None or self.fixed - self.written > 5):
            return _CHARACTERS[self._draw(4) % len(_CHARACTERS)][0]
        return self._word()

    def _ends(self) -> bool:
        if self.fixed is not None:
            return self.written + 1 >= self.fixed
        return not self.tail and self.written > 0 and self._draw(1) % self._mean == 0

    def _word(self) -> int:
        a = self._draw(5)
        letters = (_CONSONANTS[a % 16], _VOWELS[a // 16 % 4], _CONSONANTS[a // 64 % 16])
        return pack(b" " + bytes(letters))

    def _draw(self, salt: int) -> int:
        return _mixed(self._hash, -salt) >> 8


def _mixed(value: int, by: int) -> int:
    value = ((value ^ (by & _MASK)) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _unfinished(tail: bytes) -> bytes:
    """The tail, if it is the beginning of a character; else nothing."""
    return tail if any(c.startswith(tail) and c != tail for c in _CHARACTERS) else b""


class RefusedError(Exception):
    """The engine says no: an HTTP status and why."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class CompletionRequest:
    """What is to be generated.

    Attributes:
        prompt_ids: With the template and BEGIN.
        max_tokens: Longest output.
        min_tokens: Before which it does not end by itself.
        ends: Whether the model may end it.
        fixed_tokens: Its length, where ``vllm_xargs`` fixes it.
        interval: Tokens of a piece, at least; the first and the last come at once.
        logprobs: How many alternatives; None: nothing of the kind.
    """

    chat: bool
    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    ends: bool = True
    fixed_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False
    usage_each: bool = False
    ids: bool = False
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    interval: int = 1
    logprobs: int | None = None
    request_id: str = ""


def read_asked(raw: bytes, headers: Mapping[str, str], spec: EngineSpec, *, chat: bool) -> CompletionRequest:
    """The request; raises RefusedError where an engine would."""
    body = read_body(raw)
    if body.get("model", spec.model) != spec.model:
        raise RefusedError(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
    if body.get("echo"):
        raise RefusedError(400, "echo is not supported")
    own = spec.kind == "vllm"
    prompt = chat_ids(body) if chat else prompt_ids(body.get("prompt"))
    room = spec.max_model_len - len(prompt)
    wanted = _complete(body, "max_completion_tokens", None) if chat else None
    wanted = wanted or _complete(body, "max_tokens", None) or (room if chat else 16)
    if room < 1 or (own and wanted > room):
        raise RefusedError(
            400,
            f"This model's maximum context length is {spec.max_model_len} tokens. However, you requested {wanted} "
            f"output tokens and your prompt contains {len(prompt)} input tokens.",
        )
    options = _typed(body, "stream_options", dict, {})
    xargs = _typed(body, "vllm_xargs", dict, {}) if own else {}
    extended = spec.kind != "openai"
    return CompletionRequest(
        chat=chat,
        model=spec.model,
        prompt_ids=tuple(prompt),
        max_tokens=min(wanted, room),
        min_tokens=(_complete(body, "min_tokens", 0, least=0) or 0) if extended else 0,
        ends=not (extended and _typed(body, "ignore_eos", bool, default=False)),
        fixed_tokens=_complete(xargs, "output_tokens", None),
        n=_complete(body, "n", 1) or 1,
        stream=_typed(body, "stream", bool, default=False),
        usage=bool(options.get("include_usage")),
        usage_each=spec.kind in {"vllm", "sglang"} and bool(options.get("continuous_usage_stats")),
        ids=own and _typed(body, "return_token_ids", bool, default=False),
        stop=_stops(body.get("stop")),
        stop_ids=frozenset(_typed(body, "stop_token_ids", list, []) if extended else ()),
        priority=_priority(body, headers, spec),
        interval=(_complete(body, "stream_interval", 1) or 1) if own else 1,
        logprobs=_logprobs(body, chat=chat),
        request_id=str(headers.get("x-request-id") or body.get("request_id") or ""),
    )


def read_body(raw: bytes) -> dict[str, Any]:
    """The object of a body; raises RefusedError."""
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


def _complete(body: dict[str, Any], name: str, default: int | None, least: int = 1) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RefusedError(400, f"{name} must be a whole number of at least {least}, got {value!r}.")
    return value


def _stops(report: Any) -> tuple[str, ...]:
    stops = [report] if isinstance(report, str) else report or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RefusedError(400, "stop must be a string or a list of strings, none of them empty")
    return tuple(stops)


def _logprobs(body: dict[str, Any], *, chat: bool) -> int | None:
    told = body.get("logprobs")
    if told is None or told is False:
        return None
    return int(body.get("top_logprobs") or 0) if chat else int(told)


def _priority(body: dict[str, Any], headers: Mapping[str, str], spec: EngineSpec) -> int:
    """Smaller goes first; told by field or header, in the polarity of the kind."""
    if spec.kind not in {"vllm", "sglang"}:
        return 0
    told = headers.get("x-vllm-priority") if spec.kind == "vllm" else None
    try:
        priority = int(told) if told is not None else int(body.get("priority") or 0)
    except (TypeError, ValueError):
        raise RefusedError(400, "priority must be a whole number") from None
    if priority and not spec.limits.by_priority:
        raise RefusedError(400, f"Got priority {priority} but Priority scheduling is not enabled.")
    return -priority if spec.kind == "sglang" else priority


def prompt_ids(prompt: Any) -> list[int]:
    """The ids of a prompt, text or ids; raises RefusedError."""
    if isinstance(prompt, str):
        return [*encode(prompt), BEGIN]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt_ids(prompt[0])
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < MOST_ID for i in prompt):
        return prompt
    raise RefusedError(400, "prompt must be a text or a list of token ids of the vocabulary")


def chat_ids(body: dict[str, Any]) -> list[int]:
    """The template: a role, a colon and the text a line; BEGIN stands where the answer begins."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RefusedError(400, "messages must be a list of objects, and not empty")
    if continued := bool(body.get("continue_final_message")):
        *messages, last = messages
    text = "".join(f"{m.get('role', 'user')}: {_content(m)}\n" for m in messages)
    ids = [*encode(f"{text}assistant:"), BEGIN]
    return ids + encode(_content(last)) if continued else ids


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new: text that can be shown, ids, the numbers so far, and the reason if it is the last."""

    text: str
    ids: list[int]
    total_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Writing:
    """The model writes a token whenever the batch has run one.

    Text is held back as vLLM does: bytes until their character is whole, and as many characters as could be
    the beginning of a stop string. A character that is not whole at the end is not shown; the continuation of
    its ids shows it.

    Attributes:
        ids: All generated so far.
        report: How many of them have been taken.
        finish_reason: "stop", "length" or "abort" in the end.
    """

    def __init__(
        self, completion_request: CompletionRequest, spec: EngineSpec, choice: int, stirred: asyncio.Event
    ) -> None:
        self._requested, self._wakeup = completion_request, stirred
        self._mind = Mind(
            f"{spec.model}#{choice}" if choice else spec.model, completion_request.prompt_ids, spec.mean_tokens
        )
        if BEGIN not in completion_request.prompt_ids:
            self._mind.written = 0
        if completion_request.fixed_tokens is not None:
            self._mind.fixed = completion_request.fixed_tokens
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes.decode(self._mind.tail)
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._text = ""
        self._marks: list[int] = []
        self._shown = self.report = 0
        self._over = False

    def on_token(self, _now_s: float) -> bool:
        """One more; True where it is the last."""
        asked = self._requested
        ends = asked.ends and len(self.ids) + 1 > asked.min_tokens
        token = self._mind.next(ends=ends)
        self._mind.read((token,))
        self.ids.append(token)
        self._text += self._bytes.decode(spelled(token))
        self._marks.append(len(self._text))
        self._finish(token)
        self._wakeup.set()
        return self.finish_reason is not None

    def _finish(self, token: int) -> None:
        if token == END:
            self.finish_reason = "stop"
        elif token in self._requested.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif len(self.ids) > self._requested.min_tokens and (found := self._stopped()) is not None:
            self.finish_reason, self.stop_reason = "stop", found
        elif len(self.ids) == self._requested.max_tokens:
            self.finish_reason = "length"

    def _stopped(self) -> str | None:
        """The first stop string in the text, which is cut before it."""
        places = [(at, s) for s in self._requested.stop if (at := self._text.find(s)) >= 0]
        if not places:
            return None
        at, found = min(places)
        self._text = self._text[:at]
        return found

    def next_size(self) -> int | None:
        """Tokens of the piece that is due; None: none is yet, or all have been taken."""
        fresh, least = len(self.ids) - self.report, self._requested.interval if self.report else 1
        if fresh >= least:
            return least
        return fresh if self.finish_reason and not self._over else None

    def take(self, most: int = 1 << 30) -> Piece:
        """What is new since it was last asked, so many tokens of it at most."""
        until = min(len(self.ids), self.report + most)
        self._over = self.finish_reason is not None and until == len(self.ids)
        ids, self.report = self.ids[self.report : until], until
        if not self._over:
            return Piece(self._show(ids), ids, until)
        return Piece(self._show(ids), ids, until, self.finish_reason, self.stop_reason)

    def _show(self, ids: list[int]) -> str:
        """The text that can be shown with these tokens, what was held back before included."""
        shown, end = self._shown, len(self._text)
        if not self._over:
            held = max((len(s) - 1 for s in self._requested.stop), default=0)
            known = self._marks[self.report - 1] if ids else shown
            end = max(shown, min(known, end) - held)
        self._shown = end
        return self._text[shown:end]


class Rendering:
    """Makes the events and the body of one answer.

    Args:
        asked: What was asked for.
        name: The answer's id.
        created_s: Told in every object.
    """

    def __init__(self, completion_request: CompletionRequest, name: str, created_s: int) -> None:
        self._requested = completion_request
        kind = "chat.completion" if completion_request.chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created_s, "model": completion_request.model}
        self._first = [True] * completion_request.n

    def startup(self) -> list[bytes]:
        """Events before the first token: a chat begins with a role."""
        if not self._requested.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self._requested.n)
        ]
        extra: dict[str, Any] = {"prompt_token_ids": list(self._requested.prompt_ids)} if self._requested.ids else {}
        return [self._chunk(choices, 0, **extra)]

    def piece(self, index: int, piece: Piece, written: int, pad: int = 0) -> bytes:
        """The event of a piece; ``written`` counts the tokens of all choices."""
        asked, text = self._requested, piece.text + " " * pad
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": text}} if asked.chat else {"text": text}
        choice["logprobs"] = self._logprobs(piece.ids)
        choice |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if asked.ids:
            choice["token_ids"] = piece.ids
            if self._first[index] and not asked.chat:
                choice["prompt_token_ids"] = list(asked.prompt_ids)
        self._first[index] = False
        return self._chunk([choice], written)

    def usage(self, written: int) -> bytes:
        """The event at the end that tells the numbers."""
        return event(self._head_of_chunk() | {"choices": [], "usage": self._usage(written)})

    def complete(self, writings: Sequence[Writing], pad: int = 0) -> bytes:
        """The answer in one, each text longer by so many blanks."""
        choices = [self._whole_choice(i, writing.take(), pad) for i, writing in enumerate(writings)]
        usage = self._usage(sum(len(writing.ids) for writing in writings))
        return json.dumps(self._head | {"choices": choices, "usage": usage}, ensure_ascii=False).encode()

    def _whole_choice(self, index: int, piece: Piece, pad: int) -> dict[str, Any]:
        asked, text = self._requested, piece.text + " " * pad
        choice: dict[str, Any] = {"index": index}
        message = {"role": "assistant", "content": text}
        choice |= {"message": message} if asked.chat else {"text": text}
        choice["logprobs"] = self._logprobs(piece.ids)
        choice |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if asked.ids:
            choice |= {"token_ids": piece.ids, "prompt_token_ids": list(asked.prompt_ids)}
        return choice

    def _chunk(self, choices: list[dict[str, Any]], written: int, **extra: Any) -> bytes:
        body = self._head_of_chunk() | {"choices": choices} | extra
        if self._requested.usage_each:
            body["usage"] = self._usage(written)
        return event(body)

    def _head_of_chunk(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._requested.chat else {})

    def _usage(self, written: int) -> dict[str, int]:
        prompt = len(self._requested.prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        """The model is sure: every token has probability 1 and no alternative."""
        if self._requested.logprobs is None:
            return None
        tokens = [spelled(i).decode("utf-8", "replace") for i in ids]
        if self._requested.chat:
            rows = zip(tokens, ids, strict=True)
            return {
                "content": [
                    {"token": t, "logprob": 0.0, "bytes": list(spelled(i)), "top_logprobs": []} for t, i in rows
                ]
            }
        return {"tokens": tokens, "token_logprobs": [0.0] * len(ids), "top_logprobs": None, "text_offset": []}


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
