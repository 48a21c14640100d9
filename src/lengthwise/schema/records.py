"""What happened: a row a request, a row a step, sums a replica. Columns, no live objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec
from lengthwise.schema.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Status(IntEnum):
    """The bucket in which a request ended; every request is in exactly one."""

    FINISHED = 0
    REJECTED = 1
    TIMED_OUT = 2
    UNFINISHED = 3


class Rejection(IntEnum):
    """Why not even an idle replica could take a rejected request; the last: who it comes after did not finish."""

    NONE = 0
    PROMPT_REACHES_MAX_MODEL_LEN = 1
    PROMPT_ABOVE_TOKEN_BUDGET = 2
    PROMPT_ABOVE_KV_MEMORY = 3
    PARENT_NOT_FINISHED = 4


@dataclass(frozen=True)
class RequestRecords:
    """[n] columns in the order of the workload; a time that never came is NaN.

    ``output_tokens`` counts what was produced (0 when rejected); ``replica`` is -1 for a
    request that no replica took. ``scheduled_s`` is when it was first put into a step.
    ``arrival_s`` is when the client sent it: what it waited before the engine (``CostTables.front``) is in every time
    that counts from there, and in ``queued_for_s``: time spent in front, queues and bins in all, up to the last
    admission or the end.
    ``rejection`` (Refusal) says why a rejected one could never run. One that came after others
    (``Workload.after``) arrived when it was sent, or when it was refused because one of these had not
    finished. In a closed loop that was cut off, and behind requests that were, those that were never let in
    have arrival NaN.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    status: npt.NDArray[np.int8]
    replica: npt.NDArray[np.int32]
    scheduled_s: Floats
    first_token_s: Floats
    finished_s: Floats
    preemptions: npt.NDArray[np.int32]
    queued_for_s: Floats
    rejection: npt.NDArray[np.int8]


@dataclass(frozen=True)
class StepRecords:
    """[m] columns, a row a step in the order in which steps were formed.

    ``start_s`` is when the step was formed, ``end_s`` when its last stage ended.
    ``prefill_tokens`` of ``prefill_seqs`` prompts and one token for each of ``decode_seqs``
    were computed; ``kv_blocks`` were held and ``waiting`` requests waited when it was formed.
    """

    start_s: Floats
    end_s: Floats
    replica: Ints
    decode_seqs: Ints
    prefill_seqs: Ints
    prefill_tokens: Ints
    kv_blocks: Ints
    waiting: Ints


@dataclass(frozen=True)
class TokenGaps:
    """Times between consecutive tokens of a request (TBT, also called ITL), all requests pooled.

    ``histogram[k]`` counts gaps in [``edges_s[k]``, ``edges_s[k+1]``), the last bin also larger
    ones; but for the first, a bin is at most 1/128 of its lower edge wide, so that a quantile
    read at a bin's middle is within 0.4 % of the true one. Small runs also keep every gap:
    ``gap_s``, ascending, with ``count`` (how many tokens had it), else both are None.
    """

    histogram: Ints
    edges_s: Floats
    total: int
    sum_s: float
    max_s: float
    gap_s: Floats | None
    count: Ints | None


@dataclass(frozen=True)
class ReplicaTotals:
    """[replicas] sums over all steps. The ``*_s`` columns are stage-seconds: over all PP stages.

    ``layer_s`` to ``send_s`` split the stages' busy time by where it went; ``busy_s`` is the
    time in which at least one step was in flight; ``tokens`` counts computed tokens,
    recomputed ones included; ``attention_pairs`` counts (query, key) pairs; ``kv_read_tokens``
    counts cached tokens read by decodes.
    """

    steps: Ints
    tokens: Ints
    attention_pairs: Floats
    kv_read_tokens: Floats
    busy_s: Floats
    layer_s: Floats
    comm_s: Floats
    prefill_attention_s: Floats
    decode_attention_s: Floats
    host_s: Floats
    head_s: Floats
    first_s: Floats
    send_s: Floats
    swap_s: Floats
    kv_block_s: Floats


@dataclass(frozen=True)
class TimeSeries:
    """Sums over all replicas by time bin of ``bin_s`` seconds; a step counts where it ends.

    ``step_s`` is time in steps; dividing the ``*_s`` products by it gives means over steps.
    """

    bin_s: float
    step_s: Floats
    seqs_s: Floats
    waiting_s: Floats
    kv_blocks_s: Floats
    prefill_tokens: Floats
    output_tokens: Floats


@dataclass(frozen=True)
class Records:
    """All that a run left behind. ``end_s`` is the time of the last event.

    Where the time limit left requests unfinished, ``end_s`` is the limit, or the end of the last
    step under way at it if that is later: such a step counts whole, but hands out no tokens.
    """

    requests: RequestRecords
    steps: StepRecords | None
    gaps: TokenGaps
    totals: ReplicaTotals
    series: TimeSeries
    end_s: float
    seed: int
    name: str = ""


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
        metadata: JSON-able: url, engine and version, model (as it is served), arguments, start (ISO), machine, clock;
            "prefix_cache", where the server tells: prompt tokens that it looked up in it and found there;
            "deployment", where it is known: model, "model_shape" (``shape_facts``), gpu, tp, pp, replicas, limits.
        warnings: What limits the trust, a sentence each: a late client, a partial run, lengths not kept.
        client_s: [n] the client's own part of each TTFT and JCT: from when a request was due until its headers
            went out, NaN where they never did. None: no client, or it did not say.
    """

    records: Records
    workload: Workload
    source: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
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
