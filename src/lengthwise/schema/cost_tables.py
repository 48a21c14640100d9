"""The one cost format: every source of timing compiles to these few tables.

``T`` is the tokens of a step, ``B`` its sequences. All entries are seconds. Beyond the last
entry of a one-dimensional table the last slope goes on.

Two rules for attention:

* ``PER_REQUEST`` (ours): a step's prefill attention is the sum over its prompts of
  ``prefill_s`` at (chunk, context before the chunk), its decode attention is ``decode_s`` at
  (sequences, KV tokens over all of them); both tables stand on the axis of ``grid_value``
  and are read bilinearly.
* ``MERGED`` (Vidur's): all prompts are one of sqrt(sum chunk^2) tokens over the sum of their
  contexts, all decodes have the mean context; contexts are rounded up to ``step_tokens`` and
  the tables are read without interpolation: ``prefill_s[chunk, context / step_tokens]``,
  ``decode_s[sequences, mean context / step_tokens]``. ``merge_factor`` multiplies either
  when it merges more than one.

To either, what dense masks cost is added: ``masked_s`` for each pair of a query and a key of another sequence,
for prompts' queries to prefill attention, for decodes' to decode attention.
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
"""What ``CostTables.source`` says where it is so."""


def grid_value(index: int) -> int:
    """The ``index``-th point of the attention axes: 0..31 by ones, then 16 points an octave."""
    if index < 2 * GRID_PER_OCTAVE:
        return index
    octave, step = divmod(index, GRID_PER_OCTAVE)
    return (GRID_PER_OCTAVE + step) << (octave - 1)


@lru_cache(maxsize=256)
def grid_axis(largest: int) -> Ints:
    """The attention axis from 0 up to the first point at or above ``largest``; read-only."""
    values = [0]
    while values[-1] < largest or len(values) < 2:
        values.append(grid_value(len(values)))
    axis = np.array(values, dtype=np.int64)
    axis.setflags(write=False)
    return axis


@dataclass(frozen=True)
class AttentionRule:
    """How the attention tables are read; see the module's first lines."""

    kind: int = PER_REQUEST
    step_tokens: int = 64
    merge_factor: float = 1.0


@dataclass(frozen=True)
class FitError:
    """How well one operator of a measured profile was fitted: relative errors on held-out rows."""

    operator: str
    median: float
    p95: float


@dataclass(frozen=True)
class PartError:
    """How far the seconds of one part of a step may be off as a whole.

    ``part`` is "layer", "comm", "first", "send", "head", "host", "prefill", "decode", "masked", "step"
    (all of them together), or "front" (the way into the engine, which is no part of a step); ``log_sd`` is the
    standard deviation of log(measured / predicted) on held-out points, taken as one factor that all steps
    share: the cautious reading.

    Where a part is likelier to be slower by much than faster by much, ``slow_log_sd`` is the standard deviation on
    the side of more seconds; None: the same on both. Of a front only the delay has it: a serial front that much
    slower would hold any deployment to few requests a second.
    """

    part: str
    log_sd: float
    slow_log_sd: float | None = None


@dataclass(frozen=True)
class Reach:
    """The largest step that the measurements behind the tables saw; None: not known, or no bound.

    Beyond it the tables extrapolate, and whoever uses them says so.

    Attributes:
        tokens: Of a step.
        seqs: Of a step.
        chunk: Tokens of one prompt in a step.
        context: Tokens of one request, prompt and output together.
        kv_tokens: Cached tokens of all sequences of a step.
        prefix: Tokens of a prompt that are cached before a chunk of it; 0: prompts were only measured whole.
    """

    tokens: int | None = None
    seqs: int | None = None
    chunk: int | None = None
    context: int | None = None
    kv_tokens: int | None = None
    prefix: int | None = None


@dataclass(frozen=True)
class Front:
    """What stands between a client's send and the engine's queue: HTTP, tokenising, a serial front process.

    The front serves one request at a time, first come first served, ``queue_s`` seconds each; on its own way a
    request then spends ``request_s`` more, which holds up nobody. It enters the engine at
    ``max(arrival, when the front is free) + queue_s + request_s``.
    """

    request_s: float = 0.0
    queue_s: float = 0.0

    def entries_s(self, arrival_s: Floats) -> Floats:
        """[n] when requests enter the engine that come to the front in this order (Lindley's recursion, unrolled)."""
        before = self.queue_s * np.arange(len(arrival_s))
        free_s = np.maximum.accumulate(arrival_s - before) + before + self.queue_s
        return np.asarray(free_s + self.request_s)


@dataclass(frozen=True)
class CostTables:
    """Seconds of one step of one replica, by part.

    A stage of L layers takes ``L * (layer_s[T] + comm_s[T] + attention)`` and, on the first
    stage, ``first_s[T]`` and ``host_s[B]``; on the last one ``head_s[B]``; on all but the
    last one ``send_s[T]``.

    Attributes:
        layer_s: [T+1] one layer's GEMMs, norms, activations, rotary embedding, cache write.
        comm_s: [T+1] one layer's tensor-parallel collectives.
        first_s: [T+1] token embedding.
        send_s: [T+1] handing activations to the next pipeline stage.
        head_s: [B+1] final norm, LM head, sampling.
        host_s: [B+1] host overhead of a step (scheduling, input preparation, detokenising).
        prefill_s: [chunk, context] one layer's prefill attention, see the rules above.
        decode_s: [sequences, KV tokens] one layer's decode attention.
        stage_layers: [PP] layers of each pipeline stage.
        rule: How the attention tables are read.
        source: Where the seconds come from, in words.
        fit: Cross-validated errors by operator, where a profile was fitted.
        errors: How far the parts may be off as a whole, where somebody measured it.
        reach: How far the measurements behind the tables went.
        beside_prompts: [sequences, KV tokens] on the axes of ``decode_s`` (rule PER_REQUEST): how many times
            as long a step's decode attention takes when prompts are in the step; None: as long as alone.
            Attention kernels treat batches of single queries apart, and fall back to those for prompts.
        front: What a request waits before the engine, of the whole deployment: all replicas stand behind it.
        masked_s: One layer's seconds for each (query, key) pair of a step whose key is of another sequence.
            Attention that masks every query against the keys of the whole batch computes such pairs, too, and
            throws them away; 0: it knows which keys are a query's own. Nothing for a batch of one.
        other: Tables of the stages of another tensor-parallel degree (partial tensor parallelism), with the same
            ``rule``; of them only seconds and ``beside_prompts`` are read. None: all stages are alike.
        stage_other: [PP] 1 where a stage takes what ``other`` says, 0 where these tables say.
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
    source: str = ""
    fit: tuple[FitError, ...] = ()
    errors: tuple[PartError, ...] = ()
    reach: Reach = Reach()
    beside_prompts: Floats | None = None
    front: Front = Front()
    masked_s: float = 0.0
    other: CostTables | None = None
    stage_other: Ints | None = None
