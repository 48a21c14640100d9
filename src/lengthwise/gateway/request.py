"""A live request as the scheduler knows it, its predicted length, and how it ends."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

from lengthwise.schema.errors import InputError
from lengthwise.statistics import Floats

MAX_TOKENS = float(1 << 20)

BLOCK_CHARS, BLOCK_IDS = 256, 64  # length of a block: characters of a text, or token ids

PREFIX_BLOCKS = tuple(accumulate(range(23), lambda size, _: max(size + 1, size * 5 // 4), initial=1))
"""Lengths of hashed prefixes in blocks: 1 to 8, then each 20 to 25 % longer, up to 235 (60,160 characters)."""


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Hashes of a prompt's prefixes. Prompts that share a prefix have equal hashes for it.

    ``keys`` has one hash for each length in PREFIX_BLOCKS that the prompt reaches. A block has ``block_tokens`` tokens.
    """

    keys: tuple[int, ...] = ()
    block_tokens: float = 0.0

    def levels(self, bits: int) -> tuple[tuple[int, int], ...]:
        """Return (leading tokens, their hash masked by ``bits``) for each hash."""
        sizes = zip(PREFIX_BLOCKS, self.keys, strict=False)
        return tuple((round(size * self.block_tokens), key & bits) for size, key in sizes)


NO_PREFIX = PromptPrefix()


class PrefixHasher:
    """Hashes prefixes of prompts to 64 bits by keyed BLAKE2b.

    ``secret`` is the key, up to 64 bytes (None: random). Clients that do not know it cannot forge equal hashes.
    ``tenants`` are names by number: with equal secrets, gateways with other numbers hash a tenant's prompts alike.
    """

    def __init__(self, secret: bytes | None = None, tenants: Sequence[str] = ()) -> None:
        self._tenants = tenants
        self._keyed = blake2b(digest_size=8, key=os.urandom(32) if secret is None else secret)

    def of_text(self, text: str, tokens: int, *, model: str, tenant: int = 0) -> PromptPrefix:
        """Return the hashes of a text that has ``tokens`` tokens. They differ between models and between tenants."""
        if len(text) < BLOCK_CHARS:
            return NO_PREFIX
        keys = self._chain(("text", model, self._name(tenant)), text, BLOCK_CHARS)
        return PromptPrefix(keys, tokens * BLOCK_CHARS / len(text))

    def of_ids(self, ids: Sequence[int], *, model: str, tenant: int = 0) -> PromptPrefix:
        """Return the hashes of a prompt given as token ids. They differ between models and between tenants."""
        if len(ids) < BLOCK_IDS:
            return NO_PREFIX
        ids = ids[: PREFIX_BLOCKS[-1] * BLOCK_IDS]
        try:
            kind, packed = "ids", array("I", ids)
        except OverflowError:  # no engine has ids beyond 32 bits, but a client may send them
            kind, packed = "wide ids", array("Q", [one & (1 << 64) - 1 for one in ids])
        return PromptPrefix(self._chain((kind, model, self._name(tenant)), packed, BLOCK_IDS), float(BLOCK_IDS))

    def _name(self, tenant: int) -> str | int:
        return self._tenants[tenant] if tenant < len(self._tenants) else tenant

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
class SloClass:
    """Requests with limits of latency. A request that is predicted to exceed one is refused at once."""

    name: str  # as keys and the header X-SLO-Class name it
    ttft_s: float = float("inf")  # limit from arrival to the first token
    jct_s: float = float("inf")  # limit from arrival to the last token

    def __post_init__(self) -> None:
        if not (self.name and self.ttft_s > 0 and self.jct_s > 0 and min(self.ttft_s, self.jct_s) < float("inf")):
            raise InputError(
                "a class in slo_classes must have a name and a ttft_s or jct_s above 0; it is "
                f"{self.name!r}, {self.ttft_s!r}, {self.jct_s!r}"
            )


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request, on which the request's order in the queue, its worker and its retries depend."""

    tenant: int = 0  # number in ``edge.Tenants``; 0 anonymous
    priority: int = 0  # priority class of the key; a smaller one is served earlier
    session: str = ""  # name of the session; its requests prefer one worker; "" none
    address: str = ""  # network address (of IPv6 the /64); "" unknown
    deadline_s: float = float("inf")  # time on the gateway's clock until which the client waits for its first byte
    workers: frozenset[str] | None = None  # names of the workers that may run its request; None: all
    slo: SloClass | None = None  # its limits of latency


ANONYMOUS = Client()
UNAUTHENTICATED = -1  # the tenant of a request that is refused before a key is accepted


class InvalidBodyError(ValueError):
    """The relay cannot parse a body that the edge has accepted, for example because a number exceeds a double."""


