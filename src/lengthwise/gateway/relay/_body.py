"""What engines are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthwise.gateway.relay._resumable import CARRIED

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def spliced(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """The body of an object with further fields before its own, which must not be there yet."""
    import msgspec

    if not fields:
        return body
    start = body.index(b"{") + 1
    added = msgspec.json.encode(fields)[1:-1]
    comma = b"" if body[start:].lstrip().startswith(b"}") else b","
    return body[:start] + added + comma + body[start:]


def replaced(fields: Mapping[str, Any], new: Mapping[str, Any]) -> bytes:
    """The body of the fields with some replaced."""
    import msgspec

    return msgspec.json.encode({**fields, **new})


def continuation(
    fields: Mapping[str, Any], prompt_ids: bytes, ids: bytes, generated: int, remaining: int
) -> bytes:
    """What asks ``/v1/completions`` to go on.

    Args:
        fields: Of the request as it came.
        prompt_ids: Token ids of its prompt, as they stand in JSON, without brackets.
        ids: Those of the output so far, likewise.
        generated: How many these are.
        remaining: How many more there may be.
    """
    import msgspec

    told = {name: value for name, value in fields.items() if name in CARRIED and value not in (None, [], "")}
    told.pop("logprobs", None)
    least = int(fields.get("min_tokens") or 0) - generated
    if least > 0:
        told["min_tokens"] = least
    told |= {"model": fields["model"], "max_tokens": remaining, "return_token_ids": True, **STREAM}
    prompt = prompt_ids + b"," + ids if ids else prompt_ids
    return b'{"prompt":[' + prompt + b"]," + msgspec.json.encode(told)[1:]
