"""Middleware for vLLM that gives outputs the length ``vllm_xargs.output_tokens``, which the gateway does not see.

Start vLLM with ``--middleware forced_length.ForcedLength`` and this folder on PYTHONPATH. ``vllm_xargs`` has the total
output length (``output_tokens``) and the original limit (``max_tokens``). If a request resumes after a preemption, its
limit is lower by the tokens so far, and the middleware shortens the output by the same number.
"""

from __future__ import annotations

import json
from typing import Any


class ForcedLength:
    """ASGI middleware that rewrites request bodies."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Forward a request, with a rewritten body if it is a completion."""
        if scope["type"] != "http" or scope["method"] != "POST" or "completions" not in scope["path"]:
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        body = forced(body)
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        length = (b"content-length", str(len(body)).encode())
        headers = [header for header in scope["headers"] if header[0].lower() != length[0]]

        async def receive_rewritten() -> Any:
            return messages.pop() if messages else await receive()

        await self.app({**scope, "headers": [*headers, length]}, receive_rewritten, send)


def forced(raw: bytes) -> bytes:
    """Return the body with the output length that its ``vllm_xargs`` state, or ``raw`` unchanged if they state none."""
    try:
        body = json.loads(raw)
        options = body["vllm_xargs"]
        length = options["output_tokens"] - (options["max_tokens"] - body["max_tokens"])
    except (ValueError, KeyError, TypeError):
        return raw
    length = max(1, int(length))
    return json.dumps({**body, "max_tokens": length, "min_tokens": length, "ignore_eos": True}).encode()
