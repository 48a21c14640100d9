"""Imports LLMServingSim's profiles in both of its layouts, v0 and v1."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lengthwise.cost.profiles import external_tables
from lengthwise.cost.vidur_format import csv_file, has_csv, names_in
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.profile import Profile, ProfileFacts


@dataclass
class Shard:
    """The folder of one TP degree (tp1/, tp2/ ...), and the notes on reading it."""

    folder: Path
    tp: int
    notes: list[str]

    def read(self, name: str, *required: str) -> pl.DataFrame | None:
        """Return the rows of a CSV file, or None if the folder lacks the file."""
        return external_tables.read_table(csv_file(self.folder, name), required) if has_csv(self.folder, name) else None


def import_llmservingsim(folder: Path | str) -> Profile:
    """Import a folder with tp1/, tp2/ ... of LLMServingSim's profiler (v0, v1). Raises ProfileError for others."""
    # v0 is HARDWARE/ORGANISATION/MODEL/tpN/{layers,attention}.csv, v1 .../VARIANT/meta.yaml and
    # tpN/{dense,attention,per_sequence,moe,skew}.csv.
    root = Path(folder)
    if not root.is_dir():
        raise ProfileError(f"an LLMServingSim profile must be a folder with tp1/, tp2/ ...; {root} is not one")
    degrees = [(path, re.match(r"tp(\d+)$", path.name)) for path in root.iterdir() if path.is_dir()]
    notes: list[str] = []
    shards = sorted((Shard(path, int(m[1]), notes) for path, m in degrees if m), key=lambda shard: shard.tp)
    if not shards:
        raise ProfileError(f"{root} must hold tp1/, tp2/ ... of LLMServingSim's profiler; it holds {names_in(root)}")
    v0, v1 = (any(has_csv(one.folder, name) for one in shards) for name in ("layers", "dense"))
    if v0 == v1:
        first, files = shards[0].folder, "layers.csv (v0) or dense.csv (v1) of LLMServingSim, not both"
        raise ProfileError(f"{first} must hold {files}; it holds {names_in(first)}")
    metadata, read = (_v1_metadata, _v1_rows) if v1 else (_v0_metadata, _v0_rows)
    description = metadata(root)
    frames = [frame for shard in shards for frame in read(shard, root)]
    return external_tables.build_profile(
        replace(description, notes=(*description.notes, *dict.fromkeys(notes))), frames, root
    )


_V0_LAYERS = {
    "embedding": "embedding", "input_layernorm": "input norm", "post_layernorm": "post-attention norm", "rope": "rope",
    "o_proj": "output projection", "act_fn": "activation", "down_proj": "mlp down", "gate": "router",
    "final_layernorm": "final norm", "lm_head": "lm head",
}  # fmt: skip
_V0_SUMS = {"qkv projection": ("q_proj", "k_proj", "v_proj"), "mlp up": ("gate_proj", "up_proj")}
"""Operators of a profile that are several layers of v0, which run one after another."""


def _v0_metadata(root: Path) -> ProfileFacts:
    model, device = f"{root.parent.name}/{root.name}", root.parent.parent.name
    return ProfileFacts(
        name=f"{root.name} on {device}, LLMServingSim v0",
        source="llmservingsim v0",
        gpu=external_tables.gpu_name(device),
        model=external_tables.model_name(model),
        engine="PyTorch modules, FlashAttention 2",
        license="MIT",
        notes=("layers converted from ns, attention from ms (TPU: ns); one measurement a token count",),
    )


