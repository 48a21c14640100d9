"""LLMServingSim's second profiler: kernels of vLLM in microseconds, per call.

In attention.csv each prompt and decode is (new tokens, tokens cached before): ``kv_decode`` is of one sequence.
256 sequences with 16,384 each take 11.2 ms on an RTX PRO 6000, 1.5 TB/s. skew.csv holds the sum over
``measurement_iterations`` calls, where attention.csv holds their mean: its uniform batches take three times as
long as the same ones there, on every device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lengthwise.cost.profiles._assembled import dtype, gpu_name, listed, model_name
from lengthwise.cost.profiles._llmservingsim import Shard
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.profile import ProfileFacts

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


def facts(root: Path) -> ProfileFacts:
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
        licence="MIT",
        measured=str(meta.get("profiled_at", ""))[:10],
        machine={
            "cuda": str(meta.get("cuda_version", "")),
            "variant": str(meta.get("variant", "")),
            "enforce_eager": bool(engine.get("enforce_eager")),
            "block_size": int(engine.get("block_size", 0)),
        },
        notes=_NOTES,
    )


def rows(shard: Shard, root: Path) -> list[pl.DataFrame]:
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
    return frames if skew is None else [*frames, *_skewed(skew, attention, meta, shard, shared)]


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
        shard.notes.append(f"left out, having no counterpart: {listed(left)}")
    return [
        _by_tokens(dense, theirs, ours, "tokens", shared, times)
        for theirs, many in _DENSE.items()
        for ours, times in many
    ]


def _by_tokens(
    table: pl.DataFrame, theirs: str, ours: str, tokens: str, shared: dict[str, Any], times: float = 1.0
) -> pl.DataFrame:
    return table.filter(pl.col("layer") == theirs).select(
        operator=pl.lit(ours), tokens=pl.col(tokens), seconds=pl.col("time_us") * times / 1e6, **shared
    )


def _experts(moe: pl.DataFrame, shard: Shard, shared: dict[str, Any]) -> pl.DataFrame:
    shard.notes.append(
        "fused moe: experts is the number of experts that any token chose; the router is included"
    )
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
    decode = {
        "seqs": pl.col("n_decode"),
        "kv_tokens": pl.col("n_decode") * pl.col("kv_decode"),
        "skew": pl.lit(1.0),
    }
    return [
        attention.filter(prompts & ~decodes).select(
            operator=pl.lit("prefill attention"), seqs=pl.lit(1), **prompt, **shared
        ),
        attention.filter(~prompts & decodes).select(operator=pl.lit("decode attention"), **decode, **shared),
        attention.filter(prompts & decodes).select(
            operator=pl.lit("mixed attention"), **prompt, **decode, **shared
        ),
    ]


def _skewed(
    skew: pl.DataFrame, attention: pl.DataFrame, meta: dict[str, Any], shard: Shard, shared: dict[str, Any]
) -> list[pl.DataFrame]:
    """Batches of which ``nb`` sequences have ``kv_big`` tokens and the others ``kvs``."""
    calls = _calls(skew, attention, int(meta.get("measurement_iterations", 1)), shard)
    if not calls:
        return []
    n, large, small = (
        pl.col("n"),
        pl.col("nb") * pl.col("kv_big"),
        (pl.col("n") - pl.col("nb")) * pl.col("kvs"),
    )
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
