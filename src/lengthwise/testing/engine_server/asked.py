"""A request's body as an engine reads it: checked, its prompt as token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lengthwise.testing.engine_server.spec import EngineSpec
from lengthwise.testing.engine_server.toy_model import BEGIN, MOST_ID, encode


class RefusedError(Exception):
    """The engine says no: an HTTP status and why."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Asked:
    """What is to be generated.

    Attributes:
        prompt_ids: With the template and BEGIN.
        most_tokens: Longest output.
        least_tokens: Before which it does not end by itself.
        ends: Whether the model may end it.
        fixed_tokens: Its length, where ``vllm_xargs`` fixes it.
        interval: Tokens of a piece, at least; the first and the last come at once.
        logprobs: How many alternatives; None: nothing of the kind.
    """

    chat: bool
    model: str
    prompt_ids: tuple[int, ...]
    most_tokens: int
    least_tokens: int = 0
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


def read_asked(raw: bytes, headers: Mapping[str, str], spec: EngineSpec, *, chat: bool) -> Asked:
    """The request; raises RefusedError where an engine would."""
    body = read_body(raw)
    if body.get("model", spec.model) != spec.model:
        raise RefusedError(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
    if body.get("echo"):
        raise RefusedError(400, "echo is not supported")
    own = spec.kind == "vllm"
    prompt = chat_ids(body) if chat else prompt_ids(body.get("prompt"))
    room = spec.max_model_len - len(prompt)
    wanted = _whole(body, "max_completion_tokens", None) if chat else None
    wanted = wanted or _whole(body, "max_tokens", None) or (room if chat else 16)
    if room < 1 or (own and wanted > room):
        raise RefusedError(
            400,
            f"This model's maximum context length is {spec.max_model_len} tokens. However, you requested {wanted} "
            f"output tokens and your prompt contains {len(prompt)} input tokens.",
        )
    options = _typed(body, "stream_options", dict, {})
    xargs = _typed(body, "vllm_xargs", dict, {}) if own else {}
    extended = spec.kind != "openai"
    return Asked(
        chat=chat,
        model=spec.model,
        prompt_ids=tuple(prompt),
        most_tokens=min(wanted, room),
        least_tokens=(_whole(body, "min_tokens", 0, least=0) or 0) if extended else 0,
        ends=not (extended and _typed(body, "ignore_eos", bool, default=False)),
        fixed_tokens=_whole(xargs, "output_tokens", None),
        n=_whole(body, "n", 1) or 1,
        stream=_typed(body, "stream", bool, default=False),
        usage=bool(options.get("include_usage")),
        usage_each=spec.kind in {"vllm", "sglang"} and bool(options.get("continuous_usage_stats")),
        ids=own and _typed(body, "return_token_ids", bool, default=False),
        stop=_stops(body.get("stop")),
        stop_ids=frozenset(_typed(body, "stop_token_ids", list, []) if extended else ()),
        priority=_priority(body, headers, spec),
        interval=(_whole(body, "stream_interval", 1) or 1) if own else 1,
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


def _whole(body: dict[str, Any], name: str, default: int | None, least: int = 1) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RefusedError(400, f"{name} must be a whole number of at least {least}, got {value!r}.")
    return value


def _stops(told: Any) -> tuple[str, ...]:
    stops = [told] if isinstance(told, str) else told or []
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
