"""A continuation's chunks in the dress of the stream that they continue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lengthwise.backend.openai import CHAT
from lengthwise.gateway.relay._scan import many

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Wants:
    """What the client asked to see.

    Attributes:
        api: CHAT or COMPLETIONS.
        stream: Whether in events.
        usage: Whether at the end.
        usage_each: In each chunk.
        ids: Whether token ids.
    """

    api: str
    stream: bool
    usage: bool
    usage_each: bool
    ids: bool

    @staticmethod
    def of(api: str, stream: bool, fields: dict[str, Any]) -> Wants:
        """By the fields of a request."""
        options = fields.get("stream_options")
        options = options if isinstance(options, dict) else {}
        return Wants(
            api,
            stream,
            bool(options.get("include_usage")),
            bool(options.get("continuous_usage_stats")),
            bool(fields.get("return_token_ids")),
        )


class Dress:
    """How the first chunk looked: its id, time and model are those of the whole answer."""

    def __init__(self, wants: Wants, first: dict[str, Any]) -> None:
        self._wants = wants
        keys = ("id", "object", "created", "model")
        self._frame = {key: first[key] for key in keys if key in first}

    def chunk(
        self, text: str, finish: str | None, stop: Any, ids: list[int] | None, usage: dict[str, int]
    ) -> bytes:
        """An event."""
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": text}} if self._wants.api == CHAT else {"text": text}
        choice |= {"logprobs": None, "finish_reason": finish}
        if stop is not None or self._wants.api != CHAT:
            choice["stop_reason"] = stop
        choice["token_ids"] = ids if self._wants.ids else None
        fields = {**self._frame, "choices": [choice]}
        return _event({**fields, "usage": usage} if self._wants.usage_each else fields)

    def usage(self, usage: dict[str, int]) -> bytes:
        """The event that tells all tokens, where it is wanted."""
        return _event({**self._frame, "choices": [], "usage": usage}) if self._wants.usage else b""


def usage_of(prompt_ids: bytes, generated: int) -> dict[str, int]:
    """The numbers of a whole answer, however many runs it took."""
    prompt = many(prompt_ids)
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def _event(fields: dict[str, Any]) -> bytes:
    import msgspec

    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
