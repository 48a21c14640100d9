"""What one visit of a stage takes, from cost tables of each tensor-parallel degree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.catalog import embedding_parameters, encoder_layer_parameters
from lengthwise.cost import plan_memory, roofline
from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.cost.roofline_tables import HostOverhead
from lengthwise.schedule._kernel import DegreeTables
from lengthwise.schedule.controls import Assumptions, Cluster, Role, Stage
from lengthwise.schedule.lengths import UNCHANGED, PhaseShares, Resized, TaskLengths, phase_shares, resized
from lengthwise.schema.cost_tables import MERGED, CostTables, grid_value
from lengthwise.schema.deployment import EngineLimits, KvPlan, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec, dtype_bytes

Floats = npt.NDArray[np.float64]
DegreesTables = Mapping[int, CostTables]
"""Cost tables by tensor-parallel degree; their own stages do not matter."""

LARGEST_STEP_TOKENS, LARGEST_STEP_SEQS = 2**15, 2**12
_SLOPE_SPAN = 256


def cluster_tables(
    model: ModelSpec, cluster: Cluster, degrees: Iterable[int], host: HostOverhead = HostOverhead()
) -> dict[int, CostTables]:
    """Roofline tables of the degrees; neighbouring stages talk over the slowest link of the cluster.

    Raises:
        InputError: A degree does not divide the heads.
    """
    limits = EngineLimits(max_num_seqs=LARGEST_STEP_SEQS, max_num_batched_tokens=LARGEST_STEP_TOKENS)
    tables = {}
    for tp in degrees:
        pp = max(1, min(cluster.gpus // tp, model.layers))
        tables[tp] = roofline(
            model, cluster.gpu, cluster.node, Parallelism(tp=tp, pp=pp), limits, model.max_model_len, host
        )
    return tables


def for_prompts(tables: CostTables, task: TaskLengths) -> DegreeTables:
    """The tables as compiled code reads them, with what a prompt of the task takes."""
    by_tokens = np.column_stack([tables.layer_s + tables.comm_s, tables.first_s, tables.send_s])
    by_seqs = np.column_stack([tables.head_s, tables.host_s])
    return DegreeTables(
        np.ascontiguousarray(by_tokens),
        _slope(by_tokens),
        np.ascontiguousarray(by_seqs),
        _slope(by_seqs),
        np.array(tables.prefill_s, dtype=np.float64, order="C"),
        np.array(tables.decode_s, dtype=np.float64, order="C"),
        _prompt(tables, task),
        tables.rule.kind == MERGED,
        int(tables.rule.step_tokens),
        float(tables.rule.merge_factor),
        float(tables.masked_s),
    )


def projected_share(model: ModelSpec) -> float:
    """Share of a layer's products over a prompt that are an encoder-decoder's cross keys and values; else 0.

    The tables let one layer stand for an encoder layer and these projections (``cost``). Under WAA the encoder's
    output is handed over, and the decoding GPUs project it.
    """
    if not model.encoder_layers:
        return 0.0
    attention = model.attention
    width = attention.kv_heads * (attention.head_dim + (attention.v_head_dim or attention.head_dim))
    cross = model.hidden * width
    return cross / (encoder_layer_parameters(model) + cross)


def encode_visit_s(
    tables: CostTables,
    task: TaskLengths,
    seqs: npt.ArrayLike,
    layers: npt.ArrayLike,
    *,
    first: npt.ArrayLike = False,
    last: npt.ArrayLike = False,
    share: float = 1.0,
) -> Floats:
    """[n] seconds that a stage of ``layers`` takes to encode ``seqs`` prompts of the task.

    Attention is the mean over the task's prompts, not that of a mean prompt. Matrix products count by
    ``share``. The ``first`` stage embeds and waits for the host, the ``last`` samples, the others send on.
    """
    return visits_s(for_prompts(tables, task), seqs, 0.0, layers, first, last, encode=True, share=share)


def decode_visit_s(
    tables: CostTables,
    task: TaskLengths,
    seqs: npt.ArrayLike,
    kv_tokens: npt.ArrayLike,
    layers: npt.ArrayLike,
    *,
    first: npt.ArrayLike = False,
    last: npt.ArrayLike = False,
) -> Floats:
    """[n] seconds that a stage of ``layers`` takes for one token of ``seqs`` sequences over ``kv_tokens``."""
    return visits_s(for_prompts(tables, task), seqs, kv_tokens, layers, first, last, encode=False)


def degree_tables(tables: DegreesTables, task: TaskLengths, degrees: Iterable[int]) -> dict[int, DegreeTables]:
    """``for_prompts`` of each degree.

    Raises:
        InputError: There are no tables of a degree.
    """
    wanted = sorted(set(degrees))
    missing = [tp for tp in wanted if tp not in tables]
    if missing:
        raise InputError(
            f"cost tables must be given for tensor-parallel degrees {wanted}; there are some of {sorted(tables)}"
        )
    return {tp: for_prompts(tables[tp], task) for tp in wanted}


def visits_s(
    packed: DegreeTables,
    seqs: npt.ArrayLike,
    kv_tokens: npt.ArrayLike,
    layers: npt.ArrayLike,
    first: npt.ArrayLike,
    last: npt.ArrayLike,
    *,
    encode: bool,
    share: float = 1.0,
    more_tokens: npt.ArrayLike = 0.0,
) -> Floats:
    """[n] seconds of visits, by packed tables.

    ``share`` of a layer's products: of an encoding, or of decodes over ``more_tokens`` newly encoded ones on top.
    """
    columns = (seqs, kv_tokens, layers, first, last, more_tokens)
    given = np.broadcast_arrays(*(np.asarray(column, np.float64) for column in columns))
    out = np.empty(given[0].shape)
    flat = [np.array(column, dtype=np.float64).reshape(-1) for column in given]
    _visits_kernel()(packed, *flat, encode, share, out.reshape(-1))
    return out


@lru_cache(maxsize=1)
def _visits_kernel() -> Any:
    from lengthwise.schedule.timeline import compiled

    return compiled("visits")


def _slope(table: Floats) -> Floats:
    span = min(_SLOPE_SPAN, len(table) - 1)
    return np.array((table[-1] - table[-1 - span]) / max(span, 1))


def _prompt(tables: CostTables, task: TaskLengths) -> Floats:
    """What DegreeTables says of one prompt."""
    pmf, tokens = task.prompt_pmf, np.arange(len(task.prompt_pmf), dtype=np.float64)
    mean = task.mean_prompt_tokens
    if tables.rule.kind == MERGED:
        return np.array([mean, task.mean_square_prompt, task.prompt_variance, 0.0, 0.0, 0.0])
    attention = _attention_s(tables, tokens)
    mean_s = float(pmf @ attention)
    covariance = float(pmf @ ((tokens - mean) * (attention - mean_s)))
    variance = float(pmf @ (attention - mean_s) ** 2)
    return np.array([mean, task.mean_square_prompt, task.prompt_variance, mean_s, covariance, variance])


def _attention_s(tables: CostTables, tokens: Floats) -> Floats:
    """One layer's attention of a prompt of so many tokens without context; beyond the table its last slope."""
    column = tables.prefill_s[:, 0]
    axis = np.array([grid_value(index) for index in range(len(column))], dtype=np.float64)
    slope = (column[-1] - column[-2]) / (axis[-1] - axis[-2])
    return np.asarray(np.interp(tokens, axis, column) + np.maximum(tokens - axis[-1], 0.0) * slope)


