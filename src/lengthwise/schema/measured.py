"""A run with its requests and where it comes from: what a file of records holds, simulated or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

SIMULATED, BENCH = "simulate", "bench"
IDLE_SHARE = 0.4
"""Share of a core below which a client was not what was measured."""


@dataclass(frozen=True)
class TokenTimes:
    """When pieces of the answers came, request after request.

    ``at_s`` [pieces] ascending within a request, on the clock of the records; ``tokens`` [pieces] how many
    came at once (0 where nobody told); request i has the rows ``start[i]`` to ``start[i + 1]``.
    """

    start: npt.NDArray[np.int64]
    at_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """What happened, what was asked for, and how far it can be trusted.

    Attributes:
        records: What happened. A measured run's ``arrival_s`` is when a request was due, not when a late
            client sent it, so that latencies hold the wait that users would have had; sums over steps that
            nobody saw are 0 and ``steps`` is None.
        workload: The requests in the same order; ``output_tokens`` is what was asked for.
        source: "simulate", "bench", or the program whose result was read ("vllm bench serve", "guidellm"...).
        facts: JSON-able: url, engine and version, model (as it is served), arguments, start (ISO), machine, clock;
            "prefix_cache", where the server tells: prompt tokens that it looked up in it and found there;
            "deployment", where it is known: model, "model_shape" (``shape_facts``), gpu, tp, pp, replicas, limits.
        doubts: What limits the trust, a sentence each: a late client, a partial run, lengths not kept.
        errors: Requests that failed, by what they failed of.
        tokens: When the pieces of the answers came, where it was kept.
        client_s: [n] the client's own part of each TTFT and JCT: from when a request was due until its headers
            went out, NaN where they never did. None: no client, or it did not say.
    """

    records: Records
    workload: Workload
    source: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    tokens: TokenTimes | None = None
    client_s: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if len(self.workload) != len(self.records.requests.arrival_s):
            raise InputError(
                f"records and workload must be of the same requests; they are of "
                f"{len(self.records.requests.arrival_s)} and {len(self.workload)}"
            )
        if self.client_s is not None and len(self.client_s) != len(self.workload):
            raise InputError(
                f"client_s must have a value a request; it has {len(self.client_s)} for {len(self.workload)}"
            )

    @property
    def is_simulated(self) -> bool:
        """Whether no engine was behind it."""
        return self.source == SIMULATED


def shape_facts(model: ModelSpec) -> dict[str, int]:
    """What a model is known by whatever it is called: fine-tunes and quantisations of it have the same."""
    attention, ffn = model.attention, model.ffn
    return {
        "layers": model.layers,
        "encoder_layers": model.encoder_layers,
        "hidden": model.hidden,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate": ffn.intermediate,
        "experts": ffn.experts,
    }
