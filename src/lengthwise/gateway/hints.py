"""What an engine that orders by itself is told of a request: its priority, or its predicted length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.plugin.hint import CLASS, LATER, MOST_CLASS, PREDICTED
from lengthwise.gateway.request import Floats, Request
from lengthwise.predict.distribution import LEVELS

PRIORITY, XARGS = "priority", "vllm_xargs"
MOST_PRIORITY = (1 << 31) - 1
_POINTS = np.arange(0.5, 64) / 64
_LOOKS = 8
"""Lengths are told for 1, 2, 4, ... windows of tokens, so many at most."""
_QUANTILES = {"median": 0.5, "p80": 0.8, "p90": 0.9}


class Worker(Protocol):
    """An engine (``fleet.Worker``)."""

    @property
    def kind(self) -> str:
        """Whose engine it is."""
        ...

    @property
    def priority_sign(self) -> int:
        """1: smaller priorities go first there, -1: larger, 0: it takes none."""
        ...


Hinted = Callable[[Request, Any, bytes], bytes]


class Hints:
    """Fields beside a request's own.

    Args:
        config: Its mode says what is told; modes in which the gateway orders tell nothing.
        engine_priority: Class and predicted length as one number, smaller = earlier.
    """

    def __init__(self, config: GatewayConfig, engine_priority: Callable[[Request], int]) -> None:
        self._mode, self._statistic = config.order.mode, config.forecasting.statistic
        self._window, self._priority = config.order.window_tokens, engine_priority

    def fields(self, request: Request, worker: Worker) -> dict[str, Any]:
        """What this engine is told of the request; {} nothing."""
        if self._mode == "engine-priority" and worker.priority_sign:
            value = worker.priority_sign * self._priority(request)
            return {PRIORITY: max(-MOST_PRIORITY, min(MOST_PRIORITY, value))}
        if self._mode == "engine-plugin" and worker.kind == "vllm":
            return {XARGS: self._lengths(request)}
        return {}

    def hinted(self, request: Request, worker: Worker, body: bytes) -> bytes:
        """The body with these fields; in no mode does a client's own stand against them."""
        fields = self.fields(request, worker)
        return with_fields(body, fields) if fields else body

    def _lengths(self, request: Request) -> dict[str, Any]:
        """Of the output that is still to come: what has been generated is a part of the engine's prompt."""
        so_far = request.generated_tokens
        told: dict[str, Any] = {
            PREDICTED: round(min(request.forecast.remaining_tokens(so_far), float(request.max_tokens)), 1),
            CLASS: max(-MOST_CLASS, min(MOST_CLASS, request.priority)),
        }
        row = request.forecast.quantiles
        later = [] if row is None else self._later(row, so_far, request.max_tokens)
        return told | {LATER: later} if later else told

    def _later(self, row: Floats, so_far: int, max_tokens: int) -> list[float]:
        """[2 k] after so many tokens of this run, the length that is then predicted, in turns."""
        lengths = np.interp(_POINTS, LEVELS, row)
        found: list[float] = []
        for look in range(_LOOKS):
            at = self._window << look
            left = lengths[lengths > so_far + at]
            if not len(left) or so_far + at >= max_tokens:
                break
            found += [at, round(self._one(left) - so_far, 1)]
        return found

    def _one(self, lengths: Floats) -> float:
        level = _QUANTILES.get(self._statistic)
        return float(lengths.mean() if level is None else lengths[int(level * len(lengths))])


def hinted_for(config: GatewayConfig, engine_priority: Callable[[Request], int]) -> Hinted | None:
    """What the relay adds to bodies; None: nothing, in modes in which the gateway orders."""
    if config.order.mode not in ("engine-priority", "engine-plugin"):
        return None
    return Hints(config, engine_priority).hinted


def with_fields(body: bytes, fields: dict[str, Any]) -> bytes:
    """The body of an object with these fields; tables of the same name are merged, other values replaced.

    Only where one of the names may be there already is more than the first byte looked at: it stands there as
    it is, or spelt with escapes.
    """
    import msgspec

    if b"\\u" in body or any(b'"%b"' % name.encode() in body for name in fields):
        told = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if not told.keys().isdisjoint(fields):
            return msgspec.json.encode(
                {**told, **{name: _merged(told.get(name), of) for name, of in fields.items()}}
            )
    start = body.index(b"{") + 1
    comma = b"" if body[start:].lstrip(b" \t\r\n").startswith(b"}") else b","
    return body[:start] + msgspec.json.encode(fields)[1:-1] + comma + body[start:]


def _merged(theirs: Any, ours: Any) -> Any:
    import msgspec

    if theirs is None or not isinstance(ours, dict):
        return ours
    told = msgspec.json.decode(theirs)
    return {**told, **ours} if isinstance(told, dict) else ours
