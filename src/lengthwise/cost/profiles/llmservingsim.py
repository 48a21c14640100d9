"""LLMServingSim's profiles as ours: which of its two layouts a folder has, and who reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from lengthwise.cost.profiles.external_tables import QUARTILES_OF_NORMAL, dtype, entries, gpu_name, having, model_name
from lengthwise.cost.vidur_format import csv_file, has_csv
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.profile import Profile, ProfileFacts

if TYPE_CHECKING:
    import polars as pl

_DEGREE = re.compile(r"tp(\d+)$")


@dataclass
class Shard:
    """One tpN folder, and what a reader must know of it."""

    folder: Path
    tp: int
    notes: list[str]

    def read(self, name: str, needed: tuple[str, ...]) -> pl.DataFrame | None:
        """The rows of one of its CSV files; None where there is none."""
        from lengthwise.cost.profiles.external_tables import read_csv

        return read_csv(csv_file(self.folder, name), needed) if has_csv(self.folder, name) else None


def import_llmservingsim(folder: Path | str) -> Profile:
    """The profile of a folder with tp1/, tp2/ ..., laid out by LLMServingSim's profiler v0 or v1.

    v0 is HARDWARE/ORGANISATION/MODEL/tpN/{layers,attention}.csv, v1 .../VARIANT/meta.yaml and
    tpN/{dense,attention,per_sequence,moe,skew}.csv. All TP degrees go in; notes of the profile's facts say
    what was left out or converted.

    Raises:
        ProfileError: It has neither layout, or a file lacks a column; says what is there.
    """
    root = Path(folder)
    notes: list[str] = []
    shards = _shards(root, notes)
    v0, v1 = (any(has_csv(one.folder, name) for one in shards) for name in ("layers", "dense"))
    if v0 == v1:
        from lengthwise.cost.profiles.external_tables import names_in

        raise ProfileError(
            f"{shards[0].folder} must hold layers.csv (v0) or dense.csv (v1) of LLMServingSim, not both; it "
            f"holds {names_in(shards[0].folder)}"
        )
    return _made(root, shards, notes, newer=v1)


def _made(root: Path, shards: list[Shard], notes: list[str], *, newer: bool) -> Profile:
    from lengthwise.cost.profiles.external_tables import assembled

    metadata: Callable[[Path], ProfileFacts]
    metadata, rows = (_v1_facts, _v1_rows) if newer else (_v0_facts, _v0_rows)
    about = metadata(root)
    frames = [frame for shard in shards for frame in rows(shard, root)]
    whole = ProfileFacts(**{**vars(about), "notes": (*about.notes, *dict.fromkeys(notes))})
    return assembled(whole, frames, root)


def _shards(root: Path, notes: list[str]) -> list[Shard]:
    from lengthwise.cost.profiles.external_tables import names_in

    if not root.is_dir():
        raise ProfileError(f"an LLMServingSim profile must be a folder with tp1/, tp2/ ...; {root} is not one")
    found = [(int(m[1]), path) for path in root.iterdir() if path.is_dir() and (m := _DEGREE.match(path.name))]
    if not found:
        raise ProfileError(f"{root} must hold tp1/, tp2/ ... of LLMServingSim's profiler; it holds {names_in(root)}")
    return [Shard(path, tp, notes) for tp, path in sorted(found)]


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


def _v0_facts(root: Path) -> ProfileFacts:
    """What the folder's names tell."""
    model, device = f"{root.parent.name}/{root.name}", root.parent.parent.name
    return ProfileFacts(
        name=f"{root.name} on {device}, LLMServingSim v0",
        source="llmservingsim v0",
        gpu=gpu_name(device),
        model=model_name(model),
        engine="PyTorch modules, FlashAttention 2",
        license="MIT",
        notes=("layers converted from ns, attention from ms (TPU: ns); one measurement a token count",),
    )


