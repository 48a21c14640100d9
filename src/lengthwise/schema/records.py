"""Defines the records of a run: columns by request, by step and by replica."""

from __future__ import annotations

import math
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
    """The outcome of a request."""

    FINISHED = 0
    REJECTED = 1
    TIMED_OUT = 2
    UNFINISHED = 3


class Rejection(IntEnum):
    """The reason of a rejection: no idle replica could take the request, or one of its parents did not finish."""

    NONE = 0
    PROMPT_REACHES_MAX_MODEL_LEN = 1
    PROMPT_ABOVE_TOKEN_BUDGET = 2
    REFUSED_BY_MEMORY_POLICY = 3  # even on an idle replica, by its watermark
    PARENT_NOT_FINISHED = 4


REJECTIONS = {
    Rejection.PROMPT_REACHES_MAX_MODEL_LEN: "the prompt reaches max_model_len",
    Rejection.PROMPT_ABOVE_TOKEN_BUDGET: "the prompt is above the token budget of a step",
    Rejection.REFUSED_BY_MEMORY_POLICY: "the memory policy refuses them even on an idle replica",
}
"""Reasons of rejection in a sentence."""


@dataclass(frozen=True)
class RequestRecords:
    """The requests as columns [n] in the order of the workload. The time of an event that did not happen is NaN."""

    # When the client sent the request. A child (``Workload.after``) is sent when its parents have finished, and
    # rejected when one of them cannot finish. NaN: the run ended before the child was sent.
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints  # number of produced tokens
    status: npt.NDArray[np.int8]
    # replica (with several data-parallel ranks: rank) that last admitted the request, or -1 if none did
    replica: npt.NDArray[np.int32]
    scheduled_s: Floats  # start of its first step
    first_token_s: Floats
    finished_s: Floats
    preemptions: npt.NDArray[np.int32]
    # total time in the front end, in queues and in bins, up to the last admission or, for a request that times out in a
    # queue, up to the timeout
    queued_for_s: Floats
    rejection: npt.NDArray[np.int8]  # a ``Rejection``, as a number
    # Prompt tokens found in the prefix cache at the first admission. None: unknown (a measured run).
    cached_tokens: Ints | None = None
    # prompt tokens after the cached ones that were loaded from CPU memory before the first admission
    loaded_tokens: Ints | None = None
    load_s: Floats | None = None  # total duration of the request's loads, which ``queued_for_s`` does not contain
    storage_tokens: Ints | None = None  # loaded tokens that came from the storage behind the CPU memory


@dataclass(frozen=True)
class StepRecords:
    """The steps as columns [m], in the order of ``start_s``, then of ``replica``."""

    start_s: Floats  # when the step was formed
    end_s: Floats  # when its last pipeline stage ended
    replica: Ints
    decode_seqs: Ints  # number of decodes; each computes one token
    prefill_seqs: Ints
    prefill_tokens: Ints  # computed prompt tokens of the ``prefill_seqs`` prompts
    kv_blocks: Ints  # number of KV blocks that were allocated when the step was formed
    waiting: Ints  # number of requests that waited when the step was formed


