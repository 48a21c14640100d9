"""Steps that the importers share: read a table, use the catalog's names, combine the rows into a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lengthwise import catalog
from lengthwise.cost.profiles.describe import warnings
from lengthwise.schema.errors import ProfileError, UnknownNameError
from lengthwise.schema.profile import COLUMNS, TEXT_COLUMNS, Profile, ProfileFacts
from lengthwise.schema.specs import dtype_name

QUARTILES_OF_NORMAL = 1.349  # distance between the quartiles of a normal distribution in standard deviations


def read_table(path: Path, required: Sequence[str]) -> pl.DataFrame:
    """Read a Parquet or CSV file (also CSV in gzip). Raises ProfileError if it is unreadable or lacks a column."""
    kind = "Parquet" if path.suffix == ".parquet" else "CSV"
    try:
        rows = pl.read_parquet(path) if kind == "Parquet" else pl.read_csv(path, infer_schema_length=None)
    except (OSError, pl.exceptions.PolarsError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProfileError(f"{path} must be a readable {kind} file: {first}") from error
    return require_columns(rows, required, path)


def require_columns(rows: pl.DataFrame, required: Sequence[str], path: Path) -> pl.DataFrame:
    """Return the rows. Raises ProfileError if they lack a column."""
    if missing := [name for name in required if name not in rows.columns]:
        raise ProfileError(f"{path} must have the columns {', '.join(missing)}; it has {', '.join(rows.columns)}")
    return rows


def gpu_name(name: str) -> str:
    """Return the catalog's name for a device, or the source's name if the catalog has none."""
    gpu = catalog.find_gpu(name)
    return gpu.name if gpu else name


def model_name(name: str) -> str:
    """Return the catalog's name for a model, or the source's name if the catalog has none."""
    spec = catalog.served_model(name) if name else None
    return spec.name if spec else name


def canonical_dtype(name: str) -> str:
    """Return the canonical name of a dtype, or the source's name if there is none ("fp8_block")."""
    try:
        return dtype_name(name)
    except UnknownNameError:
        return name


def build_profile(metadata: ProfileFacts, frames: list[pl.DataFrame], where: Path) -> Profile:
    """Return a profile of all rows of ``frames``, with notes on suspicious values. ``where`` names it in errors."""
    filled = [frame for frame in frames if len(frame)]
    if not filled:
        raise ProfileError(f"{where} must hold rows of operators that a profile has; it holds none")
    rows = pl.concat(filled, how="diagonal_relaxed")
    if untimed := rows["seconds"].null_count():
        raise ProfileError(f"{where} must hold a time in every row; {untimed} rows have none")
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        if name in TEXT_COLUMNS and name in rows.columns:
            columns[name] = np.array(rows[name].fill_null("").to_list(), dtype=np.str_)
        elif name in rows.columns:
            columns[name] = rows[name].fill_null(float("nan") if name == "spread_s" else 0).to_numpy()
    try:
        profile = Profile(metadata, columns)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from error
    return replace(profile, metadata=replace(metadata, notes=(*metadata.notes, *warnings(profile))))


def row_counts(counts: Mapping[str, int]) -> str:
    """Return a sorted text of names and their numbers of rows, such as "alltoall (168)"."""
    return ", ".join(f"{name} ({rows:,})" for name, rows in sorted(counts.items()))
