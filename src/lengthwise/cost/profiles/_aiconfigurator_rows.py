"""The rows of AIConfigurator's tables: milliseconds, message sizes in elements.

That sizes are elements can be seen: NCCL takes as long for 2**28 halves as for 2**29 int8, and 2**28 halves in
1.70 ms between two H200s are 315 GB/s of the link's 450; as bytes they would be 158.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from lengthwise.cost.profiles._assembled import dtype, having, listed, read_table
from lengthwise.schema.errors import ProfileError, UnknownNameError
from lengthwise.schema.units import dtype_bytes

_SECONDS = pl.col("latency") / 1e3
_WHO = pl.col("kernel_source")


def table(path: Path) -> pl.DataFrame:
    """A table whose rows all have a time."""
    rows = read_table(path, ("device", "kernel_source", "op_name", "latency"))
    try:
        return having(rows, _NEEDED[path.name], path)
    except KeyError:
        raise ProfileError(f"{path} must be one of {', '.join(_NEEDED)}") from None


def _named(rows: pl.DataFrame, column: str) -> pl.Expr:
    """Our names of a column of dtypes."""
    names = {str(name): dtype(str(name)) for name in rows[column].unique()}
    return pl.col(column).replace_strict(names, return_dtype=pl.String)


def _gemm(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    del notes
    return rows.select(
        operator=pl.lit("gemm"),
        dtype=_named(rows, "gemm_dtype"),
        backend=_WHO,
        tokens=pl.col("m"),
        n=pl.col("n"),
        k=pl.col("k"),
        seconds=_SECONDS,
    )


def _attention(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Prompts of ``isl`` tokens after ``step`` cached ones, or one token of each sequence after ``step``."""
    beams = rows.filter(pl.col("beam_width") > 1) if "beam_width" in rows.columns else rows.clear()
    if len(beams):
        notes.append(f"{len(beams):,} attention rows with beams are left out")
        rows = rows.filter(pl.col("beam_width") <= 1)
    prompts = rows["op_name"].str.starts_with("context").all()
    kind = "prefill" if prompts else "decode"
    window = pl.col("window_size") if "window_size" in rows.columns else pl.lit(0)
    name = pl.when(window > 0).then(pl.lit(f"{kind} window attention")).otherwise(pl.lit(f"{kind} attention"))
    seqs, heads, kv = pl.col("batch_size"), pl.col("num_heads"), pl.col("num_key_value_heads")
    step: dict[str, Any] = {"chunk": pl.col("isl"), "context": pl.col("step")}
    if not prompts:
        step = {"kv_tokens": seqs * pl.col("step"), "skew": pl.lit(1.0)}
    return rows.select(
        operator=name,
        dtype=_named(rows, "attn_dtype"),
        kv_dtype=_named(rows, "kv_cache_dtype"),
        backend=_WHO,
        seqs=seqs,
        heads=heads,
        kv_heads=pl.when(kv == 0).then(heads).otherwise(kv),
        head_dim=pl.col("head_dim"),
        window=window,
        seconds=_SECONDS,
        **step,
    )


def _moe(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Experts cut over ``moe_tp_size`` GPUs; which experts get how many tokens stands beside the kernel."""
    spread = rows.filter(pl.col("moe_ep_size") > 1)
    if len(spread):
        notes.append(f"{len(spread):,} fused moe rows with experts spread over GPUs (EP) are left out")
    return rows.filter(pl.col("moe_ep_size") <= 1).select(
        operator=pl.lit("fused moe"),
        dtype=_named(rows, "moe_dtype"),
        backend=pl.format("{} ({})", _WHO, pl.col("distribution")),
        tokens=pl.col("num_tokens"),
        experts=pl.col("num_experts"),
        topk=pl.col("topk"),
        n=pl.col("inter_size") // pl.col("moe_tp_size"),
        k=pl.col("hidden_size"),
        gpus=pl.col("moe_tp_size"),
        seconds=_SECONDS,
    )


def _own_all_reduce(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    who = pl.col("backend") if "backend" in rows.columns else _WHO
    return _all_reduce(rows, "allreduce_dtype", who, notes)


def _nccl(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    return _all_reduce(rows, "nccl_dtype", pl.lit("nccl"), notes)


def _all_reduce(rows: pl.DataFrame, column: str, who: pl.Expr, notes: list[str]) -> pl.DataFrame:
    own = rows.filter(pl.col("op_name") == "all_reduce")
    if len(own) < len(rows):
        other = rows.filter(pl.col("op_name") != "all_reduce").group_by("op_name").len()
        notes.append(f"left out, having no counterpart: {listed(dict(other.rows()))}")
    try:
        widths = {str(name): int(dtype_bytes(str(name))) for name in own[column].unique()}
    except UnknownNameError as error:
        raise ProfileError(f"messages must be of a known dtype: {error}") from error
    return own.select(
        operator=pl.lit("all-reduce"),
        dtype=_named(own, column),
        backend=who,
        gpus=pl.col("num_gpus"),
        bytes=pl.col("message_size") * pl.col(column).replace_strict(widths, return_dtype=pl.Int64),
        seconds=_SECONDS,
    )


_SHAPES = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype")
_NEEDED: dict[str, tuple[str, ...]] = {
    "gemm_perf.parquet": ("gemm_dtype", "m", "n", "k"),
    "context_attention_perf.parquet": (*_SHAPES, "kv_cache_dtype"),
    "generation_attention_perf.parquet": (*_SHAPES, "kv_cache_dtype"),
    "moe_perf.parquet": (
        "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
        "moe_ep_size", "distribution",
    ),
    "custom_allreduce_perf.parquet": ("allreduce_dtype", "num_gpus", "message_size"),
    "nccl_perf.parquet": ("nccl_dtype", "num_gpus", "message_size"),
}  # fmt: skip

READERS: dict[str, Callable[[pl.DataFrame, list[str]], pl.DataFrame]] = {
    "gemm_perf.parquet": _gemm,
    "context_attention_perf.parquet": _attention,
    "generation_attention_perf.parquet": _attention,
    "moe_perf.parquet": _moe,
    "custom_allreduce_perf.parquet": _own_all_reduce,
    "nccl_perf.parquet": _nccl,
}
