"""Seconds and memory of a stage, derived from the cost tables of each tensor-parallel degree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import _jit
from lengthwise.catalog import embedding_parameters, encoder_layer_parameters
from lengthwise.cost import plan_memory, roofline
from lengthwise.cost._lookup import end_slope
from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.cost.roofline_tables import HostOverhead
from lengthwise.schedule import kernel
from lengthwise.schedule.controls import Assumptions, Cluster, Role, Stage
from lengthwise.schedule.kernel import DegreeTables
from lengthwise.schedule.lengths import (
    UNADJUSTED,
    AdjustedBatches,
    PhaseLoads,
    TaskLengths,
    adjusted_batches,
    phase_loads,
)
from lengthwise.schema.cost_tables import MERGED, CostTables, grid_value
from lengthwise.schema.deployment import EngineLimits, KvPlan, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec, dtype_bytes
from lengthwise.schema.workload import Floats

TablesByDegree = Mapping[int, CostTables]  # cost tables by tensor-parallel degree; their ``stage_layers`` are ignored

MAX_STEP_TOKENS, MAX_STEP_SEQS = 2**15, 2**12


def cluster_tables(
    model: ModelSpec, cluster: Cluster, degrees: Iterable[int], host: HostOverhead = HostOverhead()
) -> dict[int, CostTables]:
    """Return cost tables of the roofline model for each tensor-parallel degree.

    All stages send over the cluster's slowest link. Raises InputError if a degree does not divide the number of heads.
    """
    limits = EngineLimits(max_num_seqs=MAX_STEP_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS)
    tables = {}
    for tp in degrees:
        parallel = Parallelism(tp=tp, pp=max(1, min(cluster.gpus // tp, model.layers)))
        tables[tp] = roofline(model, cluster.gpu, cluster.node, parallel, limits, model.max_model_len, host)
    return tables


def packed_tables(tables: CostTables, task: TaskLengths) -> DegreeTables:
    """Return cost tables as compiled loops read them, with moments of a random prompt's tokens and attention."""
    pmf, tokens, mean = task.prompt_pmf, np.arange(len(task.prompt_pmf), dtype=np.float64), task.mean_prompt_tokens
    prompt = np.array([mean, task.mean_square_prompt, task.prompt_variance, 0.0, 0.0, 0.0])
    if tables.rule.kind != MERGED:
        # One layer's attention of each prompt without context, extrapolated linearly beyond the table.
        column = tables.prefill_s[:, 0]
        axis = np.array([grid_value(index) for index in range(len(column))], dtype=np.float64)
        slope = (column[-1] - column[-2]) / (axis[-1] - axis[-2])
        attention = np.asarray(np.interp(tokens, axis, column) + np.maximum(tokens - axis[-1], 0.0) * slope)
        mean_s = float(pmf @ attention)
        covariance = float(pmf @ ((tokens - mean) * (attention - mean_s)))
        prompt[3:] = mean_s, covariance, float(pmf @ (attention - mean_s) ** 2)
    by_tokens = np.column_stack([tables.layer_s + tables.comm_s, tables.embedding_s, tables.send_s])
    by_seqs = np.column_stack([tables.head_s, tables.host_s])
    return DegreeTables(
        np.ascontiguousarray(by_tokens),
        end_slope(by_tokens),
        np.ascontiguousarray(by_seqs),
        end_slope(by_seqs),
        np.array(tables.prefill_s, dtype=np.float64, order="C"),
        np.array(tables.decode_s, dtype=np.float64, order="C"),
        prompt,
        tables.rule.kind == MERGED,
        int(tables.rule.step_tokens),
        float(tables.rule.merge_factor),
        float(tables.masked_s),
    )


