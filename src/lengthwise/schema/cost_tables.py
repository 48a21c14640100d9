"""The cost format: every source of timing compiles to these tables.

``T`` is the tokens of a step, ``B`` its sequences. All entries are seconds. Beyond the last entry of a one-dimensional
table, its last slope continues.

Two rules for attention:

* ``PER_REQUEST``: a step's prefill attention is the sum over its prompts of ``prefill_s`` at (chunk, context before the
  chunk); its decode attention is ``decode_s`` at (sequences, KV tokens over all of them). Both tables are on the axis
  of ``grid_value`` and are interpolated bilinearly.
* ``MERGED`` (Vidur's): all prompts are one of sqrt(sum chunk^2) tokens over the sum of their contexts, all decodes have
  the mean context. Contexts are rounded up to ``step_tokens`` and the tables are read without interpolation:
  ``prefill_s[chunk, context / step_tokens]``, ``decode_s[sequences, mean context / step_tokens]``. ``merge_factor``
  multiplies either if it merges more than one.

Dense masks add ``masked_s`` for each pair of a query and a key of another sequence, to prefill attention for prompts'
queries and to decode attention for decodes' queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PER_REQUEST, MERGED = 0, 1
GRID_PER_OCTAVE = 16
NOT_MEASURED = "rows that were made up and not measured"
"""Phrase in ``CostEvidence.source`` for such rows."""


def grid_value(index: int) -> int:
    """Return the ``index``-th point of the attention axes: 0..31 by ones, then 16 points per octave."""
    if index < 2 * GRID_PER_OCTAVE:
        return index
    octave, step = divmod(index, GRID_PER_OCTAVE)
    return (GRID_PER_OCTAVE + step) << (octave - 1)


@lru_cache(maxsize=256)
def grid_axis(largest: int) -> Ints:
    """Return the attention axis from 0 to the first point at or above ``largest``; read-only."""
    values = [0]
    while values[-1] < largest or len(values) < 2:
        values.append(grid_value(len(values)))
    axis = np.array(values, dtype=np.int64)
    axis.setflags(write=False)
    return axis


@dataclass(frozen=True)
class AttentionRule:
    """Rule by which the attention tables are read; see the module's docstring."""

    kind: int = PER_REQUEST
    step_tokens: int = 64
    merge_factor: float = 1.0


@dataclass(frozen=True)
class FitError:
    """Relative errors of one operator of a measured profile on held-out rows."""

    operator: str
    median: float
    p95: float


@dataclass(frozen=True)
class PartError:
    """Error of the seconds of one part of a step as a factor that all steps share, so that it does not average out.

    ``part`` is "layer", "comm", "first", "send", "head", "host", "prefill", "decode", "masked", "step" (all of them
    together), or "front" (the delay in front of the engine, which is no part of a step). ``log_sd`` is the standard
    deviation of log(measured / predicted) on held-out points.

    If large errors are likelier on the slow side, ``slow_log_sd`` is the standard deviation there; None: the same on
    both. For "front", it applies to the delay, not to the serial time of a request: a slow draw would limit every
    deployment to few requests a second.
    """

    part: str
    log_sd: float
    slow_log_sd: float | None = None


@dataclass(frozen=True)
class Reach:
    """The largest step that the measurements behind the tables cover; beyond it the tables extrapolate.

    ``tokens`` and ``seqs`` are of a step, ``chunk`` of one prompt in a step, ``context`` of one request (prompt and
    output), ``kv_tokens`` of all sequences of a step, and ``prefix`` the tokens of a prompt that are cached before a
    chunk (0: prompts were only measured without a cached prefix). None: unknown, or unbounded.
    """

    tokens: int | None = None
    seqs: int | None = None
    chunk: int | None = None
    context: int | None = None
    kv_tokens: int | None = None
    prefix: int | None = None


@dataclass(frozen=True)
class CostEvidence:
    """What cost tables rest on; no engine reads it.

    Attributes:
        source: Origin of the seconds, in words.
        fit: Cross-validated errors by operator, if a profile was fitted.
        errors: Errors of the parts, if they were measured.
        reach: The largest step that was measured.
    """

    source: str = ""
    fit: tuple[FitError, ...] = ()
    errors: tuple[PartError, ...] = ()
    reach: Reach = Reach()


@dataclass(frozen=True)
class Front:
    """The way from a client to the engine's queue: HTTP, tokenising, a serial front process.

    The front serves one request at a time, first come first served, in ``serial_s`` seconds each; ``request_s`` more
    seconds delay a request without blocking others. It enters the engine at
    ``max(arrival, when the front is free) + serial_s + request_s``.
    """

    request_s: float = 0.0
    serial_s: float = 0.0

    def entries_s(self, arrival_s: Floats) -> Floats:
        """Return [n] times at which requests enter the engine, in their order (Lindley's recursion, unrolled)."""
        before = self.serial_s * np.arange(len(arrival_s))
        free_s = np.maximum.accumulate(arrival_s - before) + before + self.serial_s
        return np.asarray(free_s + self.request_s)


@dataclass(frozen=True)
class CostTables:
    """Seconds of one step of one replica, by part.

    A stage of L layers takes ``L * (layer_s[T] + comm_s[T] + attention)`` and, on the first stage, ``first_s[T]`` and
    ``host_s[B]``; on the last one ``head_s[B]``; on all but the last one ``send_s[T]``.

    Attributes:
        layer_s: [T+1] one layer's GEMMs, norms, activations, rotary embedding, cache write.
        comm_s: [T+1] one layer's tensor-parallel collectives.
        first_s: [T+1] token embedding.
        send_s: [T+1] transfer of activations to the next pipeline stage.
        head_s: [B+1] final norm, LM head, sampling.
        host_s: [B+1] host overhead of a step (scheduling, input preparation, detokenising).
        prefill_s: [chunk, context] one layer's prefill attention, by the rules above.
        decode_s: [sequences, KV tokens] one layer's decode attention.
        stage_layers: [PP] layers of each pipeline stage.
        beside_prompts: [sequences, KV tokens] on the axes of ``decode_s`` (rule PER_REQUEST): factor of a step's decode
            attention if prompts are in the step, since kernels have a fast path for batches of single queries; None: 1.
        front: Delay of a request in front of the engine, shared by all replicas of the deployment.
        masked_s: One layer's seconds for each (query, key) pair of a step whose key is of another sequence. Attention
            that masks every query against the keys of the complete batch computes and discards such pairs; 0: it
            knows a query's own keys. A batch of one has none.
        other: Stages of another tensor-parallel degree; None: all are alike.
    """

    layer_s: Floats
    comm_s: Floats
    first_s: Floats
    send_s: Floats
    head_s: Floats
    host_s: Floats
    prefill_s: Floats
    decode_s: Floats
    stage_layers: Ints
    rule: AttentionRule = AttentionRule()
    evidence: CostEvidence = CostEvidence()
    beside_prompts: Floats | None = None
    front: Front = Front()
    masked_s: float = 0.0
    other: OtherDegree | None = None


@dataclass(frozen=True)
class OtherDegree:
    """Stages of another tensor-parallel degree than the rest (partial tensor parallelism).

    Attributes:
        tables: Their tables, with the same ``rule``; only seconds and ``beside_prompts`` are read.
        stages: [PP] 1 for a stage of this degree, else 0.
    """

    tables: CostTables
    stages: Ints
