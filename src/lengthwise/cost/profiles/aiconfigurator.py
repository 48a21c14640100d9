"""Imports NVIDIA AIConfigurator's tables for a system, an engine and a version."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl

from lengthwise.cost.profiles.external_tables import build_profile, canonical_dtype, gpu_name, read_table, row_counts
from lengthwise.schema.errors import MissingExtraError, ProfileError, UnknownNameError
from lengthwise.schema.profile import Profile, ProfileFacts
from lengthwise.schema.specs import dtype_bytes

_PACKAGES = ("aiconfigurator_core", "aisimulate_core", "aiconfigurator")
_FILES = {
    "gemm": ("gemm_perf.parquet",),
    "attention": ("context_attention_perf.parquet", "generation_attention_perf.parquet"),
    "moe": ("moe_perf.parquet",),
    "comm": ("custom_allreduce_perf.parquet",),
}
_NCCL = "nccl_perf.parquet"


def import_aiconfigurator(folder: Path | str | None, system: str, backend: str, version: str) -> Profile:
    """Import the model-independent kernels that AIConfigurator measured on a system with a version of an engine.

    These are GEMM, attention, fused MoE, the engine's own all-reduce, and the all-reduce of the newest NCCL. If the
    version has no all-reduce, the one of the next older version that has one is taken, or else of the oldest; notes
    list other missing tables. ``folder`` has the subfolders h200_sxm/, b200_sxm/ ... None: the installed package's.

    Raises:
        MissingExtraError: ``folder`` is None, and the package is not installed.
        ProfileError: ``folder`` is no folder, has no table, or a table is unreadable or lacks columns.
        UnknownNameError: The folder has no such system, engine or version.
    """
    root = installed_tables() if folder is None else Path(folder)
    if not root.is_dir():
        raise ProfileError(f"AIConfigurator's tables must be in a folder of systems; {root} is not one")
    systems = [path.name for path in root.iterdir() if path.is_dir()]
    if system not in systems:
        raise UnknownNameError("system", system, systems)
    notes: list[str] = []
    frames, device = [], ""
    for name, path in _find_files(root / system, backend, version, notes).items():
        reader, required = _READERS[name]
        rows = read_table(path, ("device", "kernel_source", "op_name", "latency", *required))
        device = device or str(rows["device"][0]) if len(rows) else device
        frames.append(reader(rows, notes))
    metadata = ProfileFacts(
        name=f"{system}, {backend} {version}, AIConfigurator",
        source="aiconfigurator",
        gpu=gpu_name(device),
        engine=f"{backend} {version}",
        license="Apache-2.0",
        machine={"system": system, "device": device},
        notes=("times in ms converted; message sizes in elements times their width", *notes),
    )
    return build_profile(metadata, frames, root / system)


def installed_tables() -> Path:
    """Return the folder of systems in aiconfigurator-core. Raises MissingExtraError without that package."""
    for name in _PACKAGES:
        spec = find_spec(name)
        for root in (spec.submodule_search_locations or []) if spec else []:
            data = Path(root) / "systems" / "data"
            if data.is_dir():
                return data
    raise MissingExtraError("AIConfigurator's own tables (or give a folder with them)", "aic")


def _find_files(place: Path, backend: str, version: str, notes: list[str]) -> dict[str, Path]:
    engines = {path.name for kind in _FILES for path in (place / kind).glob("*") if path.is_dir()} - {"nccl"}
    if backend not in engines:
        raise UnknownNameError("engine", backend, engines)
    versions = {path.name for kind in _FILES for path in (place / kind / backend).glob("*") if path.is_dir()}
    if version not in versions:
        raise UnknownNameError(f"version of {backend}", version, versions)
    files: dict[str, Path] = {}
    for kind, names in _FILES.items():
        nearest = _nearest_version(place / kind / backend, version, names[0]) if kind == "comm" else version
        for name in names:
            path = place / kind / backend / nearest / name
            if path.is_file():
                files[name] = path
                if nearest != version:
                    notes.append(f"{name} is of {backend} {nearest}")
            else:
                notes.append(f"there is no {kind} {name} of {backend} {version}")
    nccl = _nearest_version(place / "comm" / "nccl", "", _NCCL)
    if nccl:
        files[_NCCL] = place / "comm" / "nccl" / nccl / _NCCL
        notes.append(f"NCCL is {nccl}")
    return files


def _nearest_version(folder: Path, version: str, name: str) -> str:
    """Return the newest version up to ``version`` (any if empty) with the file, or else the oldest one with it."""

    def numbers(one: str) -> list[int]:  # the number of a release candidate is one of them
        return [int(part) for part in "".join(c if c.isdigit() else " " for c in one).split()]

    known = sorted((path.parent.name for path in folder.glob(f"*/{name}")), key=numbers)
    if not known:
        return version
    below = [one for one in known if not version or numbers(one) <= numbers(version)]
    return below[-1] if below else known[0]


_SECONDS = pl.col("latency") / 1e3
_BACKEND = pl.col("kernel_source")
_MOE_SIZES = {"tokens": "num_tokens", "experts": "num_experts", "topk": "topk", "k": "hidden_size"}
_MOE_SIZES |= {"gpus": "moe_tp_size"}
_MEASURED = {"backend": _BACKEND, "seconds": _SECONDS}


def _dtypes(rows: pl.DataFrame, column: str) -> pl.Expr:
    names = {str(name): canonical_dtype(str(name)) for name in rows[column].unique()}
    return pl.col(column).replace_strict(names, return_dtype=pl.String)


def _gemm(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    del notes
    sizes = {"tokens": pl.col("m"), "n": pl.col("n"), "k": pl.col("k")}
    return rows.select(operator=pl.lit("gemm"), dtype=_dtypes(rows, "gemm_dtype"), **sizes, **_MEASURED)


def _attention(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return attention measurements with the columns of a ``Profile``, and append to ``notes`` what is left out.

    In ``rows``, ``step`` tokens are cached before a chunk of ``isl`` prompt tokens or one decoded token.
    """
    beams = rows.filter(pl.col("beam_width") > 1) if "beam_width" in rows.columns else rows.clear()
    if len(beams):
        notes.append(f"{len(beams):,} attention rows with beams are left out")
        rows = rows.filter(pl.col("beam_width") <= 1)
    is_prefill = rows["op_name"].str.starts_with("context").all()
    kind = "prefill" if is_prefill else "decode"
    window = pl.col("window_size") if "window_size" in rows.columns else pl.lit(0)
    name = pl.when(window > 0).then(pl.lit(f"{kind} window attention")).otherwise(pl.lit(f"{kind} attention"))
    seqs, heads, kv = pl.col("batch_size"), pl.col("num_heads"), pl.col("num_key_value_heads")
    step: dict[str, Any] = {"chunk": pl.col("isl"), "context": pl.col("step")}
    if not is_prefill:
        step = {"kv_tokens": seqs * pl.col("step"), "skew": pl.lit(1.0)}
    return rows.select(
        operator=name,
        dtype=_dtypes(rows, "attn_dtype"),
        kv_dtype=_dtypes(rows, "kv_cache_dtype"),
        seqs=seqs,
        heads=heads,
        kv_heads=pl.when(kv == 0).then(heads).otherwise(kv),
        head_dim=pl.col("head_dim"),
        window=window,
        **step,
        **_MEASURED,
    )


