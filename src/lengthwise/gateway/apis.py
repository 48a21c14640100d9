"""The routes that are forwarded to engines: where each has its prompt, limit, stream flag, usage, text and errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from lengthwise.backend.openai_protocol import CHAT

Number = int | float | None  # a JSON number; JSON does not distinguish integers, so 1.0 is a valid 1
NOTHING = msgspec.Raw(b"")


class Part(msgspec.Struct, gc=False):
    """A part of a message. Only its text is read; other fields that become part of the prompt are raw."""

    type: str = ""
    text: str | None = None
    content: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    thinking: msgspec.Raw = NOTHING


_Content = str | list[str | Part] | None


def _text(content: _Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part if isinstance(part, str) else part.text or "" for part in content])


class Message(msgspec.Struct, gc=False):
    """A message of a chat."""

    role: str
    content: _Content = None
    name: msgspec.Raw = NOTHING
    tool_calls: msgspec.Raw = NOTHING
    function_call: msgspec.Raw = NOTHING
    reasoning: msgspec.Raw = NOTHING
    reasoning_content: msgspec.Raw = NOTHING


class Item(msgspec.Struct, gc=False):
    """An item of the input of /v1/responses: a message, a call of a function or its output, reasoning."""

    type: str = ""
    content: _Content = None
    name: msgspec.Raw = NOTHING
    arguments: msgspec.Raw = NOTHING
    output: msgspec.Raw = NOTHING


def _raws(entries: list[Any], names: tuple[str, ...]) -> Iterator[msgspec.Raw]:
    """Yield the fields beside the text of messages or items, and of their parts, that become part of the prompt.

    A field with an image or a sound in base64 is left out: its length says nothing about its tokens.
    """
    for one in entries:
        fields = [getattr(one, name) for name in names]
        for part in one.content if isinstance(one.content, list) else ():
            fields += (part.content, part.input, part.thinking) if isinstance(part, Part) else ()
        yield from [field for field in fields if b"base64" not in bytes(field)]


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


class Body(_EngineFields, kw_only=True, gc=False):
    """The fields that the gateway reads of every JSON body, which is all that it reads of bodies without a prompt."""

    model: str
    stream: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    vllm_xargs: dict[str, Any] | None = None

    caps: ClassVar[tuple[str, ...]] = ()  # fields with the maximum output; the first one that is set applies
    logprobs_fields: ClassVar[tuple[str, ...]] = ()  # fields with a number of log probabilities
    in_prompt: ClassVar[tuple[str, ...]] = ()  # further fields that become part of the prompt

    def session(self) -> str:
        """Return the client's name of its session, or ""."""
        return self.prompt_cache_key or self.user or ""

    def prompts(self) -> list[Any]:
        """Return all prompts, each a text or a list of token ids."""
        return []

    def others(self) -> Iterator[msgspec.Raw]:
        """Yield the JSON of fields beside ``prompts`` that become part of the prompt."""
        for name in self.in_prompt:
            yield getattr(self, name)


class _Sampled(Body, kw_only=True, gc=False):
    n: Number = None
    max_tokens: Number = None
    stop: str | list[str] | None = None
    prompt_logprobs: Number = None


class Chat(_Sampled, kw_only=True, gc=False):
    """Body of /v1/chat/completions."""

    messages: list[Message]
    tools: msgspec.Raw = NOTHING
    functions: msgspec.Raw = NOTHING
    documents: msgspec.Raw = NOTHING
    chat_template: msgspec.Raw = NOTHING
    chat_template_kwargs: msgspec.Raw = NOTHING
    max_completion_tokens: Number = None
    logprobs: bool | None = None
    top_logprobs: Number = None

    caps = ("max_completion_tokens", "max_tokens")
    logprobs_fields = ("prompt_logprobs", "top_logprobs")
    in_prompt = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs")

    def prompts(self) -> list[Any]:
        """Return the texts of all messages as one prompt."""
        return ["\n\n".join([_text(message.content) for message in self.messages])]

    def others(self) -> Iterator[msgspec.Raw]:
        """Yield tools and templates, and what messages have beside their text."""
        yield from super().others()
        yield from _raws(self.messages, ("name", "tool_calls", "function_call", "reasoning", "reasoning_content"))