@lru_cache(maxsize=8)
def compiled(name: str) -> Any:
    """Return a compiled function of ``kernel``: "rra_rows", "waa_rows", "steady_round" or "visits"."""
    line, grid_example = np.zeros(1), np.zeros((1, 1))
    example = DegreeTables(
        grid_example, line, grid_example, line, grid_example, grid_example, line, False, 64, 1.0, 0.0
    )
    tables, grid = _jit.type_of(example), _jit.type_of(grid_example)
    floats, ints, number, integer, flag = _jit.f8_1d, _jit.i8_1d, _jit.f8, _jit.i8, _jit.type_of(False)
    scratch = (grid, floats, floats, floats, floats, floats, grid)
    side = (grid, floats)
    signatures = {
        "rra_rows": lambda: integer(
            tables, tables, *side, floats, *[ints] * 5, grid, number, floats, grid, *scratch, grid
        ),
        "waa_rows": lambda: integer(
            tables, tables, *side, *side, floats, ints, floats, integer,
            number, number, number, flag, number, floats, floats, grid, grid,
        ),
        "steady_round": lambda: _jit.pair_of_floats(*[integer] * 4, floats, *scratch),
        "visits": lambda: integer(tables, *[floats] * 6, flag, number, floats),
    }  # fmt: skip
    return _jit.compile_now(getattr(kernel, name), signatures[name](), cached=True)


def workspace(micro_batches: int, groups: int) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return scratch arrays for ``steady_round``: ready, first, last, started, before."""
    before = np.zeros((4, max(micro_batches, groups)))
    return np.zeros(micro_batches), np.zeros(groups), np.zeros(groups), np.zeros(micro_batches), before


def projected_share(model: ModelSpec) -> float:
    """Return the share of a layer's matrix products over a prompt that projects cross-attention keys and values.

    It is 0 for decoder-only models. A layer of the cost tables is an encoder layer with these projections. Under WAA
    the decode GPUs receive the encoder's output and project it.
    """
    if not model.encoder_layers:
        return 0.0
    attention = model.attention
    width = attention.kv_heads * (attention.head_dim + (attention.v_head_dim or attention.head_dim))
    cross = model.hidden * width
    return cross / (encoder_layer_parameters(model) + cross)


def visits_s(
    tables: DegreeTables,
    seqs: npt.ArrayLike,
    kv_tokens: npt.ArrayLike,
    stage: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    *,
    prefill: bool,
    share: float = 1.0,
    more_tokens: npt.ArrayLike = 0.0,
) -> Floats:
    """Return the seconds that micro-batches spend on a ``stage`` (layers, is first, is last). Arguments are broadcast.

    A prefill visit computes ``seqs`` prompts. The attention seconds are a mean over the task's prompts, not the seconds
    of a mean prompt. A decode visit computes one token for each of ``seqs`` sequences, with ``kv_tokens`` in the cache.
    The first stage embeds and waits for the host, the last stage samples, and all others send. ``share`` is the share
    of a layer's matrix products that a prefill computes, or that a decode also computes for ``more_tokens`` of new
    prompts.
    """
    columns = (seqs, kv_tokens, *stage, more_tokens)
    given = np.broadcast_arrays(*(np.asarray(column, np.float64) for column in columns))
    out = np.empty(given[0].shape)
    flat = [np.array(column, dtype=np.float64).reshape(-1) for column in given]
    compiled("visits")(tables, *flat, prefill, share, out.reshape(-1))
    return out


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one GPU of a stage, at one tensor-parallel degree.

    ``layer_bytes`` are the weights of a decoder layer, averaged over the layers, and ``encoder_bytes`` the weights of
    the encoder per decoder layer (0 for decoder-only models). ``embedding_bytes`` is the token table of a first stage.
    ``head_bytes`` is the head of a last stage. If it is ``tied``, only a last stage that is not also the first has a
    copy. ``kv_layer_bytes`` is the cache of one token in one layer, ``token_bytes`` the activations of one token in a
    visit, and ``seq_bytes`` the logits of one sequence.
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
        """Return the weight bytes of a stage. In WAA of an encoder-decoder it has only the encoder or the decoder."""
        layer_bytes = self.layer_bytes + self.encoder_bytes
        if self.encoder_bytes and role != "both":
            layer_bytes = self.encoder_bytes if role == "prefill" else self.layer_bytes
        head = last and not (self.encoder_bytes and role == "prefill") and not (self.tied and first)
        return layers * layer_bytes + first * self.embedding_bytes + head * self.head_bytes


def stage_memory(model: ModelSpec, cluster: Cluster, tp: int) -> StageMemory:
    """Return the memory needs at one degree, from ``cost.plan_memory``. The degree must divide the number of heads."""

    def plan(tokens: int, seqs: int) -> KvPlan:
        limits = EngineLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        return plan_memory(model, cluster.gpu, Parallelism(tp=tp), limits, model.max_model_len, num_blocks=1)

    one, width = plan(1, 1), dtype_bytes(model.dtype)
    unquantized = max(2.0, width) / tp
    embedding, head = embedding_parameters(model) * unquantized, model.vocab * model.hidden * unquantized
    encoder = model.encoder_layers * encoder_layer_parameters(model) * width / tp
    layers = one.weight_bytes - embedding - encoder - (0.0 if model.tied_embeddings else head)
    return StageMemory(
        layer_bytes=layers / model.layers,
        encoder_bytes=encoder / model.layers,
        embedding_bytes=embedding,
        head_bytes=head,
        tied=model.tied_embeddings,
        kv_layer_bytes=one.kv_bytes_per_block / one.block_size / model.layers,
        token_bytes=plan(2, 1).activation_bytes - one.activation_bytes,
        seq_bytes=plan(1, 2).activation_bytes - one.activation_bytes,
    )


def available_bytes(model: ModelSpec, cluster: Cluster) -> float:
    """Return a GPU's bytes for weights, cache and activations, without buffers for communication among all GPUs."""
    limits = EngineLimits(gpu_memory_utilization=cluster.gpu_memory_utilization)
    parallel = Parallelism(pp=min(cluster.gpus, model.layers))
    return plan_memory(model, cluster.gpu, parallel, limits, model.max_model_len, num_blocks=1).available_bytes


