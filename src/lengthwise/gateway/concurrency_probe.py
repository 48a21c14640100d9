"""How many requests an engine runs at once, where it does not tell: so many tiny ones are sent and looked at."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import RequestError, Server

TOKENS = 48
"""Of each answer: long enough for all to be under way together."""
_PROMPT = "1 2 3 4"


@dataclass(frozen=True)
class Seen:
    """One tiny request: when it was sent, and its first and last tokens came."""

    sent_s: float
    first_s: float
    last_s: float


def max_num_seqs(server: Server, desired: int) -> int:
    """How many of ``desired`` requests the engine ran at once; ``desired`` where it would perhaps run more.

    Raises:
        InputError: Nobody answers there.
    """
    return at_once(asyncio.run(_attempted(server, desired)))


def at_once(seen: list[Seen]) -> int:
    """The most that were under way together, where one waited for the end of another; else all."""
    waited = any(late.sent_s < early.first_s and early.last_s < late.first_s for late in seen for early in seen)
    if not waited:
        return len(seen)
    return max(sum(one.first_s <= other.first_s <= one.last_s for one in seen) for other in seen)


async def _attempted(server: Server, desired: int) -> list[Seen]:
    async with Client(server) as client:
        await client.probe()
        body = client.body(_PROMPT, TOKENS)
        found = await asyncio.gather(*(_one(client, body) for _ in range(desired)))
    return [one for one in found if one is not None]


async def _one(client: Client, body: bytes) -> Seen | None:
    """None: it was refused, or failed."""
    sent: list[float] = []
    try:
        pieces = [piece async for piece in client.stream(body, sent=sent.append)]
    except RequestError:
        return None
    at_s = [piece.at_s for piece in pieces if piece.is_output or piece.text]
    return Seen(sent[0], at_s[0], at_s[-1]) if sent and at_s else None
