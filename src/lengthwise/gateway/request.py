"""A live request as the scheduler knows it, its predicted length, and its outcomes."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MAX_TOKENS = float(1 << 20)

BLOCK_LETTERS, BLOCK_IDS = 256, 64  # size of a block of text, and of token ids

PREFIX_BLOCKS = tuple(accumulate(range(23), lambda size, _: max(size + 1, size * 5 // 4), initial=1))
"""Lengths of the prompt prefixes that are hashed, in blocks: 1 to 8, then each 25 % longer; up to 60,000 letters."""


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Hashes of a prompt's leading blocks, one for each of PREFIX_BLOCKS: equal as long as two prompts agree."""

    keys: tuple[int, ...] = ()
    block_tokens: float = 0.0


EMPTY = PromptPrefix()


class PrefixHasher:
    """Hashes prompt prefixes to 64 bits by keyed BLAKE2b; a key covers everything up to the end of its block.

    Without the secret (at most 64 bytes; None draws one) no client can construct two prompts that share a key.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._keyed = blake2b(digest_size=8, key=os.urandom(32) if secret is None else secret)

    def of_text(self, text: str, tokens: int, *, model: str, tenant: int = 0) -> PromptPrefix:
        """Return the prefix of a text of so many tokens; other models and tenants get other keys."""
        if len(text) < BLOCK_LETTERS:
            return EMPTY
        keys = self._chain(("text", model, tenant), text, BLOCK_LETTERS)
        return PromptPrefix(keys, tokens * BLOCK_LETTERS / len(text))

    def of_ids(self, ids: Sequence[int], *, model: str, tenant: int = 0) -> PromptPrefix:
        """Return the prefix of token ids; other models and tenants get other keys."""
        if len(ids) < BLOCK_IDS:
            return EMPTY
        ids = ids[: PREFIX_BLOCKS[-1] * BLOCK_IDS]
        try:
            kind, packed = "ids", array("I", ids)
        except OverflowError:  # beyond 32 bits, which no engine has: 64 bits of each id, and a kind of their own
            kind, packed = "wide ids", array("Q", [one & (1 << 64) - 1 for one in ids])
        return PromptPrefix(self._chain((kind, model, tenant), packed, BLOCK_IDS), float(BLOCK_IDS))

    def _chain(self, context: tuple[str | int, ...], prompt: str | array[int], block: int) -> tuple[int, ...]:
        digest = self._keyed.copy()
        digest.update(repr(context).encode("utf-8", "surrogatepass"))
        keys = []
        for before, size in pairwise((0, *PREFIX_BLOCKS)):
            if size * block > len(prompt):
                break
            part = prompt[before * block : size * block]
            digest.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part.tobytes())
            keys.append(int.from_bytes(digest.digest(), "little"))
        return tuple(keys)


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request: what its place in the queue, its worker and its retries depend on."""

    tenant: int = 0  # number in ``edge.Tenants``; 0 anonymous
    priority: int = 0  # class of the key; smaller is earlier
    session: str = ""  # name that ties requests together, which prefer one worker; "" none
    address: str = ""  # network address (of IPv6 the /64); "" unknown
    deadline_s: float = float("inf")  # when it gives up unless the answer has begun, on the gateway's clock


ANONYMOUS = Client()


class InvalidBodyError(ValueError):
    """A field that only the relay reads cannot be parsed, such as a number beyond a double."""


