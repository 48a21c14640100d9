"""How many tokens of an answer have their text out, where the engine alone can tell."""

from __future__ import annotations

import asyncio
from typing import Any

from lengthwise.backend.openai import Server
from lengthwise.gateway.relay._seams import Worker
from lengthwise.gateway.relay._tracked import Tracked

_TAIL = 12
_ASK_S = 2.0
_HALF = "�"
_MOST_BYTES = 1 << 16
"""Of an answer: the text of a few tokens."""


async def kept_tokens(state: Tracked, worker: Worker, model: str) -> int:
    """Tokens behind which a further leg can begin.

    A chunk with several tokens and a text may end in half a character, which the engine holds back. Whether
    it does is seen by the text of the last tokens, asked of ``/detokenize``; an engine without it is believed.
    """
    kept = state.kept
    for dropped in range(state.unsure):
        tail = state.tail(_TAIL + dropped)
        text = await _text(worker, model, tail[: len(tail) - dropped])
        if text is None or not text.endswith(_HALF):
            return kept - dropped
    return kept


async def _text(worker: Worker, model: str, ids: list[int]) -> str | None:
    import msgspec

    body = msgspec.json.encode({"model": model, "tokens": ids})
    url = Server(worker.url).root + "/detokenize"
    try:
        async with (
            asyncio.timeout(_ASK_S),
            worker.session.post(url, data=body, allow_redirects=False) as answer,
        ):
            told = msgspec.json.decode(await _short(answer))
        return str(told["prompt"])
    except Exception:  # noqa: BLE001 - whatever it is: there is no answer
        return None


async def _short(answer: Any) -> bytes:
    """All of an answer; ValueError where it is longer than it can be, and the rest is not read."""
    parts, size = [], 0
    while part := await answer.content.readany():
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            answer.close()
            raise ValueError("too long")
    return b"".join(parts)