@dataclass(frozen=True)
class Shares:
    """Bytes on one GPU of a stage of some tensor-parallel degree.

    Attributes:
        layer_bytes: A decoder layer's weights, mean over the layers.
        encoder_bytes: The encoder's weights that go with a decoder layer; 0 for decoder-only models.
        embedding_bytes: The token table of a first stage.
        head_bytes: The head of a last stage; a tied one's own copy, unless its stage is also the first.
        tied: Whether the head is tied.
        kv_layer_bytes: One token's cache in a layer.
        token_bytes: Activations of a token in a visit.
        seq_bytes: Logits of a sequence in a visit.
    """

    layer_bytes: float
    encoder_bytes: float
    embedding_bytes: float
    head_bytes: float
    tied: bool
    kv_layer_bytes: float
    token_bytes: float
    seq_bytes: float

    def weight_bytes(self, layers: int, role: Role, *, first: bool, last: bool) -> float:
        """Weights of a stage; an encoder-decoder's encode or decode stage holds its own stack alone."""
        own = self.layer_bytes + self.encoder_bytes
        if self.encoder_bytes and role != "both":
            own = self.encoder_bytes if role == "encode" else self.layer_bytes
        head = last and not (self.encoder_bytes and role == "encode") and not (self.tied and first)
        return layers * own + first * self.embedding_bytes + head * self.head_bytes


