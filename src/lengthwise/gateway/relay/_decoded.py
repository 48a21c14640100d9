"""What an event says as JSON, where a scan of its bytes is not enough."""

from __future__ import annotations

from typing import Any

from lengthwise.gateway.relay._split import data_of

_ENDS = (b"}\n\n", b"}\r\n\r\n", b"}\r\r")
_BEGINS = b'data: {"'
_OUTPUT = ("text", "content", "token_ids", "reasoning", "reasoning_content", "refusal", "audio", "tool_calls",
           "function_call")  # fmt: skip
"""What of a choice, or of its delta, is output."""


def decoded(data: str) -> dict[str, Any]:
    """The object that an event's data is; ValueError where it is none."""
    import msgspec

    try:
        chunk = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(chunk, dict):
        raise ValueError("not an object")  # noqa: TRY004 - the engine's data, not our types
    return chunk


def looks_whole(event: bytes) -> bool:
    """Whether an event ends as an object does, and no second one runs into it; nothing is decoded."""
    return event.endswith(_ENDS) and event.rfind(_BEGINS) <= 0


def adds_output(event: bytes) -> bool:
    """Whether an event adds to the output, however it is written.

    Raises:
        ValueError: It is not what an engine tells.
    """
    data = data_of(event)
    if not data or data.strip() == "[DONE]":
        return False
    try:
        return any(map(_adds, decoded(data).get("choices") or ()))
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def _adds(choice: dict[str, Any]) -> bool:
    told = {**choice, **(choice.get("delta") or {})}
    return any(told.get(name) for name in _OUTPUT)