def _moe(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return rows of experts split over ``moe_tp_size`` GPUs. ``backend`` includes the token distribution."""
    spread = rows.filter(pl.col("moe_ep_size") > 1)
    if len(spread):
        notes.append(f"{len(spread):,} fused moe rows with experts spread over GPUs (EP) are left out")
    return rows.filter(pl.col("moe_ep_size") <= 1).select(
        operator=pl.lit("fused moe"),
        dtype=_dtypes(rows, "moe_dtype"),
        backend=pl.format("{} ({})", _BACKEND, pl.col("distribution")),
        **{name: pl.col(column) for name, column in _MOE_SIZES.items()},
        n=pl.col("inter_size") // pl.col("moe_tp_size"),
        seconds=_SECONDS,
    )


def _all_reduce(rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    is_nccl = "nccl_dtype" in rows.columns
    column = "nccl_dtype" if is_nccl else "allreduce_dtype"
    backend = pl.lit("nccl") if is_nccl else pl.col("backend") if "backend" in rows.columns else _BACKEND
    own = rows.filter(pl.col("op_name") == "all_reduce")
    if len(own) < len(rows):
        other = rows.filter(pl.col("op_name") != "all_reduce").group_by("op_name").len()
        notes.append(f"left out, having no counterpart: {row_counts(dict(other.rows()))}")
    try:
        widths = {str(name): int(dtype_bytes(str(name))) for name in own[column].unique()}
    except UnknownNameError as error:
        raise ProfileError(f"messages must be of a known dtype: {error}") from error
    return own.select(
        operator=pl.lit("all-reduce"),
        dtype=_dtypes(own, column),
        backend=backend,
        gpus=pl.col("num_gpus"),
        bytes=pl.col("message_size") * pl.col(column).replace_strict(widths, return_dtype=pl.Int64),
        seconds=_SECONDS,
    )


_SHAPE = (
    "batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype", "kv_cache_dtype",
)  # fmt: skip
_MOE = (
    "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
    "distribution",
)  # fmt: skip
_READERS: dict[str, tuple[Callable[[pl.DataFrame, list[str]], pl.DataFrame], tuple[str, ...]]] = {
    "gemm_perf.parquet": (_gemm, ("gemm_dtype", "m", "n", "k")),
    "context_attention_perf.parquet": (_attention, _SHAPE),
    "generation_attention_perf.parquet": (_attention, _SHAPE),
    "moe_perf.parquet": (_moe, _MOE),
    "custom_allreduce_perf.parquet": (_all_reduce, ("allreduce_dtype", "num_gpus", "message_size")),
    _NCCL: (_all_reduce, ("nccl_dtype", "num_gpus", "message_size")),
}
"""By file: the reader and the columns that the reader needs."""
