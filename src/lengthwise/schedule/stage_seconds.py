"""What one visit of a stage takes, from cost tables of each tensor-parallel degree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.catalog import encoder_layer_parameters
from lengthwise.cost import roofline
from lengthwise.cost.roofline import HostOverhead
from lengthwise.schedule._reading import DegreeTables
from lengthwise.schedule.controls import Cluster
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schema.cost_tables import MERGED, CostTables, grid_value
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.model import ModelSpec

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


def degree_tables(
    tables: DegreesTables, task: TaskLengths, degrees: Iterable[int]
) -> dict[int, DegreeTables]:
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
    _kernel()(packed, *flat, encode, share, out.reshape(-1))
    return out


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from lengthwise.schedule._compiled import compiled

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


__all__ = [
    "DegreesTables",
    "cluster_tables",
    "decode_visit_s",
    "degree_tables",
    "encode_visit_s",
    "for_prompts",
    "projected_share",
    "visits_s",
]