def stage_kinds(stages: tuple[Stage, ...]) -> Counter[tuple[Stage, bool, bool]]:
    """Return the number of stages of each kind (stage, is first, is last) of a pipeline, in its order."""
    last = len(stages) - 1
    return Counter((stage, place == 0, place == last) for place, stage in enumerate(stages))


def stage_bytes(
    memory: Mapping[int, StageMemory],
    stages: tuple[Stage, ...],
    cached_tokens: Floats,
    bytes_per_token: float | None,
    tokens: Floats,
    seqs: Floats,
) -> tuple[Floats, float]:
    """Return [n] the bytes on a pipeline's fullest GPU, and the weight bytes on the GPU with the most weights.

    ``cached_tokens`` [n] are the tokens in the cache, each of which takes ``bytes_per_token`` on each GPU (if None, the
    KV cache of the stage's layers). The largest micro-batch has ``tokens`` and ``seqs`` [n].
    """
    fullest, heaviest = np.zeros(len(cached_tokens)), 0.0
    for stage, first, last in stage_kinds(stages):
        needs = memory[stage.tp]
        weights = needs.weight_bytes(stage.layers, stage.role, first=first, last=last)
        per_token = stage.layers * needs.kv_layer_bytes if bytes_per_token is None else bytes_per_token
        activations = tokens * needs.token_bytes + seqs * needs.seq_bytes
        fullest = np.maximum(fullest, weights + per_token * cached_tokens + activations)
        heaviest = max(heaviest, weights)
    return fullest, heaviest


def transfer_bytes_per_token(model: ModelSpec) -> float | None:
    """Return the encoder output's bytes per prompt token, or None for decoder-only models, which transfer KV cache."""
    return model.hidden * max(2.0, dtype_bytes(model.dtype)) if model.encoder_layers else None


def kv_transfer_s(
    model: ModelSpec, memory: Mapping[int, StageMemory], stages: tuple[Stage, ...], tokens: float
) -> float:
    """Return the seconds for which a prompt's transfer occupies the busiest GPU's host link, in one direction."""
    per_token = transfer_bytes_per_token(model)
    if per_token is None:
        per_token = cache_bytes_per_token(memory, stages)
    return tokens * per_token / HOST_LINK_BYTES_PER_S


def cache_bytes_per_token(memory: Mapping[int, StageMemory], stages: tuple[Stage, ...]) -> float:
    """Return the KV cache bytes of one token on the GPU of a pipeline that stores most of it."""
    return max(stage.layers * memory[stage.tp].kv_layer_bytes for stage in stages)