class Completion(_Sampled, kw_only=True, gc=False):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: msgspec.Raw = NOTHING
    best_of: Number = None
    logprobs: Number = None

    caps = ("max_tokens",)
    logprobs_fields = ("prompt_logprobs", "logprobs")
    in_prompt = ("suffix",)

    def prompts(self) -> list[Any]:
        """Return the prompt, or all of several prompts."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[return-value]


class Responses(Body, kw_only=True, gc=False):
    """Body of /v1/responses."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Number = None
    stop: str | list[str] | None = None
    top_logprobs: Number = None
    background: bool | None = None
    tools: msgspec.Raw = NOTHING

    caps = ("max_output_tokens",)
    logprobs_fields = ("top_logprobs",)
    in_prompt = ("tools",)

    def prompts(self) -> list[Any]:
        """Return the instructions and the text of the input as one prompt."""
        texts = [self.input] if isinstance(self.input, str) else [_text(item.content) for item in self.input]
        return ["\n\n".join([self.instructions, *texts] if self.instructions else texts)]

    def others(self) -> Iterator[msgspec.Raw]:
        """Yield tools, and what the input has beside its text."""
        yield from super().others()
        if not isinstance(self.input, str):
            yield from _raws(self.input, ("name", "arguments", "output"))


class Messages(Body, kw_only=True, gc=False):
    """Body of Anthropic's /v1/messages."""

    messages: list[Message]
    system: _Content = None
    max_tokens: Number = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    tools: msgspec.Raw = NOTHING

    caps = ("max_tokens",)
    in_prompt = ("tools",)

    def session(self) -> str:
        """Return the id of the user in ``metadata``, or ""."""
        given = (self.metadata or {}).get("user_id")
        return given if isinstance(given, str) else ""

    def prompts(self) -> list[Any]:
        """Return the system prompt and the texts of all messages as one prompt."""
        texts = [_text(message.content) for message in self.messages]
        return ["\n\n".join([_text(self.system), *texts] if self.system else texts)]

    def others(self) -> Iterator[msgspec.Raw]:
        """Yield tools, and what messages have beside their text."""
        yield from super().others()
        yield from _raws(self.messages, ())


class Input(Body, kw_only=True, gc=False):
    """Body of /v1/embeddings, and of /v1/audio/speech."""

    input: str | list[Any] | None = None
    messages: list[Any] | None = None  # vLLM's form of an embedding of a chat

    def prompts(self) -> list[Any]:
        """Return each text, and each list of token ids."""
        return _as_prompts(self.input if self.messages is None else self.messages)


class Rerank(Body, kw_only=True, gc=False):
    """Body of /v1/rerank."""

    query: str | list[Any] | dict[str, Any]
    documents: str | list[Any] | dict[str, Any]

    def prompts(self) -> list[Any]:
        """Return the query and each document."""
        return [*_as_prompts(self.query), *_as_prompts(self.documents)]


def _as_prompts(given: Any) -> list[Any]:
    """Return texts and lists of token ids as they are, and the content of anything else, without base64, as text."""
    if given is None or given == []:
        return []
    if isinstance(given, str) or not isinstance(given, list) or _is_ids(given):
        given = [given]
    return [one if isinstance(one, str) or _is_ids(one) else "" if "base64" in str(one) else str(one) for one in given]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


CHUNKS = "chunks"  # data lines with ``choices`` up to [DONE]; ``usage`` with ``completion_tokens``
NAMED = "named"  # events with a ``type``; ``usage`` with ``output_tokens``, which the last ones have
OPAQUE = "opaque"  # no output tokens: the answer passes on as it is


@dataclass(frozen=True, slots=True)
class Api:
    """A route that is forwarded. ``body`` has the fields of its JSON, ``events`` is the form of its answer."""

    path: str
    body: type[Body]
    events: str = OPAQUE
    continues: bool = False  # whether another request can continue its output, so that it may be preempted
    queued: bool = True  # whether it waits for a slot of an engine
    is_form: bool = False  # whether the body is multipart/form-data instead of JSON
    is_anthropic: bool = False  # whether errors have Anthropic's form

    @property
    def generates(self) -> bool:
        """Whether it generates output tokens, whose number is predicted."""
        return self.events != OPAQUE