@dataclass(frozen=True)
class TokenGaps:
    """Times between consecutive tokens of a request (TBT, also called ITL), pooled over all requests.

    With speculative decoding, tokens that come with the same step count as one, because clients get them at once.

    ``histogram[k]`` counts the gaps in [``edges_s[k]``, ``edges_s[k+1]``); the last bin also counts all longer gaps.
    Except for the first, a bin is at most 1/128 of its lower edge wide, so that a quantile read at the middle of a bin
    is within 0.4 % of the true one. Small runs also list every distinct gap in ``gap_s`` (ascending) and its number of
    occurrences in ``count``; in other runs both are None.
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
    """Sums over all steps of each replica, or of each data-parallel rank of each replica, as columns [replicas]."""

    steps: Ints  # number of steps, with the dummy steps of a rank without sequences
    tokens: Ints  # computed tokens, including recomputed ones
    attention_pairs: Floats  # (query, key) pairs that attention computed
    kv_read_tokens: Floats  # cached tokens that decodes read
    busy_s: Floats  # time with at least one step in flight
    # Seconds of the layers without collectives and attention, and of what a replica's ranks compute together
    # (``CostTables.shared_s``), also in a dummy step. ``layer_s`` to ``send_s`` are parts of the steps' time by the
    # parts of ``CostTables``, each summed over all pipeline stages.
    layer_s: Floats
    comm_s: Floats
    prefill_attention_s: Floats
    decode_attention_s: Floats
    host_s: Floats
    head_s: Floats
    embedding_s: Floats
    send_s: Floats
    swap_s: Floats  # seconds of swaps of KV cache between GPU and CPU memory
    kv_block_s: Floats  # KV blocks in use, times the seconds that a step adds to ``busy_s``, summed over steps


@dataclass(frozen=True)
class SpeculationTotals:
    """Sums over the decodes of each replica under speculative decoding, as columns [replicas]."""

    decodes: Ints  # number of verifications: decoding sequences, summed over steps
    draft_tokens: Ints  # proposed tokens that were verified
    accepted_tokens: Ints  # those of them that became output
    draft_s: Floats  # seconds of the drafter, which no part of the steps' time in ``ReplicaTotals`` has

    @property
    def tokens_per_step(self) -> float:
        """Return the mean number of tokens that a decoding sequence gets in a step (NaN without decodes)."""
        decodes = float(self.decodes.sum())
        return 1.0 + float(self.accepted_tokens.sum()) / decodes if decodes else math.nan


@dataclass(frozen=True)
class TimeSeries:
    """Sums over all replicas in time bins of ``bin_s`` seconds. A step counts in the bin in which it ends.

    ``step_s`` is the time with a step in flight (``ReplicaTotals.busy_s``). ``seqs_s``, ``waiting_s`` and
    ``kv_blocks_s`` sum the number of sequences, waiting requests and allocated KV blocks, each times the seconds that
    the step adds to ``step_s``; divided by ``step_s`` they are means over the time in steps.
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
    """The records of a run. ``end_s`` is the time of the last event; ``steps`` is None if they were not recorded.

    If the time limit left requests unfinished, ``end_s`` is the limit, or the end of the last step that was in flight
    at the limit. All sums include such a step, but no request gets a token from it.
    """

    requests: RequestRecords
    steps: StepRecords | None
    gaps: TokenGaps
    totals: ReplicaTotals
    series: TimeSeries
    end_s: float
    seed: int
    name: str = ""
    speculation: SpeculationTotals | None = None  # None without speculative decoding


SIMULATED, BENCH = "simulate", "bench"
MAX_CLIENT_CPU_SHARE = 0.4
"""Load of one core by the load generator below which the load generator does not limit a measurement."""


@dataclass(frozen=True)
class TokenTimes:
    """Arrival times of streamed chunks, one request after the other."""

    start: npt.NDArray[np.int64]  # [n+1] request i has the chunks ``start[i]:start[i + 1]``
    at_s: npt.NDArray[np.float64]  # [chunks] times on the clock of the records, ascending within a request
    tokens: npt.NDArray[np.int64]  # [chunks] number of tokens in each chunk; 0: unknown


@dataclass(frozen=True)
class RunResult:
    """Records of a simulated or measured run, its requests, and warnings about the quality of the records."""

    # in a measured run, ``arrival_s`` is when a request was due, not when a late client sent it, so that latencies
    # include the delay; ``steps`` is None, and sums over steps are 0
    records: Records
    workload: Workload  # the requests in the same order, with the requested ``output_tokens``
    source: str  # "simulate", "bench", or the program that wrote the results ("vllm bench serve", "guidellm", ...)
    # JSON-able: url, engine and version, served model, arguments, start (ISO), machine, clock; if known, "prefix_cache"
    # (prompt tokens looked up and found) and "deployment" (model, "model_shape" as in ``shape_facts``, gpu, tp, pp,
    # replicas, limits)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # a sentence each: a late client, a partial run, lengths that differ from the requested ones
    warnings: tuple[str, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)  # number of failed requests by kind of failure ("http 429")
    tokens: TokenTimes | None = None  # arrival times of all streamed chunks; None if unknown
    # [n] the client's own part of TTFT and JCT: the time from when a request was due until its headers were sent, or
    # NaN if the request was never sent. None if unknown.
    client_s: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if len(self.workload) != len(self.records.requests.arrival_s):
            raise InputError(
                f"records and workload must have the same requests; they have "
                f"{len(self.records.requests.arrival_s)} and {len(self.workload)}"
            )
        if self.client_s is not None and len(self.client_s) != len(self.workload):
            raise InputError(
                f"client_s must have a value a request; it has {len(self.client_s)} for {len(self.workload)}"
            )

    @property
    def is_simulated(self) -> bool:
        """Return whether the run was simulated."""
        return self.source == SIMULATED


def shape_facts(model: ModelSpec) -> dict[str, int]:
    """Return the shapes by which a model is recognised under any name; fine-tunes and quantisations share them."""
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
