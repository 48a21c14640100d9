"""NVIDIA AIConfigurator's tables as ours: which files a system, an engine and a version have."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.schema.errors import MissingExtraError, ProfileError, UnknownNameError
from lengthwise.schema.profile import Profile, ProfileFacts

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
    from lengthwise.cost.profiles import _aiconfigurator_rows as read
    from lengthwise.cost.profiles._assembled import assembled, gpu_name

    place = _system(installed_tables() if folder is None else Path(folder), system)
    tables = _tables(place, backend, version)
    frames: list[pl.DataFrame] = []
    device = ""
    for name, path in tables.files.items():
        table = read.table(path)
        device = device or str(table["device"][0]) if len(table) else device
        frames.append(read.READERS[name](table, tables.notes))
    facts = ProfileFacts(
        name=f"{system}, {backend} {version}, AIConfigurator",
        source="aiconfigurator",
        gpu=gpu_name(device),
        engine=f"{backend} {version}",
        licence="Apache-2.0",
        machine={"system": system, "device": device},
        notes=("times in ms converted; message sizes in elements times their width", *tables.notes),
    )
    return assembled(facts, frames, place)


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
