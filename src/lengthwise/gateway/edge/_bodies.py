"""The fields of a body that the gateway reads; all others go on unread."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from lengthwise.gateway.edge.faults import bad

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
