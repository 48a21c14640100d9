"""Imports Vidur's profiles: median milliseconds of one layer on one GPU, and messages in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from lengthwise.cost.profiles.external_tables import QUARTILES_OF_NORMAL, build_profile, gpu_name, require_columns
from lengthwise.cost.vidur import SURROGATE, TP, attention_shapes, is_surrogate, mlp_shapes, of_shapes, read_rows
from lengthwise.cost.vidur_format import attention_files, csv_file, device_folder, has_csv, model_folder, network_folder
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.profile import MADE_UP, Profile, ProfileFacts
from lengthwise.schema.specs import ModelSpec, NodeSpec

_BY_TOKENS = {
    "attn_pre_proj": "qkv projection", "attn_rope": "rope", "attn_post_proj": "output projection",
    "input_layernorm": "input norm", "post_attention_layernorm": "post-attention norm", "mlp_up_proj": "mlp up",
    "mlp_act": "activation", "mlp_down_proj": "mlp down", "add": "residual add", "emb": "embedding",
}  # fmt: skip
_ATTENTION = ("prefill attention", "decode attention", "kv write")
_LEFT_OUT = ("attn_input_reshape", "attn_output_reshape")
_DTYPE = "float16"


def import_vidur(
    folder: Path | str, model: ModelSpec, device: str, *, node: NodeSpec | None = None, keep_surrogates: bool = False
) -> Profile:
    """Import the measurements of a model on a device, at all TP degrees, from a folder like Vidur's ``data/profiling``.

    ``spread_s`` is the interquartile range of a normal distribution with the measured standard deviation.

    Args:
        model: Its name is that of a folder, and its shapes select rows.
        device: Name of a folder under ``compute``, such as "a100", or of a GPU that begins with such a name.
        node: Selects the network folder; None: the device's folder of pairwise NVLink, or else of DGX.
        keep_surrogates: Keep attention rows that are marked as made up, and list them in ``machine["made_up"]``.

    Raises:
        ProfileError: A folder, file or column is missing.
    """
    root = Path(folder)
    place = device_folder(root, device)
    home = model_folder(place, model)
    notes = ["times are medians in ms of one layer on one GPU, shards emulated on it; 16-bit floats"]
    path = csv_file(home, "mlp")
    rows = require_columns(of_shapes(read_rows([path]), mlp_shapes(model), path), ["num_tokens"], path)
    present = [name for name in _BY_TOKENS if f"time_stats.{name}.median" in rows.columns]
    if not present:
        raise ProfileError(f"{path} must have times of operators (time_stats.*.median); it has none")
    sizes = {"tp": pl.col(TP), "tokens": pl.col("num_tokens")}
    frames = [_timed(rows, name, _BY_TOKENS[name], path, **sizes) for name in present]
    made_up: dict[str, list[int]] = {}
    if paths := attention_files(home):
        rows = of_shapes(read_rows(paths), attention_shapes(model), paths[0])
        surrogates = rows.filter(is_surrogate(rows))
        if len(surrogates):
            degrees = [int(tp) for tp in surrogates[TP].unique().sort()]
            marked = f"(tp {', '.join(map(str, degrees))}) are marked {SURROGATE}: made up, not measured"
            outcome = "kept" if keep_surrogates else "left out"
            notes.append(f"{len(surrogates):,} attention rows {marked}, and {outcome}")
            made_up = dict.fromkeys(_ATTENTION, degrees) if keep_surrogates else {}
            rows = rows if keep_surrogates else rows.filter(~is_surrogate(rows))
        frames += _attention(rows, paths[0], notes)
    else:
        notes.append(f"{home.relative_to(root)} has no attention.csv")
    frames += _network(root, place.name, node, notes)
    metadata = ProfileFacts(
        name=f"{model.name} on {place.name}, Vidur",
        source="vidur",
        gpu=gpu_name(place.name),
        model=model.name,
        engine="Vidur's profiler",
        license="MIT",
        machine={MADE_UP: made_up} if made_up else {},
        notes=tuple(notes),
    )
    return build_profile(metadata, frames, home)


def _timed(rows: pl.DataFrame, name: str, operator: str, path: Path, **columns: Any) -> pl.DataFrame:
    median, std = f"time_stats.{name}.median", f"time_stats.{name}.std"
    timed = require_columns(rows, [median], path).filter(pl.col(median).is_not_null())
    if std in rows.columns:
        columns["spread_s"] = pl.col(std).cast(pl.Float64) * (QUARTILES_OF_NORMAL / 1e3)
    seconds = pl.col(median).cast(pl.Float64) / 1e3
    return timed.select(operator=pl.lit(operator), dtype=pl.lit(_DTYPE), seconds=seconds, **columns)


def _attention(rows: pl.DataFrame, path: Path, notes: list[str]) -> list[pl.DataFrame]:
    require_columns(rows, ["is_prefill", "prefill_chunk_size", "kv_cache_size", "batch_size"], path)
    if "block_size" in rows.columns and rows["block_size"].n_unique() != 1:
        size = int(rows["block_size"].mode().min())  # type: ignore[arg-type]
        notes.append(f"attention is of blocks of {size} tokens; other block sizes are left out")
        rows = rows.filter(pl.col("block_size") == size)
    if any(f"time_stats.{name}.median" in rows.columns for name in _LEFT_OUT):
        notes.append(f"left out, since no engine has them: {', '.join(_LEFT_OUT)}")
    backend = pl.lit("")
    if "attention_backend" in rows.columns:
        backend = pl.col("attention_backend").str.strip_prefix("AttentionBackend.")
    shared = {"tp": pl.col(TP), "backend": backend, "kv_dtype": pl.lit(_DTYPE)}
    chunk, seqs, kv = pl.col("prefill_chunk_size"), pl.col("batch_size"), pl.col("kv_cache_size")
    prefill, decode = rows.filter("is_prefill"), rows.filter(~pl.col("is_prefill"))
    prompts = {"seqs": seqs, "chunk": chunk, "context": kv}
    decodes = {"seqs": seqs, "kv_tokens": seqs * kv, "skew": pl.lit(1.0)}
    frames = [
        _timed(prefill, "attn_prefill", "prefill attention", path, **prompts, **shared),
        _timed(decode, "attn_decode", "decode attention", path, **decodes, **shared),
    ]
    if "time_stats.attn_kv_cache_save.median" in rows.columns:
        tokens = pl.max_horizontal(chunk, seqs)
        frames.append(_timed(rows, "attn_kv_cache_save", "kv write", path, tokens=tokens, **shared))
    return frames


def _network(root: Path, device: str, node: NodeSpec | None, notes: list[str]) -> list[pl.DataFrame]:
    try:
        place = network_folder(root, device, node)
    except ProfileError:
        if node is not None:
            raise
        notes.append("no network folder of this device: no all-reduce and no send")
        return []
    notes.append(f"all-reduce and send are of {place.name}")
    frames = []
    gpus = pl.col("num_workers")
    for name, operator in (("all_reduce", "all-reduce"), ("send_recv", "send")):
        if not has_csv(place, name):
            notes.append(f"{place.relative_to(root)} has no {name}.csv")
            continue
        path = csv_file(place, name)
        rows = require_columns(read_rows([path]), ["num_workers", "devices_per_node", "size"], path)
        in_node = rows.filter(gpus == pl.col("devices_per_node"))
        if len(in_node) < len(rows):
            notes.append(f"{len(rows) - len(in_node):,} {name} rows between nodes are left out")
        sizes = {"gpus": gpus, "bytes": pl.col("size"), "backend": pl.lit("nccl")}
        frames.append(_timed(in_node, name, operator, path, **sizes))
    return frames