def shares_of(model: ModelSpec, cluster: Cluster, tp: int) -> Shares:
    """The shares of one degree, out of ``cost.plan_memory``.

    Raises:
        InputError: ``tp`` does not divide the heads.
    """
    one = _plan(model, cluster, tp, 1, 1)
    width = dtype_bytes(model.dtype)
    wide = max(2.0, width) / tp
    embedding, head = embedding_parameters(model) * wide, model.vocab * model.hidden * wide
    encoder = model.encoder_layers * encoder_layer_parameters(model) * width / tp
    layers = one.weight_bytes - embedding - encoder - (0.0 if model.tied_embeddings else head)
    return Shares(
        layer_bytes=layers / model.layers,
        encoder_bytes=encoder / model.layers,
        embedding_bytes=embedding,
        head_bytes=head,
        tied=model.tied_embeddings,
        kv_layer_bytes=one.kv_bytes_per_block / one.block_size / model.layers,
        token_bytes=_plan(model, cluster, tp, 2, 1).activation_bytes - one.activation_bytes,
        seq_bytes=_plan(model, cluster, tp, 1, 2).activation_bytes - one.activation_bytes,
    )


def available_bytes(model: ModelSpec, cluster: Cluster) -> float:
    """What a GPU offers for weights, cache and activations, all GPUs talking to each other."""
    stages = min(cluster.gpus, model.layers)
    limits = EngineLimits(gpu_memory_utilization=cluster.gpu_memory_utilization)
    plan = plan_memory(model, cluster.gpu, Parallelism(pp=stages), limits, model.max_model_len, num_blocks=1)
    return plan.available_bytes


def stage_bytes(
    shares: dict[int, Shares],
    stages: tuple[Stage, ...],
    kv_tokens: Floats,
    held_bytes_per_token: float | None,
    tokens: Floats,
    seqs: Floats,
) -> tuple[Floats, float]:
    """([n] bytes on the fullest GPU of the stages, weights on the GPU that holds most of them).

    Args:
        shares: By degree.
        stages: A pipeline.
        kv_tokens: [n] tokens whose cache is held.
        held_bytes_per_token: What one of them takes on each GPU; None: the stage's layers of cache.
        tokens: [n] tokens of the largest visit.
        seqs: [n] sequences of the largest visit.
    """
    fullest, heaviest = np.zeros(len(kv_tokens)), 0.0
    last = len(stages) - 1
    kinds = dict.fromkeys((stage, place == 0, place == last) for place, stage in enumerate(stages))
    for stage, is_first, is_last in kinds:
        share = shares[stage.tp]
        weights = share.weight_bytes(stage.layers, stage.role, first=is_first, last=is_last)
        held = stage.layers * share.kv_layer_bytes if held_bytes_per_token is None else held_bytes_per_token
        activations = tokens * share.token_bytes + seqs * share.seq_bytes
        fullest = np.maximum(fullest, weights + held * kv_tokens + activations)
        heaviest = max(heaviest, weights)
    return fullest, heaviest


def handed_bytes_per_token(model: ModelSpec) -> float | None:
    """What an encoder-decoder hands over of a prompt's token: the encoder's output; None: the layers' cache."""
    return model.hidden * max(2.0, dtype_bytes(model.dtype)) if model.encoder_layers else None


def handover_s(model: ModelSpec, shares: dict[int, Shares], stages: tuple[Stage, ...], tokens: float) -> float:
    """Seconds that a prompt's handover holds the busiest GPU's link to host memory, in one direction."""
    handed = handed_bytes_per_token(model)
    if handed is not None:
        return tokens * handed / HOST_LINK_BYTES_PER_S
    return tokens * layer_cache_bytes(shares, stages) / HOST_LINK_BYTES_PER_S


