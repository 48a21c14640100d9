"""Middleware for vLLM: an answer becomes as long as ``vllm_xargs.output_tokens`` says, out of the gateway's sight.

``--middleware forced_length.ForcedLength`` with this folder on PYTHONPATH. A request says in ``vllm_xargs`` how long
its whole output is (``output_tokens``) and how long it was allowed to be when it was first sent (``most_tokens``).
One that goes on after a cut asks for fewer tokens by those that it has; so many fewer it gets.
"""

from __future__ import annotations

import json
from typing import Any


class ForcedLength:
    """ASGI middleware that rewrites bodies."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes everything on."""
        if scope["type"] != "http" or scope["method"] != "POST" or "completions" not in scope["path"]:
            await self.app(scope, receive, send)
            return
        whole, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            whole, more = whole + message.get("body", b""), message.get("more_body", False)
        whole = forced(whole)
        told = False

        async def again() -> Any:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": whole, "more_body": False}

        sized = (b"content-length", str(len(whole)).encode())
        headers = [one for one in scope["headers"] if one[0].lower() != sized[0]]
        await self.app({**scope, "headers": [*headers, sized]}, again, send)


def forced(raw: bytes) -> bytes:
    """The body with its length fixed, where it says one."""
    try:
        body = json.loads(raw)
        told = body["vllm_xargs"]
        length = told["output_tokens"] - (told["max_tokens"] - body["max_tokens"])
    except (ValueError, KeyError, TypeError):
        return raw
    length = max(1, int(length))
    fixed = {"max_tokens": length, "min_tokens": length, "ignore_eos": True}
    return json.dumps({**body, **fixed}).encode()
