"""Defines the format of step costs, to which every source of timing is converted.

``T`` is the number of tokens in a step, ``B`` the number of sequences. All entries are seconds. Beyond the last entry
of a one-dimensional table, the mean slope of its last 256 entries continues.

There are two rules for attention:

* ``PER_REQUEST``: a step's prefill attention is the sum over its prompts of ``prefill_s`` at (chunk, context before the
  chunk); its decode attention is ``decode_s`` at (sequences, KV tokens over all of them). Both axes of both tables are
  those of ``grid_value``. Values are interpolated bilinearly, and extrapolated beyond the axes.
* ``MERGED`` (Vidur's): all prompts count as one prompt of sqrt(sum chunk^2) tokens after the sum of their contexts, and
  all decodes have their mean context. Contexts are rounded up to ``step_tokens``, and the tables are read without
  interpolation: ``prefill_s[chunk, context / step_tokens]``, ``decode_s[sequences, mean context / step_tokens]``; the
  last entry applies beyond a table. ``merge_factor`` multiplies the prefill attention of several prompts, and the
  decode attention of several decodes.

With dense masks, each pair of a query and a key of different sequences adds ``masked_s``: to prefill attention if the
query is of a prompt, to decode attention if it is of a decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PER_REQUEST, MERGED = 0, 1
GRID_PER_OCTAVE = 16
NOT_MEASURED = "rows that were made up and not measured"
"""Phrase in a ``CostEvidence.source`` whose profile has estimated rows among the measured ones."""


def grid_value(index: int) -> int:
    """Return the ``index``-th point of the attention axes: every integer up to 31, then 16 points per octave."""
    if index < 2 * GRID_PER_OCTAVE:
        return index
    octave, step = divmod(index, GRID_PER_OCTAVE)
    return (GRID_PER_OCTAVE + step) << (octave - 1)


@lru_cache(maxsize=256)
def grid_axis(largest: int) -> Ints:
    """Return the attention axis: int64 points from 0 to the first one at or above ``largest``. It is read-only."""
    values = [0]
    while values[-1] < largest or len(values) < 2:
        values.append(grid_value(len(values)))
    axis = np.array(values, dtype=np.int64)
    axis.setflags(write=False)
    return axis


@dataclass(frozen=True)
class AttentionRule:
    """The rule by which the attention tables are read: ``PER_REQUEST`` or ``MERGED``, which the module defines."""

    kind: int = PER_REQUEST
    step_tokens: int = 64
    merge_factor: float = 1.0


@dataclass(frozen=True)
class FitError:
    """Relative errors of the fit of one operator on held-out rows of a measured profile."""

    operator: str
    median: float
    p95: float


@dataclass(frozen=True)
class PartError:
    """The error of one part of a step's predicted seconds, as one random factor that all steps share.

    ``part`` is "layer", "comm", "embedding", "send", "head", "host", "prefill", "context" (what context before a chunk
    adds to its prefill attention; without an error of its own, it has that of "prefill"), "decode", "masked", "shared"
    (``CostTables.shared_s``), "step" (all of them together), or "front" (the delay in front of the engine, which is no
    part of a step). ``log_sd`` is the standard deviation of log(measured / predicted) on held-out points.

    ``slow_log_sd`` is the standard deviation of draws that are slower than predicted; None: it is ``log_sd``. For
    "front", it applies only to ``Front.request_s``, because a slow draw of ``serial_s`` would limit every rate.
    """

    part: str
    log_sd: float
    slow_log_sd: float | None = None


@dataclass(frozen=True)
class Reach:
    """The largest step that the measurements behind the tables cover. Beyond it, the tables extrapolate.

    ``tokens`` and ``seqs`` are of a step, ``chunk`` of one prompt in a step, ``context`` of one request (prompt and
    output), ``kv_tokens`` of all sequences of a step, and ``prefix`` the tokens of a prompt that are cached before a
    chunk (0: prompts were only measured without a cached prefix). None means unknown or unbounded.
    """

    tokens: int | None = None
    seqs: int | None = None
    chunk: int | None = None
    context: int | None = None
    kv_tokens: int | None = None
    prefix: int | None = None


@dataclass(frozen=True)
class CostEvidence:
    """The evidence for cost tables. Engines do not read it."""

    source: str = ""  # origin of the seconds, as a text
    fit: tuple[FitError, ...] = ()  # cross-validated errors by operator, if a profile was fitted
    errors: tuple[PartError, ...] = ()  # errors of the parts, if they were measured
    reach: Reach = Reach()  # the largest step that was measured


@dataclass(frozen=True)
class Front:
    """The front end between clients and the engine's queue: HTTP, tokenising, a serial front process.

    The front end serves one request at a time, first come first served, in ``serial_s`` seconds each. A further delay
    of ``request_s`` seconds does not block other requests. A request enters the engine at
    ``max(arrival, when the front end is free) + serial_s + request_s``.
    """

    request_s: float = 0.0
    serial_s: float = 0.0

    def entries_s(self, arrival_s: Floats) -> Floats:
        """Return the times [n] at which requests with these arrivals enter the engine (by Lindley's recursion)."""
        before = self.serial_s * np.arange(len(arrival_s))
        free_s = np.maximum.accumulate(arrival_s - before) + before + self.serial_s
        return np.asarray(free_s + self.request_s)


@dataclass(frozen=True)
class CostTables:
    """Seconds of one step of one replica, by part.

    A stage of L layers takes ``L * (layer_s[T] + comm_s[T] + attention)``. The first stage adds ``embedding_s[T]`` and
    ``host_s[B]``, the last one ``head_s[B]``, and every stage but the last ``send_s[T]``.
    """

    layer_s: Floats  # [T+1] one layer's GEMMs, norms, activations, rotary embedding, cache write
    comm_s: Floats  # [T+1] one layer's tensor-parallel collectives
    embedding_s: Floats  # [T+1] token embedding
    send_s: Floats  # [T+1] transfer of activations to the next pipeline stage
    head_s: Floats  # [B+1] final norm, LM head, sampling
    host_s: Floats  # [B+1] host overhead of a step (scheduling, input preparation, detokenising)
    prefill_s: Floats  # [chunk, context] one layer's prefill attention, by the module's rules
    decode_s: Floats  # [sequences, KV tokens] one layer's decode attention
    stage_layers: Ints  # [PP] layers of each pipeline stage
    rule: AttentionRule = AttentionRule()
    evidence: CostEvidence = CostEvidence()
    # [sequences, KV tokens], on the axes of ``decode_s`` (rule PER_REQUEST): factor on the decode attention of a step
    # with prompts, because kernels are faster for batches without prompts; None: 1
    beside_prompts: Floats | None = None
    front: Front = Front()  # front end of the engine, which all replicas of the deployment share
    # one layer's seconds for each (query, key) pair of different sequences, which attention with a dense mask over the
    # complete batch computes and discards; 0: attention skips these pairs
    masked_s: float = 0.0
    other: OtherDegree | None = None  # stages of another tensor-parallel degree; None: all stages are alike
    # [T+1] one layer's seconds of what all data-parallel ranks of a replica compute together: the routed experts, and
    # the exchange of tokens between the ranks. T counts the tokens of all ranks. None: every rank computes all of its
    # layers alone.
    shared_s: Floats | None = None

    def alone(self) -> CostTables:
        """Return the tables of a rank without others: its ``layer_s`` contains what it would share with them."""
        if self.shared_s is None:
            return self
        tokens, last = np.arange(len(self.layer_s)), len(self.shared_s) - 1
        span = min(256, last)
        slope = (self.shared_s[-1] - self.shared_s[last - span]) / max(span, 1)  # continues a shorter table
        own = self.shared_s[np.minimum(tokens, last)] + slope * np.maximum(tokens - last, 0)
        return replace(self, layer_s=self.layer_s + own, shared_s=None)


@dataclass(frozen=True)
class OtherDegree:
    """The stages whose tensor-parallel degree differs from the other stages' degree (partial tensor parallelism)."""

    # cost tables of these stages, with the same ``rule``; only seconds and ``beside_prompts`` are read
    tables: CostTables
    stages: Ints  # [PP] 1 for these stages, else 0
