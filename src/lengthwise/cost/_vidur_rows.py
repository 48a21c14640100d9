"""The rows of Vidur's profiles that fit a deployment.

Times are medians in milliseconds of one layer on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lengthwise.cost._vidur_paths import ProfileFiles
from lengthwise.cost._vidur_rule import (
    ALL_REDUCE,
    CACHE_SAVE,
    DECODE,
    ONCE_A_LAYER,
    PREFILL,
    SECOND_NORM,
    SEND_RECV,
)
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.model import ModelSpec

TP = "num_tensor_parallel_workers"
SURROGATE = "SURROGATE"
"""How a row's ``profile_method`` says that somebody made it up."""


@dataclass(frozen=True)
class Samples:
    """Measured milliseconds of one operator: ``x`` [n] tokens, or [n, 2] for attention.

    Attention's columns are (sequences or chunk, context a sequence).
    """

    x: Floats
    ms: Floats


def read_samples(
    files: ProfileFiles, model: ModelSpec, parallel: Parallelism, block_size: int
) -> dict[str, Samples]:
    """Samples by operator, filtered as Vidur does: by the model's shapes, the TP degree, the links.

    Vocabulary is no filter: no per-layer operator depends on it.

    Raises:
        ProfileError: No row is left, or an operator has none; says what is there.
    """
    samples = _mlp_samples(files.mlp, model, parallel.tp)
    samples |= _attention_samples(files.attention, model, parallel.tp, block_size)
    if files.all_reduce:
        samples[ALL_REDUCE] = _all_reduce_samples(files.all_reduce, model, parallel.tp)
    if files.send_recv:
        samples[SEND_RECV] = _send_recv_samples(files.send_recv, model, parallel)
    return samples


def _mlp_samples(path: Path, model: ModelSpec, tp: int) -> dict[str, Samples]:
    rows = _filtered(read_rows([path]), mlp_shapes(model), tp, path)
    names = [*ONCE_A_LAYER] + [SECOND_NORM] * (f"time_stats.{SECOND_NORM}.median" in rows.columns)
    return {name: _samples(rows, name, ("num_tokens",), path) for name in names}


def is_surrogate(rows: pl.DataFrame) -> pl.Expr:
    """Which rows were made up and not measured."""
    if "profile_method" not in rows.columns:
        return pl.lit(value=False)
    return (pl.col("profile_method") == SURROGATE).fill_null(value=False)


def made_up(files: ProfileFiles, model: ModelSpec, tp: int) -> int:
    """How many attention rows of this shard nobody measured."""
    rows = _filtered(read_rows(files.attention), attention_shapes(model), tp, files.attention[0])
    return len(rows.filter(is_surrogate(rows)))


def _attention_samples(
    paths: tuple[Path, ...], model: ModelSpec, tp: int, block_size: int
) -> dict[str, Samples]:
    shapes = attention_shapes(model) | {"block_size": block_size}
    rows = _filtered(read_rows(paths), shapes, tp, paths[0])
    prefill = rows.filter(pl.col("is_prefill"))
    decode = rows.filter(~pl.col("is_prefill"))
    samples = {
        PREFILL: _samples(prefill, PREFILL, ("prefill_chunk_size", "kv_cache_size"), paths[0]),
        DECODE: _samples(decode, DECODE, ("batch_size", "kv_cache_size"), paths[0]),
    }
    if f"time_stats.{CACHE_SAVE}.median" in rows.columns:
        tokens = pl.max_horizontal("prefill_chunk_size", "batch_size").alias("num_tokens")
        samples[CACHE_SAVE] = _samples(rows.with_columns(tokens), CACHE_SAVE, ("num_tokens",), paths[0])
    return samples


def _all_reduce_samples(path: Path, model: ModelSpec, tp: int) -> Samples:
    rows = read_rows([path])
    same = (pl.col("num_workers") == tp) & (pl.col("devices_per_node") == tp)
    left = rows.filter(same)
    if left.is_empty():
        there = sorted(
            rows.filter(pl.col("num_workers") == pl.col("devices_per_node"))["num_workers"].unique()
        )
        raise ProfileError(f"{path} must hold all_reduce rows of {tp} GPUs in a node; it holds {there}")
    return _samples(_with_tokens(left, model), ALL_REDUCE, ("num_tokens",), path)