def _v0_rows(shard: Shard, root: Path) -> list[pl.DataFrame]:
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
        needed = [f"time_stats.attn_{kind}.{name}" for kind in ("prefill", "decode") for name in ("median", "std")]
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
        shard.notes.append(f"left out, having no counterpart alone: {entries(left)}")
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
        _timed(attention.filter("is_prefill"), "prefill", shard, seqs=seqs, chunk=chunk, context=keys - chunk),
        _timed(
            decode.filter(keys >= seqs), "decode", shard, seqs=seqs, kv_tokens=keys // seqs * seqs, skew=pl.lit(1.0)
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


_DENSE: dict[str, tuple[tuple[str, float], ...]] = {
    "embedding": (("embedding", 1.0),),
    "layernorm": (("input norm", 1.0), ("post-attention norm", 1.0)),
    "qk_norm": (("norms", 2.0),),
    "qkv_proj": (("qkv projection", 1.0),),
    "rotary_emb": (("rope", 1.0),),
    "o_proj": (("output projection", 1.0),),
    "gate_up_proj": (("mlp up", 1.0),),
    "act_fn": (("activation", 1.0),),
    "down_proj": (("mlp down", 1.0),),
    "final_layernorm": (("final norm", 1.0),),
}
"""Ours of theirs, and how often a layer calls it: times are of one call, and queries and keys are normed in two."""

_HEAD = {"lm_head": "lm head", "sampler": "sampler"}
_NOTES = (
    "times in us converted; queries' and keys' norms (qk_norm) are one operator, norms, of two calls",
    "kv_decode is of one sequence; mixed attention holds steps of one prompt's chunk with decodes",
)
_AGREES = 0.1


def _v1_facts(root: Path) -> ProfileFacts:
    """What meta.yaml tells."""
    meta = _meta(root)
    engine = meta.get("engine_effective") or {}
    device = str(meta.get("gpu", meta.get("hardware", "")))
    model = model_name(str(meta.get("model", "")))
    return ProfileFacts(
        name=f"{model} on {meta.get('hardware', device)}, LLMServingSim v1",
        source="llmservingsim v1",
        gpu=gpu_name(device),
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
        notes=_NOTES,
    )


def _v1_rows(shard: Shard, root: Path) -> list[pl.DataFrame]:
    """Frames with columns named as a profile's."""
    meta = _meta(root)
    shared = {
        "dtype": pl.lit(dtype(str(meta.get("variant", "bf16")).split("-")[0])),
        "tp": pl.lit(shard.tp),
        "repeats": pl.lit(int(meta.get("measurement_iterations", 0))),
    }
    frames = []
    dense = shard.read("dense", ("layer", "tokens", "time_us"))
    if dense is not None:
        frames += _dense(dense, shard, shared)
    head = shard.read("per_sequence", ("layer", "sequences", "time_us"))
    if head is not None:
        frames += [_by_tokens(head, theirs, ours, "sequences", shared) for theirs, ours in _HEAD.items()]
    moe = shard.read("moe", ("tokens", "activated_experts", "time_us"))
    if moe is not None:
        frames.append(_experts(moe, shard, shared))
    attention = shard.read("attention", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))
    if attention is None:
        shard.notes.append(f"tp {shard.tp} has no attention.csv")
        return frames
    cache = str((meta.get("engine_effective") or {}).get("kv_cache_dtype", "auto"))
    shared["kv_dtype"] = shared["dtype"] if cache == "auto" else pl.lit(dtype(cache))
    frames += _attention(attention, shared)
    needed = ("n", "nb", "pc", "kp", "kvs", "kv_big", "t_max_us", "t_skew_us")
    skew = shard.read("skew", needed)
    return frames if skew is None else [*frames, *_skew(skew, attention, meta, shard, shared)]


