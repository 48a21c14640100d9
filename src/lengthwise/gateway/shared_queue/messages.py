"""Messages between gateways: operations on requests, and the envelopes that number them."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

import msgspec

from lengthwise.gateway.core.ranking import Entry, State
from lengthwise.gateway.request import Client, DispatchState, LengthPrediction, PromptPrefix, Refusal, Request, SloClass

Operation = tuple[Any, ...]  # name of an event or decision, and its arguments as JSON values
MAX_BYTES = 7800  # of a message; PostgreSQL's NOTIFY carries up to 7,999
_MAX_SESSION_CHARS = 64
encode = msgspec.json.Encoder(enc_hook=lambda number: number.item()).encode  # a predictor may return NumPy's numbers


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Operations of one sender, in order. A session begins with the operation ``join`` in the envelope number 0."""

    sender: str
    epoch: int  # of the leader that sends or receives it; larger than those of all leaders before
    session: int  # of the member that sends or receives it; 0 before it joins
    number: int  # counts the envelopes of a session in one direction; -1 outside of a session
    operations: tuple[msgspec.Raw, ...]

    def decoded(self) -> list[list[Any]]:
        """Return the operations as lists of a name and its arguments."""
        return [msgspec.json.decode(one, type=list[Any]) for one in self.operations]


def envelopes(sender: str, epoch: int, session: int, number: int, operations: list[Operation]) -> list[bytes]:
    """Return envelopes of at most MAX_BYTES with the operations. Raises ValueError for one that is too large."""
    groups, size = [list[msgspec.Raw]()], 0
    for operation in operations:
        encoded = encode(operation)
        if len(encoded) > MAX_BYTES - 200:
            raise ValueError(f"an operation must have at most {MAX_BYTES - 200} bytes; it has {len(encoded)}")
        if groups[-1] and size + len(encoded) > MAX_BYTES - 200:
            groups.append([])
            size = 0
        groups[-1].append(msgspec.Raw(encoded))
        size += len(encoded) + 1
    return [
        msgspec.json.encode(Envelope(sender, epoch, session, number + at, tuple(group)))
        for at, group in enumerate(groups)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value


def prediction_fields(prediction: LengthPrediction) -> list[Any]:
    """Return a prediction as JSON values, with its quantiles to six digits."""
    quantiles = prediction.quantiles
    shown = None if quantiles is None else [float(f"{one:.6g}") for one in quantiles.tolist()]
    return [prediction.total_tokens, prediction.source, shown, prediction.at_tokens]


def read_prediction(fields: list[Any]) -> LengthPrediction:
    """Return the prediction of ``prediction_fields``. A length of null is NaN, which JSON does not have."""
    import numpy as np

    total, source, quantiles, at_tokens = fields
    array = None if quantiles is None else np.array(quantiles, float)
    return LengthPrediction(math.nan if total is None else float(total), source, array, at_tokens)


def request_fields(now_s: float, request: Request, tenant: str) -> dict[str, Any]:
    """Return what the leader must know about a request, as JSON values. Times are relative to now."""
    client, session = request.client, request.client.session
    if len(session) > _MAX_SESSION_CHARS:
        session = blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    slo = client.slo
    return {
        "age_s": now_s - request.arrival_s,
        "model": request.model,
        "tokens": [request.prompt_tokens, request.max_tokens, request.generated_tokens, request.body_bytes],
        "client": [tenant, client.priority, session, _finite(client.deadline_s - now_s)],
        "workers": None if client.workers is None else sorted(client.workers),
        "slo": None if slo is None else [slo.name, _finite(slo.ttft_s), _finite(slo.jct_s)],
        "prefix": [list(request.prefix.keys), request.prefix.block_tokens],
        "prediction": prediction_fields(request.length_prediction),
        "flags": [request.preemptible, request.streamed, request.choices],
    }


def read_request(now_s: float, id: int, fields: dict[str, Any], tenant: int, names: frozenset[str]) -> Request:  # noqa: A002
    """Return the request of ``request_fields``. Its gateway has the workers ``names``."""
    prompt_tokens, max_tokens, generated_tokens, body_bytes = fields["tokens"]
    _, priority, session, left_s = fields["client"]
    preemptible, streamed, choices = fields["flags"]
    keys, block_tokens = fields["prefix"]
    slo = fields["slo"]
    allowed = names if fields["workers"] is None else names & set(fields["workers"])
    client = Client(
        tenant,
        priority,
        session,
        deadline_s=now_s + _or_inf(left_s),
        workers=allowed,
        slo=None if slo is None else SloClass(slo[0], _or_inf(slo[1]), _or_inf(slo[2])),
    )
    return Request(
        id,
        now_s - fields["age_s"],
        fields["model"],
        prompt_tokens,
        max_tokens,
        client,
        body_bytes,
        PromptPrefix(tuple(keys), block_tokens),
        preemptible,
        read_prediction(fields["prediction"]),
        choices=choices,
        streamed=streamed,
        generated_tokens=generated_tokens,
    )


def state_fields(now_s: float, entry: Entry) -> list[Any]:
    """Return the worker of a request ("": queued), the seconds since then, and its history, as JSON values."""
    dispatch, running = entry.request.dispatch, entry.state in (State.RUNNING, State.PREEMPTING)
    since_s = dispatch.dispatched_s if running else dispatch.enqueued_at_s
    past = [entry.dispatches, dispatch.preemptions, entry.charged_tokens, dispatch.queued_for_s]
    return [entry.worker if running else "", now_s - since_s, past, entry.preemption.nonpreemptible]


def read_dispatch(fields: list[Any]) -> DispatchState:
    """Return the history of ``state_fields``."""
    _, preemptions, _, queued_for_s = fields[2]
    return DispatchState(queued_for_s=queued_for_s, preemptions=preemptions)


def refusal_fields(refusal: Refusal) -> list[Any]:
    """Return a refusal as JSON values."""
    return [refusal.status, refusal.reason, refusal.message, refusal.retry_after_s]
