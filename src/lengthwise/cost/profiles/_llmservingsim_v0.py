"""LLMServingSim's first profiler: layers in nanoseconds, attention in milliseconds (on a TPU in nanoseconds).

Its attention on a GPU is one ``flash_attn_varlen_func`` (github.com/casys-kaist/LLMServingSim,
llm_profile/profiler/attention) with ``kv_cache_size`` keys in all, shared out over the batch; a prompt's own
chunk is among them. The numbers say so too: 64 sequences over 4,096 keys take 23 us on an H100, where 4,096
keys each would be 268 MB. On the TPU the keys are of each sequence and before the chunk.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from lengthwise.cost.profiles._assembled import QUARTILES_OF_NORMAL, gpu_name, having, listed, model_name
from lengthwise.cost.profiles._llmservingsim import Shard
from lengthwise.schema.profile import ProfileFacts

_ONE = {
    "embedding": "embedding",
    "input_layernorm": "input norm",
    "post_layernorm": "post-attention norm",
    "rope": "rope",
    "o_proj": "output projection",
    "act_fn": "activation",
    "down_proj": "mlp down",
    "gate": "router",
    "final_layernorm": "final norm",
    "lm_head": "lm head",
}
_SUMS = {"qkv projection": ("q_proj", "k_proj", "v_proj"), "mlp up": ("gate_proj", "up_proj")}
"""Ours of several of theirs, which run one after another."""

_ATTENTION = ("is_prefill", "prefill_chunk_size", "kv_cache_size", "batch_size")
_REPEATS = 30


def facts(root: Path) -> ProfileFacts:
    """What the folder's names tell."""
    model, device = f"{root.parent.name}/{root.name}", root.parent.parent.name
    return ProfileFacts(
        name=f"{root.name} on {device}, LLMServingSim v0",
        source="llmservingsim v0",
        gpu=gpu_name(device),
        model=model_name(model),
        engine="PyTorch modules, FlashAttention 2",
        licence="MIT",
        notes=("layers converted from ns, attention from ms (TPU: ns); one measurement a token count",),
    )


def rows(shard: Shard, root: Path) -> list[pl.DataFrame]:
    """Frames with columns named as a profile's."""
    layers = shard.read("layers", ("layer_name", "input", "latency(ns)"))
    attention = shard.read("attention", _ATTENTION)
    frames = [] if layers is None else _layers(layers, shard)
    if attention is None:
        shard.notes.append(f"tp {shard.tp} has no attention.csv: no decode attention")
        if layers is not None and "attn" in layers["layer_name"]:
            frames.append(_fresh_prompts(layers, shard))
    elif "p50_ns" in attention.columns:
        frames += _tpu_attention(attention, shard)
    else:
        where = root / shard.folder.name / "attention.csv"
        needed = [
            f"time_stats.attn_{kind}.{name}" for kind in ("prefill", "decode") for name in ("median", "std")
        ]
        frames += _gpu_attention(having(attention, needed, where), shard)
    return frames


def _layers(layers: pl.DataFrame, shard: Shard) -> list[pl.DataFrame]:
    by_name = {name[0]: one for name, one in layers.group_by("layer_name")}
    frames = [_row(by_name[name], operator, shard) for name, operator in _ONE.items() if name in by_name]
    used = {*_ONE, "attn"}
    for operator, parts in _SUMS.items():
        if all(name in by_name for name in parts):
            used |= set(parts)
            together = layers.filter(pl.col("layer_name").is_in(parts)).group_by("input", maintain_order=True)
            whole = together.agg(pl.col("latency(ns)").sum(), pl.len()).filter(pl.col("len") == len(parts))
            frames.append(_row(whole, operator, shard))
    left = {str(name): len(one) for name, one in by_name.items() if name not in used}
    if left:
        shard.notes.append(f"left out, having no counterpart alone: {listed(left)}")
    return frames


def _row(layers: pl.DataFrame, operator: str, shard: Shard) -> pl.DataFrame:
    return layers.select(
        operator=pl.lit(operator),
        dtype=pl.lit(_dtype(shard)),
        tp=pl.lit(shard.tp),
        tokens=pl.col("input"),
        seconds=pl.col("latency(ns)") / 1e9,
    )


def _dtype(shard: Shard) -> str:
    return "bfloat16" if "TPU" in str(shard.folder) else "float16"


def _fresh_prompts(layers: pl.DataFrame, shard: Shard) -> pl.DataFrame:
    """The model's own attention module over one prompt, the only attention where there is no attention.csv."""
    shard.notes.append(f"tp {shard.tp}: prefill attention is of the model's module, without a cached context")
    return layers.filter(pl.col("layer_name") == "attn").select(
        operator=pl.lit("prefill attention"),
        dtype=pl.lit(_dtype(shard)),
        tp=pl.lit(shard.tp),
        seqs=pl.lit(1),
        chunk=pl.col("input"),
        seconds=pl.col("latency(ns)") / 1e9,
    )


def _gpu_attention(attention: pl.DataFrame, shard: Shard) -> list[pl.DataFrame]:
    chunk, seqs, keys = pl.col("prefill_chunk_size"), pl.col("batch_size"), pl.col("kv_cache_size")
    decode = attention.filter(~pl.col("is_prefill"))
    empty = decode.filter(keys < seqs)
    if len(empty):
        shard.notes.append(f"{len(empty):,} decode rows have fewer keys than sequences and are left out")
    shard.notes.append(
        "kv_cache_size of attention.csv counts the keys of the whole batch, a prompt's own chunk among them"
    )
    return [
        _timed(
            attention.filter("is_prefill"), "prefill", shard, seqs=seqs, chunk=chunk, context=keys - chunk
        ),
        _timed(
            decode.filter(keys >= seqs),
            "decode",
            shard,
            seqs=seqs,
            kv_tokens=keys // seqs * seqs,
            skew=pl.lit(1.0),
        ),
    ]


def _timed(attention: pl.DataFrame, kind: str, shard: Shard, **columns: pl.Expr) -> pl.DataFrame:
    median, std = (pl.col(f"time_stats.attn_{kind}.{name}").cast(pl.Float64) for name in ("median", "std"))
    backend = "attention_backend" if "attention_backend" in attention.columns else pl.lit("")
    return attention.filter(median.is_not_null()).select(
        operator=pl.lit(f"{kind} attention"),
        dtype=pl.lit("float16"),
        kv_dtype=pl.lit("float16"),
        tp=pl.lit(shard.tp),
        seconds=median / 1e3,
        spread_s=std * (QUARTILES_OF_NORMAL / 1e3),
        repeats=pl.lit(_REPEATS),
        backend=backend,
        **columns,
    )


def _tpu_attention(attention: pl.DataFrame, shard: Shard) -> list[pl.DataFrame]:
    chunk, seqs, keys = pl.col("prefill_chunk_size"), pl.col("batch_size"), pl.col("kv_cache_size")
    shared = {
        "dtype": pl.lit("bfloat16"),
        "kv_dtype": pl.lit("bfloat16"),
        "tp": pl.lit(shard.tp),
        "seqs": seqs,
        "seconds": pl.col("p50_ns") / 1e9,
    }
    return [
        attention.filter("is_prefill").select(
            operator=pl.lit("prefill attention"), chunk=chunk, context=keys, **shared
        ),
        attention.filter(~pl.col("is_prefill")).select(
            operator=pl.lit("decode attention"), kv_tokens=seqs * keys, skew=pl.lit(1.0), **shared
        ),
    ]