def _meta(root: Path) -> dict[str, Any]:
    import yaml

    path = root / "meta.yaml"
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(
            f"{root} must hold LLMServingSim's meta.yaml, which names device and model; {error.strerror}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} must be YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(meta, dict):
        raise ProfileError(f"{path} must hold a table; it holds a {type(meta).__name__}")
    return meta


def _dense(dense: pl.DataFrame, shard: Shard, shared: dict[str, Any]) -> list[pl.DataFrame]:
    counts = dict(dense.group_by("layer").len().rows())
    left = {layer: rows for layer, rows in counts.items() if layer not in _DENSE}
    if left:
        shard.notes.append(f"left out, having no counterpart: {entries(left)}")
    return [
        _by_tokens(dense, theirs, ours, "tokens", shared, times)
        for theirs, many in _DENSE.items()
        for ours, times in many
    ]


def _by_tokens(
    table: pl.DataFrame, other: str, own: str, tokens: str, shared: dict[str, Any], times: float = 1.0
) -> pl.DataFrame:
    return table.filter(pl.col("layer") == other).select(
        operator=pl.lit(own), tokens=pl.col(tokens), seconds=pl.col("time_us") * times / 1e6, **shared
    )


def _experts(moe: pl.DataFrame, shard: Shard, shared: dict[str, Any]) -> pl.DataFrame:
    shard.notes.append("fused moe: experts is the number of experts that any token chose; the router is included")
    return moe.select(
        operator=pl.lit("fused moe"),
        tokens=pl.col("tokens"),
        experts=pl.col("activated_experts"),
        seconds=pl.col("time_us") / 1e6,
        **shared,
    )


def _attention(attention: pl.DataFrame, shared: dict[str, Any]) -> list[pl.DataFrame]:
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


def _skew(
    skew: pl.DataFrame, attention: pl.DataFrame, meta: dict[str, Any], shard: Shard, shared: dict[str, Any]
) -> list[pl.DataFrame]:
    """Batches of which ``nb`` sequences have ``kv_big`` tokens and the others ``kvs``."""
    calls = _calls(skew, attention, int(meta.get("measurement_iterations", 1)), shard)
    if not calls:
        return []
    n, large, small = (pl.col("n"), pl.col("nb") * pl.col("kv_big"), (pl.col("n") - pl.col("nb")) * pl.col("kvs"))
    columns = {
        "seqs": n,
        "kv_tokens": large + small,
        "skew": pl.col("kv_big") * n / (large + small),
        "chunk": pl.col("pc"),
        "context": pl.col("kp"),
        "seconds": pl.col("t_skew_us") / (1e6 * calls),
    }
    kind = pl.when(pl.col("pc") > 0).then(pl.lit("mixed attention")).otherwise(pl.lit("decode attention"))
    return [skew.select(operator=kind, **columns, **shared)]


def _calls(skew: pl.DataFrame, attention: pl.DataFrame, iterations: int, shard: Shard) -> int:
    """How many calls a time of skew.csv counts, by batches that attention.csv has as well; 0 if neither fits."""
    here = {"pc": "prefill_chunk", "kp": "kv_prefill", "n": "n_decode", "kv_big": "kv_decode"}
    both = skew.join(attention, left_on=list(here), right_on=list(here.values()))
    if both.is_empty():
        shard.notes.append(
            f"tp {shard.tp}: no batch of skew.csv is in attention.csv as well; its times are taken as sums over "
            f"{iterations} calls"
        )
        return iterations
    ratio = float(np.median(both["t_max_us"] / both["time_us"]))
    for calls in dict.fromkeys((iterations, 1)):
        if abs(ratio / calls - 1) <= _AGREES:
            shard.notes.append(
                f"tp {shard.tp}: times of skew.csv divided by {calls}, since equal batches take {ratio:.3g} times "
                "as long as in attention.csv"
            )
            return calls
    shard.notes.append(
        f"tp {shard.tp}: skew.csv left out ({len(skew):,} rows): equal batches take {ratio:.3g} times as long "
        "as in attention.csv"
    )
    return 0