def layer_cache_bytes(shares: dict[int, Shares], stages: tuple[Stage, ...]) -> float:
    """What a token's cache takes on the GPU of a pipeline that holds most of it."""
    return max(stage.layers * shares[stage.tp].kv_layer_bytes for stage in stages)


def _plan(model: ModelSpec, cluster: Cluster, tp: int, tokens: int, seqs: int) -> KvPlan:
    limits = EngineLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return plan_memory(model, cluster.gpu, Parallelism(tp=tp), limits, model.max_model_len, num_blocks=1)


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Setting:
    """A task on a cluster, and what was worked out for it so far."""

    task: TaskLengths
    cluster: Cluster
    model: ModelSpec
    tables: DegreesTables
    assumptions: Assumptions
    _packed: dict[int, DegreeTables] = field(default_factory=dict)
    _sizes: dict[int, Shares] = field(default_factory=dict)
    _phases: dict[int, PhaseShares] = field(default_factory=dict)
    _available: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.task.require_within(self.model)

    @cached_property
    def z(self) -> float:
        """Standard deviations from the mean to the level."""
        return NormalDist().inv_cdf(self.assumptions.level)

    @cached_property
    def resized(self) -> Resized:
        """What dynamic adjustment makes of encodings."""
        threshold = self.assumptions.threshold
        return UNCHANGED if threshold is None else resized(self.task, threshold, self.assumptions.level)

    @cached_property
    def bound_tokens(self) -> int:
        """The output whose latency is asked for: the level's quantile, or of fixed length."""
        fixed = self.assumptions.output_tokens
        return self.task.output_quantile(self.assumptions.level) if fixed is None else fixed

    @cached_property
    def iterations(self) -> int:
        """Decode iterations of such a request."""
        return max(self.bound_tokens - self.assumptions.from_encode, 0)

    @property
    def available_bytes(self) -> float:
        """Of a GPU."""
        if not self._available:
            self._available.append(available_bytes(self.model, self.cluster))
        return self._available[0]

    def packed(self, tp: int) -> DegreeTables:
        """The tables of a degree."""
        if tp not in self._packed:
            self._packed.update(degree_tables(self.tables, self.task, [tp]))
        return self._packed[tp]

    def sizes(self, stages: tuple[Stage, ...]) -> dict[int, Shares]:
        """What a GPU holds at each of the stages' degrees."""
        for tp in {stage.tp for stage in stages} - set(self._sizes):
            self._sizes[tp] = shares_of(self.model, self.cluster, tp)
        return self._sizes

    def phase(self, steps: int, *, renewal: bool = False) -> PhaseShares:
        """Shares of phases of so many steps; ``renewal`` whatever the assumptions say (WAA)."""
        key = -steps if renewal else steps
        if key not in self._phases:
            paper = self.assumptions.paper_completions and not renewal
            self._phases[key] = phase_shares(self.task, steps, self.assumptions.from_encode, paper=paper)
        return self._phases[key]

    def prompt_tokens_high(self, seqs: Floats) -> Floats:
        """[n] prompt tokens of ``seqs`` requests at the level."""
        spread = self.z * np.sqrt(seqs * self.task.prompt_variance)
        return np.asarray(np.minimum(seqs * self.task.mean_prompt_tokens + spread, seqs * self.task.max_prompt_tokens))


def grouped(stages: tuple[Stage, ...]) -> tuple[Floats, Floats]:
    """(groups, count) as the compiled loops take them: neighbours of one kind together."""
    rows: list[list[float]] = []
    for place, stage in enumerate(stages):
        row = [1.0, stage.layers, stage.tp == 1, place == 0, place == len(stages) - 1]
        if rows and rows[-1][1:] == row[1:]:
            rows[-1][0] += 1
        else:
            rows.append(row)
    groups = np.array(rows, dtype=np.float64)
    return groups, np.ascontiguousarray(groups[:, 0])


@lru_cache(maxsize=64)
def deviations(most: int) -> Floats:
    """[most + 1, most] in row n: the smallest, ... largest of n standard normals, expected (Blom, 1958)."""
    scores = np.zeros((most + 1, most))
    for n in range(2, most + 1):
        scores[n, :n] = [NormalDist().inv_cdf((i + 0.625) / (n + 0.25)) for i in range(n)]
    return scores
