"""Prompts of wanted lengths, no two alike, nor like those of another run: a server's prefix cache flatters nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.backend.openai import Client, Prompt, RequestError
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

Ints = npt.NDArray[np.int64]

_TEXT = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head
    house service friend father power hour game line end member law car city name team minute idea body
"""
WORDS = tuple(_TEXT.split())
_ANCHOR = "the"
_SAFE_IDS = np.arange(300, 1000)
"""Where no tokenizer can be asked: past the bytes and special tokens that begin usual vocabularies."""

_ENOUGH = 16


@dataclass(frozen=True)
class Prompts:
    """Makes the prompt of each request, from a seed and a salt.

    Attributes:
        how: "token ids", "words" or "texts": what they are made of.
        lengths: [n] wanted tokens.
        salt: Of one run: prompts of another salt share nothing with these, whatever the seed.
        ids: Token ids to draw from, where the server takes them.
        words: Words to draw from otherwise, of one token each where that could be found out.
        overhead: Tokens that the server adds to the words: a first token, a chat's template.
        texts: The workload's own.
        shared: Share of each prompt that all have in common, from its beginning.
    """

    how: str
    lengths: Ints
    seed: int = 0
    salt: int = 0
    ids: Ints | None = None
    words: tuple[str, ...] = ()
    overhead: int = 0
    texts: Sequence[str] = ()
    shared: float = 0.0
    doubts: tuple[str, ...] = ()

    def __call__(self, row: int, round_: int = 0) -> Prompt:
        """The prompt of a request; another ``round_`` gives one of the same length that shares nothing more."""
        if self.how == "texts":
            return self.texts[row]
        length = int(self.lengths[row]) - self.overhead
        if self.ids is not None:
            return [int(i) for i in self.ids[self._drawn(row, round_, length, len(self.ids))]]
        picked = self._drawn(row, round_, max(0, length), len(self.words))
        return " ".join([_ANCHOR, *(self.words[i] for i in picked)])

    def _drawn(self, row: int, round_: int, length: int, of: int) -> Ints:
        common = int(length * self.shared)
        head = np.random.default_rng([self.seed, self.salt, 1]).integers(of, size=common)
        own = np.random.default_rng([self.seed, self.salt, 2, round_, row]).integers(of, size=length - common)
        return np.concatenate([head, own])


async def prompts_of(client: Client, workload: Workload, *, seed: int, salt: int, shared: float) -> Prompts:
    """How prompts are best made for a server that was probed.

    The workload's own texts where it has them; token ids where the server takes them; else words that are
    one token each, found by asking the server how many tokens it counts.

    Raises:
        InputError: ``shared`` is not from 0 to 1.
    """
    if not 0 <= shared <= 1:
        raise InputError(f"the shared prefix must be a share from 0 to 1; it is {shared}")
    lengths = workload.prompt_tokens
    if "prompt" in workload.extra:
        texts = [str(text) for text in workload.extra["prompt"]]
        return Prompts("texts", lengths, texts=texts)
    if client.abilities.token_ids:
        ids = await client.tokenize(" ".join(WORDS))
        known = np.asarray(np.unique(ids) if ids else _SAFE_IDS)
        return Prompts("token ids", lengths, seed, salt, ids=known, shared=shared)
    if not client.abilities.usage:
        doubt = "the server does not tell how long prompts are: they are as many words as tokens were wanted"
        return Prompts("words", lengths, seed, salt, words=WORDS, shared=shared, doubts=(doubt,))
    overhead = await _counted(client, [])
    words, doubts = await _worded(client, overhead)
    return Prompts("words", lengths, seed, salt, words=words, overhead=overhead, shared=shared, doubts=doubts)


async def _worded(client: Client, overhead: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words of one token each for this server, and a doubt where there are few."""
    words = await _single(client, WORDS, overhead)
    if len(words) >= _ENOUGH:
        return tuple(words), ()
    return WORDS, ("few words are one token each for this server: prompts are longer than wanted",)


async def _single(client: Client, words: Sequence[str], overhead: int) -> list[str]:
    """Those of the words that add one token each, found by halving."""
    added = await _counted(client, words) - overhead
    if added == len(words):
        return list(words)
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return [w for half in (words[:middle], words[middle:]) for w in await _single(client, half, overhead)]


async def _counted(client: Client, words: Sequence[str]) -> int:
    """Prompt tokens that the server counts for the anchor and these words."""
    body = client.body(" ".join([_ANCHOR, *words]), 1)
    try:
        usages = [piece.usage async for piece in client.stream(body) if piece.usage is not None]
    except RequestError as error:
        raise InputError(
            f"{client.server.shown} failed while prompts were being measured: {error}"
        ) from error
    return usages[-1].prompt_tokens if usages else 0