@dataclass(frozen=True, eq=False)
class Setting:
    """A task on a cluster with a model. Raises InputError if the longest request exceeds the model's context."""

    task: TaskLengths
    cluster: Cluster
    model: ModelSpec
    tables: TablesByDegree
    assumptions: Assumptions
    _packed: dict[int, DegreeTables] = field(default_factory=dict, init=False)
    _memory: dict[int, StageMemory] = field(default_factory=dict, init=False)
    _phases: dict[tuple[int, bool], PhaseLoads] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.task.require_within(self.model)

    @cached_property
    def z(self) -> float:
        """Return the number of standard deviations by which a normal quantile at the level exceeds the mean."""
        return NormalDist().inv_cdf(self.assumptions.level)

    @cached_property
    def batches(self) -> AdjustedBatches:
        """Return the prefill batches under dynamic adjustment. Without a threshold they are unadjusted."""
        threshold = self.assumptions.threshold
        return UNADJUSTED if threshold is None else adjusted_batches(self.task, threshold, self.assumptions.level)

    @cached_property
    def bound_tokens(self) -> int:
        """Return the output length of the requests whose latency the bound limits: fixed, or the level's quantile."""
        fixed = self.assumptions.output_tokens
        return self.task.output_quantile(self.assumptions.level) if fixed is None else fixed

    @cached_property
    def iterations(self) -> int:
        """Return the decode iterations of a request with ``bound_tokens``."""
        return max(self.bound_tokens - self.assumptions.prefill_output_tokens, 0)

    @cached_property
    def available_bytes(self) -> float:
        """Return the usable memory of a GPU."""
        return available_bytes(self.model, self.cluster)

    def packed(self, tp: int) -> DegreeTables:
        """Return the tables of a degree as ``DegreeTables``. Raises InputError if there are none."""
        if tp not in self.tables:
            degrees = sorted(self.tables)
            raise InputError(f"cost tables must be given for tensor-parallel degree {tp}; there are those of {degrees}")
        if tp not in self._packed:
            self._packed[tp] = packed_tables(self.tables[tp], self.task)
        return self._packed[tp]

    def memory(self, stages: tuple[Stage, ...]) -> dict[int, StageMemory]:
        """Return memory needs by tensor-parallel degree, including the degrees of these stages."""
        for tp in {stage.tp for stage in stages} - set(self._memory):
            self._memory[tp] = stage_memory(self.model, self.cluster, tp)
        return self._memory

    def phase(self, steps: int, *, renewal: bool = False) -> PhaseLoads:
        """Return the loads of phases of ``steps`` iterations. ``renewal`` (for WAA) excludes the paper's formula."""
        paper = self.assumptions.paper_completions and not renewal
        key = steps, paper
        if key not in self._phases:
            self._phases[key] = phase_loads(self.task, steps, self.assumptions.prefill_output_tokens, paper=paper)
        return self._phases[key]

    def prompt_tokens_high(self, seqs: Floats) -> Floats:
        """Return [n] the level's quantile of the total prompt tokens of ``seqs`` requests."""
        spread = self.z * np.sqrt(seqs * self.task.prompt_variance)
        return np.asarray(np.minimum(seqs * self.task.mean_prompt_tokens + spread, seqs * self.task.max_prompt_tokens))

    def stage_visits_s(
        self,
        stages: tuple[Stage, ...],
        seqs: npt.ArrayLike,
        kv_tokens: npt.ArrayLike = 0.0,
        *,
        prefill: bool,
        share: float = 1.0,
        more_tokens: float = 0.0,
    ) -> Floats:
        """Return [stages, ...] the seconds of a visit to each stage. The arguments are those of ``visits_s``."""
        last = len(stages) - 1
        seconds = [
            visits_s(
                self.packed(stage.tp),
                seqs,
                kv_tokens,
                (stage.layers, place == 0, place == last),
                prefill=prefill,
                share=share,
                more_tokens=more_tokens,
            )
            for place, stage in enumerate(stages)
        ]
        return np.array(seconds, dtype=np.float64)


def stage_groups(stages: tuple[Stage, ...]) -> tuple[Floats, Floats]:
    """Return ``groups`` and ``count`` as ``kernel`` defines them. Equal neighbouring stages form a group."""
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
def normal_scores(most: int) -> Floats:
    """Return [most + 1, most] where row n has the expected values of n sorted standard normal draws (Blom, 1958)."""
    scores = np.zeros((most + 1, most))
    for n in range(2, most + 1):
        scores[n, :n] = [NormalDist().inv_cdf((i + 0.625) / (n + 0.25)) for i in range(n)]
    return scores