@dataclass(slots=True, kw_only=True)
class ClientRequest:
    """A request for a completion as the edge passes it to the relay: the body as received, and checked values."""

    api: str  # "chat" or "completions"
    body: bytes  # a JSON object in UTF-8, without duplicates of the fields that the gateway reads
    model: str
    stream: bool
    text: str  # of the prompt, as length predictors are trained on; "" for token ids
    prompt_tokens: int
    prefix: PromptPrefix = EMPTY
    max_tokens: int | None  # longest output; None if the client sets none
    n: int  # choices of all prompts, ``n`` or ``best_of`` each
    arrival_s: float  # end of the body, on the gateway's clock
    headers: list[tuple[str, str]]  # headers for the engine
    client: Client = ANONYMOUS
    memory_bytes: int = 0  # estimated memory of body, text and fields
    charge: Callable[[Request], None] | None = None  # charges the predicted tokens to quotas, or raises
    _fields: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the complete body as a dict, parsed on the first call; raise InvalidBodyError if it cannot be."""
        if self._fields is None:
            import msgspec

            try:
                self._fields = msgspec.json.decode(self.body, type=dict[str, Any])
            except msgspec.DecodeError as error:
                reason = str(error).partition(" - at ")[0]
                raise InvalidBodyError(f"The body must be valid JSON: {reason}.") from None
        return self._fields

    def release(self, *, text: bool, retained_bytes: int) -> None:
        """Free body, fields and (``text``) the text: only a restart needs them; ``retained_bytes`` stay in use."""
        self.body, self._fields = b"", None
        if text:
            self.text = ""
        self.memory_bytes = retained_bytes + sys.getsizeof(self.text)


class Outcome(StrEnum):
    """How a request ends; every request has exactly one outcome, and they add up to the arrivals."""

    FINISHED = "finished"
    REFUSED = "refused"  # not admitted: limits, rate, queue full, predicted wait (429, 503)
    REJECTED = "rejected"  # the engine rejected it (4xx): the client's own fault, passed on
    FAILED = "failed"  # no engine could finish it
    CLIENT_GONE = "client_gone"
    EXPIRED = "expired"  # it waited too long without an engine, or beyond its own deadline


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Prediction of an output's total length; never the true length."""

    total_tokens: float  # the statistic that orders, tokens so far included
    # "predictor", "prior" (late, failed or none), "requested" (the client fixed the length), "oracle" (tests).
    source: str = "prior"
    quantiles: Floats | None = None  # [25] float64 at ``predict.LEVELS``; None where only the statistic is known
    at_tokens: int = 0  # generated tokens at its time

    def remaining_tokens(self, generated_tokens: int) -> float:
        """Return the predicted tokens still to come, at least 1."""
        return max(1.0, self.total_tokens - generated_tokens)


DEFAULT_PREDICTION = LengthPrediction(256.0)


@dataclass(slots=True, eq=False)
class DispatchState:
    """Where a request waits or runs, and what its dispatches have led to."""

    worker: str = ""  # current worker; "" while it waits
    queued_for_s: float = 0.0  # total time in the queue until the last dispatch
    queued_s: float = float("nan")  # when it joined the queue last
    dispatched_s: float = float("nan")  # last dispatch
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens probably in the prefix cache of its last worker
    avoid: frozenset[str] = frozenset()  # workers that failed it
    single_chunk: bool = False  # whether the engine sends the response in one chunk, so that there is no first token

    def waited_s(self, now_s: float) -> float:
        """Return the total time in the queue of a request that waits."""
        return self.queued_for_s + (now_s - self.queued_s)


@dataclass(slots=True, eq=False)
class Request:
    """A live request. The relay creates it; only the scheduler counts its tokens and dispatches it."""

    id: int  # unique in this process, in order of arrival
    arrival_s: float  # end of its body, on the gateway's clock
    model: str
    prompt_tokens: int
    max_tokens: int  # requested maximum (the gateway's limit where there is none)
    client: Client = ANONYMOUS
    body_bytes: int = 0
    prefix: PromptPrefix = EMPTY  # requests with a common prefix prefer one worker
    preemptible: bool = False  # whether a preemption cannot change its answer
    length_prediction: LengthPrediction = DEFAULT_PREDICTION
    requested_tokens: int = 0  # length that the client fixed; 0 none
    choices: int = 1
    buffered: bool = False  # whether the client gets the response at its end (no stream)
    generated_tokens: int = 0
    dispatch: DispatchState = field(default_factory=DispatchState)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the gateway does not serve a request: HTTP status, reason for metrics, message, when to retry."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None


DRAINING = Refusal(503, "draining", "The gateway is shutting down; send the request again.", 1.0)