def _send_recv_samples(path: Path, model: ModelSpec, parallel: Parallelism) -> Samples:
    rows = read_rows([path])
    inside = parallel.tp * parallel.pp <= int(rows["max_devices_per_node"].max() or 0)  # type: ignore[arg-type]
    left = rows.filter(pl.col("devices_per_node") == (2 if inside else 1))
    if left.is_empty():
        where = "inside a node (devices_per_node 2)" if inside else "between nodes (devices_per_node 1)"
        raise ProfileError(f"{path} must hold send_recv rows {where}; it holds none")
    return _samples(_with_tokens(left, model), SEND_RECV, ("num_tokens",), path)


def _with_tokens(rows: pl.DataFrame, model: ModelSpec) -> pl.DataFrame:
    return rows.with_columns(num_tokens=pl.col("size") / model.hidden / 2)


def mlp_shapes(model: ModelSpec) -> dict[str, Any]:
    """The columns of mlp.csv that must be the model's own."""
    return {
        "n_embd": model.hidden,
        "n_kv_head": model.attention.kv_heads,
        "n_head": model.attention.heads,
        "n_expanded_embd": model.ffn.intermediate,
        "use_gated_mlp": model.ffn.gated,
    }


def attention_shapes(model: ModelSpec) -> dict[str, Any]:
    """The columns of attention.csv that must be the model's own."""
    return {
        "n_embd": model.hidden,
        "n_kv_head": model.attention.kv_heads,
        "n_q_head": model.attention.heads,
    }


def read_rows(paths: Iterable[Path]) -> pl.DataFrame:
    """The rows of CSV files as one table, each once; raises ProfileError."""
    tables = []
    for path in paths:
        try:
            tables.append(pl.read_csv(path, infer_schema_length=None))
        except (OSError, pl.exceptions.PolarsError) as error:
            raise ProfileError(f"{path} must be a readable CSV file: {error}") from error
    return pl.concat(tables, how="diagonal_relaxed").unique(maintain_order=True)


def _filtered(rows: pl.DataFrame, shapes: dict[str, Any], tp: int, path: Path) -> pl.DataFrame:
    same = of_shapes(rows, shapes, path)
    left = same.filter(pl.col(TP) == tp)
    if left.is_empty():
        degrees = sorted(same[TP].unique().to_list())
        raise ProfileError(
            f"{path} must hold rows of tp {tp}; it holds tp {degrees}. Use one of these or measure it."
        )
    return left


def of_shapes(rows: pl.DataFrame, shapes: dict[str, Any], path: Path) -> pl.DataFrame:
    """The rows of a model's shapes, of every TP degree; raises ProfileError where there is none."""
    if TP not in rows.columns:
        raise ProfileError(f"{path} must have the column {TP}; it has {', '.join(rows.columns)}")
    here = {name: value for name, value in shapes.items() if name in rows.columns}
    same = rows.filter(*(pl.col(name) == value for name, value in here.items()))
    if same.is_empty():
        there = rows.select(*here).unique().rows(named=True)
        raise ProfileError(f"{path} must hold rows with {here}; it holds {there}")
    return same


def _samples(rows: pl.DataFrame, name: str, columns: tuple[str, ...], path: Path) -> Samples:
    """Rows of an operator in the order of the file; rows without a time are not measurements of it."""
    median = f"time_stats.{name}.median"
    missing = [column for column in (median, *columns) if column not in rows.columns]
    if missing:
        there = sorted(
            c.split(".")[1] for c in rows.columns if c.startswith("time_stats.") and c.endswith(".median")
        )
        raise ProfileError(f"{path} must have {', '.join(missing)}; its operators are {', '.join(there)}")
    kept = rows.select(*columns, median).drop_nulls().cast(dict.fromkeys([*columns, median], pl.Float64))
    if kept.is_empty():
        raise ProfileError(f"{path} must hold times of {name} for this deployment; all of its rows lack them")
    x = kept.select(columns).to_numpy()
    ms = kept[median].to_numpy()
    if not np.isfinite(ms).all() or (ms < 0).any():
        raise ProfileError(f"{path}: times of {name} must be finite and not negative")
    return Samples(x[:, 0] if len(columns) == 1 else x, ms)