def _v0_rows(shard: Shard, root: Path) -> list[pl.DataFrame]:
    layers = shard.read("layers", "layer_name", "input", "latency(ns)")
    attention = shard.read("attention", "is_prefill", "prefill_chunk_size", "kv_cache_size", "batch_size")
    dtype = pl.lit("bfloat16" if "TPU" in str(shard.folder) else "float16")
    shared = {"dtype": dtype, "tp": pl.lit(shard.tp)}
    frames = [] if layers is None else _v0_layers(layers, shard, shared)
    if attention is None:
        shard.notes.append(f"tp {shard.tp} has no attention.csv: no decode attention")
        if layers is not None and "attn" in layers["layer_name"]:
            shard.notes.append(f"tp {shard.tp}: prefill attention is of the model's module, without a cached context")
            shared |= {"operator": pl.lit("prefill attention"), "seqs": pl.lit(1), "chunk": pl.col("input")}
            own = layers.filter(pl.col("layer_name") == "attn")
            frames.append(own.select(seconds=pl.col("latency(ns)") / 1e9, **shared))
        return frames
    chunk, seqs, keys = pl.col("prefill_chunk_size"), pl.col("batch_size"), pl.col("kv_cache_size")
    prefill, decode = attention.filter("is_prefill"), attention.filter(~pl.col("is_prefill"))
    if "p50_ns" in attention.columns:  # measured on a TPU
        shared |= {"kv_dtype": pl.lit("bfloat16"), "seqs": seqs, "seconds": pl.col("p50_ns") / 1e9}
        shared["dtype"] = pl.lit("bfloat16")
        frames.append(prefill.select(operator=pl.lit("prefill attention"), chunk=chunk, context=keys, **shared))
        decodes = {"kv_tokens": seqs * keys, "skew": pl.lit(1.0)}
        return [*frames, decode.select(operator=pl.lit("decode attention"), **decodes, **shared)]
    columns = [f"time_stats.attn_{kind}.{name}" for kind in ("prefill", "decode") for name in ("median", "std")]
    external_tables.require_columns(attention, columns, root / shard.folder.name / "attention.csv")
    if len(incomplete := decode.filter(keys < seqs)):
        shard.notes.append(f"{len(incomplete):,} decode rows have fewer keys than sequences and are left out")
    counted = "the keys of all sequences of a batch, including a prompt's own chunk"
    shard.notes.append(f"kv_cache_size of attention.csv counts {counted}")
    decode = decode.filter(keys >= seqs)
    return [
        *frames,
        _v0_gpu_attention(prefill, "prefill", shard, seqs=seqs, chunk=chunk, context=keys - chunk),
        _v0_gpu_attention(decode, "decode", shard, seqs=seqs, kv_tokens=keys // seqs * seqs, skew=pl.lit(1.0)),
    ]


def _v0_layers(layers: pl.DataFrame, shard: Shard, shared: dict[str, Any]) -> list[pl.DataFrame]:
    by_name = {name[0]: one for name, one in layers.group_by("layer_name")}
    tables = {operator: by_name[name] for name, operator in _V0_LAYERS.items() if name in by_name}
    used = {*_V0_LAYERS, "attn"}
    for operator, names in _V0_SUMS.items():
        if all(name in by_name for name in names):
            used |= set(names)
            parts = layers.filter(pl.col("layer_name").is_in(names)).group_by("input", maintain_order=True)
            sums = parts.agg(pl.col("latency(ns)").sum(), pl.len())
            tables[operator] = sums.filter(pl.col("len") == len(names))
    if unused := {str(name): len(one) for name, one in by_name.items() if name not in used}:
        shard.notes.append(f"left out, having no counterpart alone: {external_tables.row_counts(unused)}")
    columns = {"tokens": pl.col("input"), "seconds": pl.col("latency(ns)") / 1e9} | shared
    return [table.select(operator=pl.lit(operator), **columns) for operator, table in tables.items()]


def _v0_gpu_attention(attention: pl.DataFrame, kind: str, shard: Shard, **columns: pl.Expr) -> pl.DataFrame:
    median, std = (pl.col(f"time_stats.attn_{kind}.{name}").cast(pl.Float64) for name in ("median", "std"))
    backend = pl.col("attention_backend") if "attention_backend" in attention.columns else pl.lit("")
    columns |= dict.fromkeys(("dtype", "kv_dtype"), pl.lit("float16"))
    columns |= {"operator": pl.lit(f"{kind} attention"), "tp": pl.lit(shard.tp), "repeats": pl.lit(30)}
    spread_s = std * (external_tables.QUARTILES_OF_NORMAL / 1e3)
    columns |= {"seconds": median / 1e3, "spread_s": spread_s, "backend": backend}
    return attention.filter(median.is_not_null()).select(**columns)


_V1_LAYERS = {  # operators of a profile by v1's layers
    "embedding": ("embedding",), "layernorm": ("input norm", "post-attention norm"), "qk_norm": ("norms",),
    "qkv_proj": ("qkv projection",), "rotary_emb": ("rope",), "o_proj": ("output projection",),
    "gate_up_proj": ("mlp up",), "act_fn": ("activation",), "down_proj": ("mlp down",),
    "final_layernorm": ("final norm",),
}  # fmt: skip
_V1_CALLS = {"norms": 2.0}  # calls per layer if not 1: v1 measures one call, but queries and keys take two

_V1_NOTES = (
    "times in us converted; queries' and keys' norms (qk_norm) are one operator, norms, of two calls",
    "kv_decode is of one sequence; mixed attention holds steps of one prompt's chunk with decodes",
)
_AGREEMENT = 0.1


def _v1_metadata(root: Path) -> ProfileFacts:
    meta = _v1_meta(root)
    engine = meta.get("engine_effective") or {}
    device = str(meta.get("gpu", meta.get("hardware", "")))
    model = external_tables.model_name(str(meta.get("model", "")))
    return ProfileFacts(
        name=f"{model} on {meta.get('hardware', device)}, LLMServingSim v1",
        source="llmservingsim v1",
        gpu=external_tables.gpu_name(device),
        model=model,
        engine=f"vLLM {meta.get('vllm_version', '')}".strip(),
        license="MIT",
        measured=str(meta.get("profiled_at", ""))[:10],
        machine={
            "cuda": str(meta.get("cuda_version", "")),
            "variant": str(meta.get("variant", "")),
            "enforce_eager": bool(engine.get("enforce_eager")),
            "block_size": int(engine.get("block_size", 0)),
        },
        notes=_V1_NOTES,
    )


def _v1_meta(root: Path) -> dict[str, Any]:
    import yaml

    path = root / "meta.yaml"
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        needed = "LLMServingSim's meta.yaml, which names device and model"
        raise ProfileError(f"{root} must hold {needed}; {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} must be YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(meta, dict):
        raise ProfileError(f"{path} must hold a table; it holds a {type(meta).__name__}")
    return meta


def _v1_rows(shard: Shard, root: Path) -> list[pl.DataFrame]:
    meta = _v1_meta(root)
    repeats = int(meta.get("measurement_iterations", 0))
    dtype = pl.lit(external_tables.canonical_dtype(str(meta.get("variant", "bf16")).split("-")[0]))
    shared: dict[str, Any] = {"dtype": dtype, "tp": pl.lit(shard.tp), "repeats": pl.lit(repeats)}
    time_us, frames = pl.col("time_us"), []
    if (dense := shard.read("dense", "layer", "tokens", "time_us")) is not None:
        counts = dict(dense.group_by("layer").len().rows())
        if unused := {layer: rows for layer, rows in counts.items() if layer not in _V1_LAYERS}:
            shard.notes.append(f"left out, having no counterpart: {external_tables.row_counts(unused)}")
        for layer, operators in _V1_LAYERS.items():
            rows = dense.filter(pl.col("layer") == layer)
            for name in operators:
                seconds = time_us * _V1_CALLS.get(name, 1.0) / 1e6
                frames.append(rows.select(operator=pl.lit(name), tokens=pl.col("tokens"), seconds=seconds, **shared))
    if (head := shard.read("per_sequence", "layer", "sequences", "time_us")) is not None:
        for layer, operator in (("lm_head", "lm head"), ("sampler", "sampler")):
            rows = head.filter(pl.col("layer") == layer)
            sizes = {"tokens": pl.col("sequences"), "seconds": time_us * 1.0 / 1e6}
            frames.append(rows.select(operator=pl.lit(operator), **sizes, **shared))
    frames += _v1_moe(shard, shared)
    attention = shard.read("attention", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    if attention is None:
        shard.notes.append(f"tp {shard.tp} has no attention.csv")
        return frames
    cache = str((meta.get("engine_effective") or {}).get("kv_cache_dtype", "auto"))
    shared["kv_dtype"] = dtype if cache == "auto" else pl.lit(external_tables.canonical_dtype(cache))
    frames += _v1_attention(attention, shared)
    skew = shard.read("skew", "n", "nb", "pc", "kp", "kvs", "kv_big", "t_max_us", "t_skew_us")
    calls = 0 if skew is None else _calls_per_time(skew, attention, int(meta.get("measurement_iterations", 1)), shard)
    if skew is None or not calls:
        return frames
    # Of the n sequences of a batch, nb have kv_big tokens, and the others have kvs.
    n, tokens = pl.col("n"), pl.col("nb") * pl.col("kv_big") + (pl.col("n") - pl.col("nb")) * pl.col("kvs")
    kind = pl.when(pl.col("pc") > 0).then(pl.lit("mixed attention")).otherwise(pl.lit("decode attention"))
    decodes = {"seqs": n, "kv_tokens": tokens, "skew": pl.col("kv_big") * n / tokens}
    prompt = {"chunk": pl.col("pc"), "context": pl.col("kp")}
    seconds = pl.col("t_skew_us") / (1e6 * calls)
    return [*frames, skew.select(operator=kind, **decodes, **prompt, seconds=seconds, **shared)]


def _v1_moe(shard: Shard, shared: dict[str, Any]) -> list[pl.DataFrame]:
    moe = shard.read("moe", "tokens", "activated_experts", "time_us")
    if moe is None:
        return []
    if "ep" in moe.columns and len(spread := moe.filter(pl.col("ep") != 1)):
        shard.notes.append(f"{len(spread):,} moe rows with experts spread over GPUs (EP) are left out")
        moe = moe.filter(pl.col("ep") == 1)
    sizes = {"tokens": pl.col("tokens"), "experts": pl.col("activated_experts"), "seconds": pl.col("time_us") / 1e6}
    return [moe.select(operator=pl.lit("moe block"), **sizes, **shared)]


def _v1_attention(attention: pl.DataFrame, shared: dict[str, Any]) -> list[pl.DataFrame]:
    prompts, decodes = pl.col("prefill_chunk") > 0, pl.col("n_decode") > 0
    shared = shared | {"seconds": pl.col("time_us") / 1e6}
    prompt = {"chunk": pl.col("prefill_chunk"), "context": pl.col("kv_prefill")}
    decode = {"seqs": pl.col("n_decode"), "kv_tokens": pl.col("n_decode") * pl.col("kv_decode"), "skew": pl.lit(1.0)}
    return [
        attention.filter(prompts & ~decodes).select(
            operator=pl.lit("prefill attention"), seqs=pl.lit(1), **prompt, **shared
        ),
        attention.filter(~prompts & decodes).select(operator=pl.lit("decode attention"), **decode, **shared),
        attention.filter(prompts & decodes).select(operator=pl.lit("mixed attention"), **prompt, **decode, **shared),
    ]


def _calls_per_time(skew: pl.DataFrame, attention: pl.DataFrame, iterations: int, shard: Shard) -> int:
    """Return how many calls a time of skew.csv sums, by batches in attention.csv, or 0 if that is unclear."""
    keys = {"pc": "prefill_chunk", "kp": "kv_prefill", "n": "n_decode", "kv_big": "kv_decode"}
    both = skew.join(attention, left_on=list(keys), right_on=list(keys.values()))
    if both.is_empty():
        sums = f"its times are taken as sums over {iterations} calls"
        shard.notes.append(f"tp {shard.tp}: no batch of skew.csv is in attention.csv as well; {sums}")
        return iterations
    ratio = float(np.median(both["t_max_us"] / both["time_us"]))
    reason = f"equal batches take {ratio:.3g} times as long as in attention.csv"
    for calls in dict.fromkeys((iterations, 1)):
        if abs(ratio / calls - 1) <= _AGREEMENT:
            shard.notes.append(f"tp {shard.tp}: times of skew.csv divided by {calls}, since {reason}")
            return calls
    shard.notes.append(f"tp {shard.tp}: skew.csv left out ({len(skew):,} rows): {reason}")
    return 0
