"""A request as the scheduler knows it, what is predicted of it, and how it ends."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

BLOCK_LETTERS, BLOCK_IDS = 256, 64
"""A block of text, and of token ids."""


def _sizes(count: int) -> tuple[int, ...]:
    sizes = [1]
    while len(sizes) < count:
        sizes.append(max(sizes[-1] + 1, sizes[-1] * 5 // 4))
    return tuple(sizes)


SIZES = _sizes(24)
"""Leading blocks that are hashed: each of the first 8, then a quarter more each time; 60,000 letters at most."""


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """A prompt's leading blocks.

    Attributes:
        keys: One for each of SIZES that it has: two prompts have the same one where all up to there is the same.
        block_tokens: Tokens of a block.
    """

    keys: tuple[int, ...] = ()
    block_tokens: float = 0.0


EMPTY = PromptPrefix()


class PrefixHasher:
    """Makes them, of 64 bits, by BLAKE2b under a secret: a key is of all up to the end of its block.

    Keys leave the process nowhere, and without the secret nobody makes two prompts that share one. Two that are equal
    by chance only send a request where it is computed anew. It takes 25 to 70 us for 8,000 letters,
    about 1 ms for any prompt.

    Args:
        secret: At most 64 bytes; None draws one that ends with the process.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._keyed = blake2b(digest_size=8, key=os.urandom(32) if secret is None else secret)

    def of_text(self, text: str, tokens: int, *, model: str, tenant: int = 0) -> PromptPrefix:
        """Of a text with so many tokens; the same text of another tenant, or for another model, is another."""
        if len(text) < BLOCK_LETTERS:
            return EMPTY
        keys = _chained(self._started("text", model, tenant), text, BLOCK_LETTERS)
        return PromptPrefix(keys, tokens * BLOCK_LETTERS / len(text))

    def of_ids(self, ids: Sequence[int], *, model: str, tenant: int = 0) -> PromptPrefix:
        """Of token ids."""
        if len(ids) < BLOCK_IDS:
            return EMPTY
        kind, prefix = _words(ids[: SIZES[-1] * BLOCK_IDS])
        return PromptPrefix(_chained(self._started(kind, model, tenant), prefix, BLOCK_IDS), float(BLOCK_IDS))

    def _started(self, *of: str | int) -> blake2b:
        """A hash that nothing of the prompt has gone into yet."""
        begun = self._keyed.copy()
        begun.update(repr(of).encode("utf-8", "surrogatepass"))
        return begun


def _words(ids: Sequence[int]) -> tuple[str, array[int]]:
    """Ids of 32 bits each. Where one is beyond, which no engine has, 64 bits of each; none is taken for the others."""
    try:
        return "ids", array("I", ids)
    except OverflowError:
        return "wide ids", array("Q", [one & (1 << 64) - 1 for one in ids])


def _chained(started: blake2b, prompt: str | array[int], block: int) -> tuple[int, ...]:
    keys, at, length = [], 0, len(prompt)
    for size in SIZES:
        end = size * block
        if end > length:
            break
        started.update(_as_bytes(prompt[at:end]))
        keys.append(int.from_bytes(started.digest(), "little"))
        at = end
    return tuple(keys)


def _as_bytes(piece: str | array[int]) -> bytes:
    return piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece.tobytes()


Floats = npt.NDArray[np.float64]
MAX_TOKENS = float(1 << 20)


class Outcome(StrEnum):
    """The bucket in which a request ends; every request is in exactly one, and they add up to what arrived."""

    FINISHED = "finished"
    REFUSED = "refused"
    """Not let in: limits, rate, queue full, predicted wait (429, 503)."""
    REJECTED = "rejected"
    """The engine said no (4xx): the client's own fault, passed on."""
    FAILED = "failed"
    """No engine could finish it."""
    CLIENT_GONE = "client_gone"
    EXPIRED = "expired"
    """It waited while no engine was there, or beyond its own deadline."""


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """What is predicted of an output's whole length; never the true one.

    Attributes:
        total_tokens: The statistic that orders (tokens so far included).
        source: "predictor", "prior" (late, failed or none), "told" (the client fixed it), "oracle" (tests).
        quantiles: [25] float64 at ``predict.LEVELS``, or None where only the statistic is known.
        at_tokens: The tokens that had been generated when it was made.
    """

    total_tokens: float
    source: str = "prior"
    quantiles: Floats | None = None
    at_tokens: int = 0

    def remaining_tokens(self, generated_tokens: int) -> float:
        """What is still to come, at least 1."""
        return max(1.0, self.total_tokens - generated_tokens)


NO_FORECAST = LengthPrediction(256.0)


@dataclass(slots=True, eq=False)
class Request:
    """One request, live: the edge makes it, the scheduler alone changes what is below the line.

    Attributes:
        id: Unique in this process, in order of arrival.
        arrival_s: When its body had come, on the gateway's clock.
        model: The name that the client asked for.
        prompt_tokens: Counted or estimated from the text.
        max_tokens: The longest output it asked for (the limit's, where it did not).
        tenant: Number of the tenant (0: anonymous).
        priority: Class; smaller goes first.
        body_bytes: What it holds of the queue's bytes.
        session: Requests of one session like the same engine; "" none.
        leading: How its prompt begins: others that begin alike like the same engine.
        resumable: Whether a cut cannot change its answer.
        length_prediction: What is predicted now.
        deadline_s: When the client gives up unless its answer has begun, on the gateway's clock; inf unknown.
        told_tokens: The length that the client fixed (``forecast.told_tokens``); 0: none.
        choices: Outputs that were asked for; lengths are learnt from one alone.
        at_once: Whether its engine tells nothing of its answer before the end: what comes first is all, no first token.
        complete: Whether its client gets the answer in one piece, at its end (it is not streamed).
    """

    id: int
    arrival_s: float
    model: str
    prompt_tokens: int
    max_tokens: int
    tenant: int = 0
    priority: int = 0
    body_bytes: int = 0
    session: str = ""
    prefix: PromptPrefix = EMPTY
    resumable: bool = False
    length_prediction: LengthPrediction = NO_FORECAST
    deadline_s: float = float("inf")
    requested_tokens: int = 0
    choices: int = 1
    single_chunk: bool = False
    buffered: bool = False
    # Of the scheduler:
    generated_tokens: int = 0
    worker: str = ""
    """Where it runs; "" while it waits."""
    queued_for_s: float = 0.0
    """In the queue, in all, up to its last dispatch."""
    queued_s: float = field(default=float("nan"))
    """When it joined the queue last."""
    dispatched_s: float = field(default=float("nan"))
    preemptions: int = 0
    cached_tokens: int = 0
    """Of its prompt, believed to be in the cache of the worker that it was sent to last."""
    avoid: frozenset[str] = frozenset()
    """Workers that failed it."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not served: an HTTP status, what to tell, and when to come again (None: nothing to say)."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None
