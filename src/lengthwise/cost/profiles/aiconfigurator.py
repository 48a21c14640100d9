"""NVIDIA AIConfigurator's tables as ours: which files a system, an engine and a version have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from lengthwise.cost.profiles.external_tables import dtype, entries, having, read_table
from lengthwise.schema.errors import MissingExtraError, ProfileError, UnknownNameError
from lengthwise.schema.profile import Profile, ProfileFacts
from lengthwise.schema.specs import dtype_bytes

if TYPE_CHECKING:
    import polars as pl

_PACKAGES = ("aiconfigurator_core", "aisimulate_core", "aiconfigurator")
_FILES = {
    "gemm": ("gemm_perf.parquet",),
    "attention": ("context_attention_perf.parquet", "generation_attention_perf.parquet"),
    "moe": ("moe_perf.parquet",),
    "comm": ("custom_allreduce_perf.parquet",),
}
_NCCL = "nccl_perf.parquet"


@dataclass
class Tables:
    """The files of one system, engine and version, by file name, and what a reader must know."""

    files: dict[str, Path]
    notes: list[str] = field(default_factory=list)


def import_aiconfigurator(folder: Path | str | None, system: str, backend: str, version: str) -> Profile:
    """The kernels of no model that AIConfigurator measured on a system with an engine's version.

    GEMM, context and generation attention, fused MoE, the engine's own all-reduce, and NCCL's of the newest
    version there; the engine's all-reduce also of the nearest version below, where its own was not measured.

    Args:
        folder: Holds h200_sxm/, b200_sxm/ ...; None takes the data of the installed package.
        system: A folder there, such as "h200_sxm".
        backend: The engine: "vllm", "trtllm" or "sglang".
        version: Of the engine, such as "0.24.0".

    Raises:
        ProfileError: There is no such folder, or no table; says what is there.
        UnknownNameError: There is no such system, engine or version.
        MissingExtraError: ``folder`` is None and no package is installed.
    """
    from lengthwise.cost.profiles.external_tables import assembled, gpu_name

    place = _system(installed_tables() if folder is None else Path(folder), system)
    tables = _tables(place, backend, version)
    frames: list[pl.DataFrame] = []
    device = ""
    for name, path in tables.files.items():
        rows = table(path)
        device = device or str(rows["device"][0]) if len(rows) else device
        frames.append(READERS[name](rows, tables.notes))
    metadata = ProfileFacts(
        name=f"{system}, {backend} {version}, AIConfigurator",
        source="aiconfigurator",
        gpu=gpu_name(device),
        engine=f"{backend} {version}",
        license="Apache-2.0",
        machine={"system": system, "device": device},
        notes=("times in ms converted; message sizes in elements times their width", *tables.notes),
    )
    return assembled(metadata, frames, place)


def installed_tables() -> Path:
    """The folder of systems in the installed package (aiconfigurator-core).

    Raises:
        MissingExtraError: None of the packages that hold it is installed.
    """
    for name in _PACKAGES:
        spec = find_spec(name)
        for root in (spec.submodule_search_locations or []) if spec else []:
            data = Path(root) / "systems" / "data"
            if data.is_dir():
                return data
    raise MissingExtraError("AIConfigurator's own tables (or give a folder with them)", "aic")


def _system(folder: Path, system: str) -> Path:
    if not folder.is_dir():
        raise ProfileError(f"AIConfigurator's tables must be in a folder of systems; {folder} is not one")
    there = [path.name for path in folder.iterdir() if path.is_dir()]
    if system not in there:
        raise UnknownNameError("system", system, there)
    return folder / system


def _tables(place: Path, backend: str, version: str) -> Tables:
    """The files that there are, in the order of _FILES."""
    engines = {path.name for kind in _FILES for path in (place / kind).glob("*") if path.is_dir()}
    if backend not in engines - {"nccl"}:
        raise UnknownNameError("engine", backend, engines - {"nccl"})
    versions = {path.name for kind in _FILES for path in (place / kind / backend).glob("*") if path.is_dir()}
    if version not in versions:
        raise UnknownNameError(f"version of {backend}", version, versions)
    tables = Tables({})
    for kind, names in _FILES.items():
        here = _nearest(place / kind / backend, version, names[0]) if kind == "comm" else version
        for name in names:
            path = place / kind / backend / here / name
            if path.is_file():
                tables.files[name] = path
                if here != version:
                    tables.notes.append(f"{name} is of {backend} {here}")
            else:
                tables.notes.append(f"there is no {kind} {name} of {backend} {version}")
    nccl = _nearest(place / "comm" / "nccl", "", _NCCL)
    if nccl:
        tables.files[_NCCL] = place / "comm" / "nccl" / nccl / _NCCL
        tables.notes.append(f"NCCL is {nccl}")
    return tables


def _nearest(folder: Path, version: str, name: str) -> str:
    """The version itself if it has the file, else the newest below it, else the oldest; "" for the newest."""
    there = sorted((path.parent.name for path in folder.glob(f"*/{name}")), key=_order)
    if not there:
        return version
    below = [one for one in there if not version or _order(one) <= _order(version)]
    return below[-1] if below else there[0]


def _order(version: str) -> list[int]:
    """Numbers of a version in order; a release candidate's number is one of them."""
    digits = "".join(c if c.isdigit() else " " for c in version)
    return [int(part) for part in digits.split()]


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


def _all_reduce(rows: pl.DataFrame, column: str, owner: pl.Expr, notes: list[str]) -> pl.DataFrame:
    own = rows.filter(pl.col("op_name") == "all_reduce")
    if len(own) < len(rows):
        other = rows.filter(pl.col("op_name") != "all_reduce").group_by("op_name").len()
        notes.append(f"left out, having no counterpart: {entries(dict(other.rows()))}")
    try:
        widths = {str(name): int(dtype_bytes(str(name))) for name in own[column].unique()}
    except UnknownNameError as error:
        raise ProfileError(f"messages must be of a known dtype: {error}") from error
    return own.select(
        operator=pl.lit("all-reduce"),
        dtype=_named(own, column),
        backend=owner,
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