_ALL = (
    Api("/v1/chat/completions", Chat, CHUNKS, continues=True),
    Api("/v1/completions", Completion, CHUNKS, continues=True),
    Api("/v1/responses", Responses, NAMED),
    Api("/v1/messages", Messages, NAMED, is_anthropic=True),
    Api("/v1/embeddings", Input),
    *(Api(path, Rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    Api("/v1/audio/transcriptions", Body, is_form=True),
    Api("/v1/audio/translations", Body, is_form=True),
    Api("/v1/audio/speech", Input),
    Api("/v1/messages/count_tokens", Body, queued=False, is_anthropic=True),
    Api("/tokenize", Body, queued=False),
    Api("/detokenize", Body, queued=False),
)
APIS = {CHAT if one.body is Chat else one.path.removeprefix("/v1/"): one for one in _ALL}
"""Forwarded routes by name: "chat", and the paths of all others without /v1/."""


class Details(msgspec.Struct, gc=False):
    """Parts of the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """Numbers of tokens in an answer or event of form NAMED."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: int | None = None  # Anthropic's, which ``input_tokens`` does not include
    cache_creation_input_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt, cached ones included."""
        return (self.input_tokens or 0) + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were cached, or None if the engine does not report them."""
        return self.input_tokens_details.cached_tokens if self.input_tokens_details else self.cache_read_input_tokens


class NamedAnswer(msgspec.Struct, gc=False):
    """A complete answer of form NAMED: ``status`` is that of /v1/responses, ``stop_reason`` that of /v1/messages."""

    usage: Usage | None = None
    status: str | None = None
    stop_reason: str | None = None

    @property
    def finish_reason(self) -> str:
        """The reason for the end of the output, in OpenAI's words, or "" before the end."""
        reason = self.stop_reason or ("" if self.status in (None, "in_progress", "queued") else self.status)
        return _FINISHES.get(reason, reason)


_FINISHES = {
    "incomplete": "length", "max_tokens": "length", "model_context_window_exceeded": "length",
    "completed": "stop", "end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls",
}  # fmt: skip


class _Delta(msgspec.Struct, gc=False):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class NamedEvent(msgspec.Struct, gc=False):
    """An event of form NAMED."""

    type: str = ""
    delta: str | _Delta | None = None
    usage: Usage | None = None
    response: NamedAnswer | None = None
    message: NamedAnswer | None = None

    @property
    def text(self) -> str:
        """The piece of the output that the event has, or ""."""
        delta = self.delta
        if delta is None or isinstance(delta, str):
            return delta or ""
        return delta.text or delta.thinking or delta.partial_json or ""

    @property
    def answer(self) -> NamedAnswer:
        """The usage and the end of the output, as far as this event has them."""
        given = self.response or self.message or NamedAnswer(self.usage)
        if isinstance(self.delta, _Delta):
            given.stop_reason = self.delta.stop_reason
        return given

    @property
    def is_last(self) -> bool:
        """Whether no event follows."""
        return self.type in ("message_stop", "response.completed", "response.incomplete", "response.failed")


_ANSWERS, _EVENTS = msgspec.json.Decoder(NamedAnswer), msgspec.json.Decoder(NamedEvent)


def read_answer(body: bytes) -> NamedAnswer:
    """Return the usage and end of a complete answer of form NAMED; nothing if they are not where they should be."""
    try:
        return _ANSWERS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return NamedAnswer()


def read_event(data: str) -> NamedEvent:
    """Return what an event of form NAMED says, from its data; nothing if that is not where it should be."""
    try:
        return _EVENTS.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return NamedEvent()


MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None, is_anthropic: bool = False
) -> bytes:
    """Return an error as a JSON object, in OpenAI's or in Anthropic's form."""
    if is_anthropic:
        kind = _ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    default = "server_error" if status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error", 429: "requests"}.get(status, default)
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
