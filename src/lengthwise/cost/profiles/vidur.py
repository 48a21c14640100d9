"""Vidur's profiles as ours: medians in milliseconds of one layer on one GPU, sizes of messages in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.cost.vidur_format import attention_files, csv_file, device_folder, has_csv, model_folder, network_folder
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.profile import MADE_UP, Profile, ProfileFacts
from lengthwise.schema.specs import ModelSpec, NodeSpec

if TYPE_CHECKING:
    import polars as pl

_BY_TOKENS = {
    "attn_pre_proj": "qkv projection",
    "attn_rope": "rope",
    "attn_post_proj": "output projection",
    "input_layernorm": "input norm",
    "post_attention_layernorm": "post-attention norm",
    "mlp_up_proj": "mlp up",
    "mlp_act": "activation",
    "mlp_down_proj": "mlp down",
    "add": "residual add",
    "emb": "embedding",
}
_ATTENTION = ("prefill attention", "decode attention", "kv write")
_LEFT_OUT = ("attn_input_reshape", "attn_output_reshape")
_DTYPE = "float16"


def import_vidur(
    folder: Path | str, model: ModelSpec, device: str, *, node: NodeSpec | None = None, keep_surrogates: bool = False
) -> Profile:
    """The profile of a model on a device of a folder laid out like Vidur's ``data/profiling``.

    All TP degrees go in; a missing attention.csv or network folder is noted. ``spread_s`` is that of a
    normal distribution with the standard deviation that Vidur states.

    Args:
        folder: Holds compute/ and network/.
        model: Its name or an alias must be a folder; its shapes pick the rows.
        device: A folder under compute/ ("a100"), or a GPU whose name starts so.
        node: Picks the network folder; None takes the device's pairwise NVLink, else its DGX.
        keep_surrogates: Keep attention rows marked SURROGATE, which were made up and not measured; the facts'
            ``machine["made_up"]`` then tells their TP degrees by operator.

    Raises:
        ProfileError: The device, the model or a column is missing; says what is there.
    """
    from lengthwise.cost.profiles.external_tables import Rows, assembled, gpu_name
    from lengthwise.cost.vidur import attention_shapes, mlp_shapes, of_shapes, read_rows

    root = Path(folder)
    if not root.is_dir():
        raise ProfileError(f"a Vidur profile must be a folder with compute/ and network/; {folder} is not one")
    place = device_folder(root, device)
    home = model_folder(place, model)
    notes = ["times are medians in ms of one layer on one GPU, shards emulated on it; 16-bit floats"]
    path = csv_file(home, "mlp")
    made_up: dict[str, list[int]] = {}
    frames: Rows = _by_tokens(of_shapes(read_rows([path]), mlp_shapes(model), path), path)
    paths = attention_files(home)
    if paths:
        rows = of_shapes(read_rows(paths), attention_shapes(model), paths[0])
        rows, degrees = _surrogates(rows, notes, keep=keep_surrogates)
        frames += _attention(rows, paths[0], notes)
        made_up = dict.fromkeys(_ATTENTION, degrees) if degrees else {}
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
    return assembled(metadata, frames, home)


def _timed(rows: pl.DataFrame, name: str, operator: str, path: Path, **columns: pl.Expr) -> pl.DataFrame:
    """Rows of one operator; those without a time are no measurements of it."""
    import polars as pl

    from lengthwise.cost.profiles.external_tables import QUARTILES_OF_NORMAL, having

    median, std = f"time_stats.{name}.median", f"time_stats.{name}.std"
    kept = having(rows, [median], path).filter(pl.col(median).is_not_null())
    spread = pl.col(std).cast(pl.Float64) * (QUARTILES_OF_NORMAL / 1e3) if std in rows.columns else None
    return kept.select(
        operator=pl.lit(operator),
        dtype=pl.lit(_DTYPE),
        seconds=pl.col(median).cast(pl.Float64) / 1e3,
        **({} if spread is None else {"spread_s": spread}),
        **columns,
    )


def _by_tokens(rows: pl.DataFrame, path: Path) -> list[pl.DataFrame]:
    import polars as pl

    from lengthwise.cost.profiles.external_tables import having
    from lengthwise.cost.vidur import TP

    having(rows, ["num_tokens"], path)
    there = [name for name in _BY_TOKENS if f"time_stats.{name}.median" in rows.columns]
    if not there:
        raise ProfileError(f"{path} must have times of operators (time_stats.*.median); it has none")
    return [_timed(rows, name, _BY_TOKENS[name], path, tp=pl.col(TP), tokens=pl.col("num_tokens")) for name in there]


def _attention(rows: pl.DataFrame, path: Path, notes: list[str]) -> list[pl.DataFrame]:
    import polars as pl

    from lengthwise.cost.profiles.external_tables import having
    from lengthwise.cost.vidur import TP

    having(rows, ["is_prefill", "prefill_chunk_size", "kv_cache_size", "batch_size"], path)
    rows = _one_block_size(rows, notes)
    if any(f"time_stats.{name}.median" in rows.columns for name in _LEFT_OUT):
        notes.append(f"left out, since no engine has them: {', '.join(_LEFT_OUT)}")
    kernel = pl.lit("")
    if "attention_backend" in rows.columns:
        kernel = pl.col("attention_backend").str.strip_prefix("AttentionBackend.")
    shared = {"tp": pl.col(TP), "backend": kernel, "kv_dtype": pl.lit(_DTYPE)}
    chunk, seqs, kv = pl.col("prefill_chunk_size"), pl.col("batch_size"), pl.col("kv_cache_size")
    prefill, decode = rows.filter("is_prefill"), rows.filter(~pl.col("is_prefill"))
    frames = [
        _timed(
            prefill, "attn_prefill", "prefill attention", path, seqs=seqs, chunk=chunk, context=kv, **shared
        ),
        _timed(
            decode, "attn_decode", "decode attention", path, seqs=seqs, kv_tokens=seqs * kv,
            skew=pl.lit(1.0), **shared,
        ),
    ]  # fmt: skip
    if "time_stats.attn_kv_cache_save.median" in rows.columns:
        tokens = pl.max_horizontal(chunk, seqs)
        frames.append(_timed(rows, "attn_kv_cache_save", "kv write", path, tokens=tokens, **shared))
    return frames


def _one_block_size(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """The rows of the block size that most of them have."""
    import polars as pl

    if "block_size" not in rows.columns or rows["block_size"].n_unique() == 1:
        return rows
    size = int(rows["block_size"].mode().min())  # type: ignore[arg-type]
    notes.append(f"attention is of blocks of {size} tokens; other block sizes are left out")
    return rows.filter(pl.col("block_size") == size)


def _surrogates(rows: pl.DataFrame, notes: list[str], *, keep: bool) -> tuple[pl.DataFrame, list[int]]:
    """(rows, TP degrees of those kept that nobody measured)."""
    from lengthwise.cost.vidur import SURROGATE, TP, is_surrogate

    made = rows.filter(is_surrogate(rows))
    if not len(made):
        return rows, []
    degrees = [int(tp) for tp in made[TP].unique().sort()]
    told = f"{len(made):,} attention rows (tp {', '.join(map(str, degrees))}) are marked {SURROGATE}"
    if keep:
        notes.append(f"{told}: made up, not measured, and kept")
        return rows, degrees
    notes.append(f"{told}: made up, not measured, and left out")
    return rows.filter(~is_surrogate(rows)), []


def _network(root: Path, device: str, node: NodeSpec | None, notes: list[str]) -> list[pl.DataFrame]:
    import polars as pl

    from lengthwise.cost.profiles.external_tables import having
    from lengthwise.cost.vidur import read_rows

    try:
        place = network_folder(root, device, node)
    except ProfileError:
        if node is not None:
            raise
        notes.append("no network folder of this device: no all-reduce and no send")
        return []
    notes.append(f"all-reduce and send are of {place.name}")
    frames = []
    workers, inside = pl.col("num_workers"), pl.col("devices_per_node")
    for name, operator, near in (
        ("all_reduce", "all-reduce", workers == inside),
        ("send_recv", "send", inside == workers),
    ):
        if not has_csv(place, name):
            notes.append(f"{place.relative_to(root)} has no {name}.csv")
            continue
        path = csv_file(place, name)
        rows = having(read_rows([path]), ["num_workers", "devices_per_node", "size"], path)
        kept = rows.filter(near)
        if len(kept) < len(rows):
            notes.append(f"{len(rows) - len(kept):,} {name} rows between nodes are left out")
        sizes = {"gpus": workers, "bytes": pl.col("size"), "backend": pl.lit("nccl")}
        frames.append(_timed(kept, name, operator, path, **sizes))
    return frames
