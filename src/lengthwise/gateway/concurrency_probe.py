"""Measure by tiny concurrent requests how many requests an engine runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import RequestError, Server

TOKENS = 48  # output tokens of a request: long enough for all to run together
_PROMPT = "1 2 3 4"


@dataclass(frozen=True)
class RequestTimes:
    """Times at which a request was sent, and at which its first and its last token arrived."""

    sent_s: float
    first_token_s: float
    last_s: float


def probe_max_num_seqs(server: Server, desired: int) -> int:
    """Return how many of ``desired`` concurrent requests the engine runs at once.

    A result of ``desired`` means that the engine may run more. Requests that fail do not count. Raises InputError if
    the server does not answer.
    """

    async def probe() -> list[RequestTimes]:
        async with Client(server) as client:
            await client.probe()
            body = client.body(_PROMPT, TOKENS)
            times = await asyncio.gather(*(_request_times(client, body) for _ in range(desired)))
        return [one for one in times if one is not None]

    return max_concurrent(asyncio.run(probe()))


def max_concurrent(times: Sequence[RequestTimes]) -> int:
    """Return the largest number of requests that ran at once, which is all if none waited for the end of another."""
    if not any(b.sent_s < a.first_token_s and a.last_s < b.first_token_s for b in times for a in times):
        return len(times)
    return max(sum(one.first_token_s <= other.first_token_s <= one.last_s for one in times) for other in times)


async def _request_times(client: Client, body: bytes) -> RequestTimes | None:
    sent: list[float] = []
    try:
        chunks = [chunk async for chunk in client.stream(body, sent=sent.append)]
    except RequestError:
        return None
    at_s = [chunk.at_s for chunk in chunks if chunk.is_output or chunk.text]
    return RequestTimes(sent[0], at_s[0], at_s[-1]) if sent and at_s else None