@dataclass(slots=True, kw_only=True)
class ClientRequest:
    """A request as the edge passes it to the relay: the received body, and values checked by the edge."""

    api: str  # name of the route in ``apis.APIS``, such as "chat" or "completions"
    body: bytes  # JSON object in UTF-8, or a form, without duplicates of fields that the gateway reads
    model: str
    stream: bool
    text: str  # text of the prompt, for length predictors; "" for token ids
    prompt_tokens: int
    prefix: PromptPrefix = NO_PREFIX
    max_tokens: int | None  # longest output; None if the client sets none
    choices: int  # number of outputs: the larger of ``n`` and ``best_of`` for each prompt
    arrival_s: float  # when the body was complete, on the gateway's clock
    headers: list[tuple[str, str]]  # headers for the engine
    client: Client = ANONYMOUS
    memory_bytes: int = 0  # estimated memory of body, text and fields
    charge: Callable[[Request], Awaitable[None]] | None = None  # charges the predicted tokens to quotas, or raises
    _fields: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the body as a dict, parsed on the first call. Raises InvalidBodyError if it is no valid JSON."""
        if self._fields is None:
            import msgspec

            try:
                self._fields = msgspec.json.decode(self.body, type=dict[str, Any])
            except msgspec.DecodeError as error:
                reason = str(error).partition(" - at ")[0]
                raise InvalidBodyError(f"The body must be valid JSON: {reason}.") from None
        return self._fields

    def release(self, *, text: bool, retained_bytes: int) -> None:
        """Free body, fields and, if ``text``, the text, which only a restart needs. ``retained_bytes`` stay in use."""
        self.body, self._fields = b"", None
        if text:
            self.text = ""
        self.memory_bytes = retained_bytes + sys.getsizeof(self.text)


class Outcome(StrEnum):
    """How a request ends. An admitted request has exactly one outcome, which is never REFUSED."""

    FINISHED = "finished"
    REFUSED = "refused"  # the gateway did not admit it, and sent an error status
    REJECTED = "rejected"  # an engine answered with 4xx, which the client received
    FAILED = "failed"  # no engine could finish it, or the gateway stopped
    CLIENT_GONE = "client_gone"
    EXPIRED = "expired"  # it waited ``no_engine_s`` while no engine served its model, or beyond its deadline


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Prediction of the total output length, and the ``source`` of this prediction."""

    total_tokens: float  # statistic of the predicted total length, by which requests are ordered
    # "predictor", "prior" (no predictor, or it was late or failed), "requested" (the client fixed the length), "oracle"
    source: str = "prior"
    quantiles: Floats | None = None  # [25] float64 at ``predict.LEVELS``; None if only the statistic is known
    at_tokens: int = 0  # generated tokens when it was made

    def remaining_tokens(self, generated_tokens: int) -> float:
        """Return the predicted remaining tokens, at least 1."""
        return max(1.0, self.total_tokens - generated_tokens)


DEFAULT_PREDICTION = LengthPrediction(256.0)


@dataclass(slots=True, eq=False)
class FullQueues:
    """Counts reports of a full queue that a request has received from engines since its last token."""

    last_s: float = float("inf")  # time of the last report; inf: none
    count: int = 0
    count_while_accepting: int = 0  # reports by an engine that had accepted another request since the report before
    count_queued_alone: int = 0  # of these, reports while no other request waited in the engine's queue


@dataclass(slots=True, eq=False)
class DispatchState:
    """Where a request waits or runs, and the history of its waits, dispatches and preemptions."""

    worker: str = ""  # current worker; "" while it waits
    queued_for_s: float = 0.0  # total time in the queue until the last dispatch
    enqueued_at_s: float = float("nan")  # when it last joined the queue
    dispatched_s: float = float("nan")  # when it was last dispatched
    dispatch_number: int = -1  # number of its last dispatch, counted over all requests; -1 never dispatched
    last_preemption: int = 0  # number of its last preemption, counted over all requests; 0 never preempted
    preemptions: int = 0  # number of its preemptions
    cached_tokens: int = 0  # prompt tokens that were probably cached at its last dispatch
    kv_tokens: int = 0  # size of its last worker's KV cache; 0: unknown
    avoid: frozenset[str] = frozenset()  # workers that have failed the request
    single_chunk: bool = False  # whether the engine sends the response in one chunk, so that its first token is unknown
    full_queues: FullQueues = field(default_factory=FullQueues)
    unseen_tokens: float = 0.0  # estimated output if its client left before any token was counted
    reported_cached_tokens: float = float("nan")  # prompt tokens that were cached, as the engine reports them
    reported_prompt_tokens: int = 0  # tokens of the prompt, as the engine reports them; 0 if it does not

    def waited_s(self, now_s: float) -> float:
        """Return the total queueing time of a request that waits."""
        return self.queued_for_s + (now_s - self.enqueued_at_s)


@dataclass(slots=True, eq=False)
class Request:
    """A live request, created by the relay. Only the scheduler dispatches it and counts its tokens."""

    id: int  # unique in this process, in order of arrival
    arrival_s: float  # when its body was complete, on the gateway's clock
    model: str
    prompt_tokens: int
    max_tokens: int  # requested maximum; the gateway's limit if the client sets none
    client: Client = ANONYMOUS
    body_bytes: int = 0
    prefix: PromptPrefix = NO_PREFIX  # requests with a common prefix prefer one worker
    preemptible: bool = False  # whether a preemption leaves its answer unchanged
    length_prediction: LengthPrediction = DEFAULT_PREDICTION
    fixed_tokens: int = 0  # output length that the client fixed; 0 if it fixed none
    choices: int = 1
    streamed: bool = True  # whether the client gets the response as a stream, not at its end
    generated_tokens: int = 0
    dispatch: DispatchState = field(default_factory=DispatchState)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Answer to a request that the gateway does not serve: HTTP status, reason for metrics, message, retry time."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None


DRAINING = Refusal(503, "draining", "The gateway is shutting down; send the request again.", 1.0)
