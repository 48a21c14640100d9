"""What every importer does: reads a table, names device and model as the catalog does, stacks the rows."""

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

QUARTILES_OF_NORMAL = 1.349
"""The distance between the quartiles of a normal distribution, in its standard deviations."""

Rows = list[pl.DataFrame]


def read_csv(path: Path, needed: Sequence[str]) -> pl.DataFrame:
    """The rows of a CSV file, packed or not, each of which has a number where one is needed.

    Raises:
        ProfileError: The file cannot be read, or lacks a column.
    """
    try:
        rows = pl.read_csv(path, infer_schema_length=None)
    except (OSError, pl.exceptions.PolarsError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProfileError(f"{path} must be a readable CSV file: {first}") from error
    return having(rows, needed, path)


def read_table(path: Path, needed: Sequence[str]) -> pl.DataFrame:
    """The rows of a Parquet file; raises ProfileError as ``read_csv`` does."""
    try:
        rows = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProfileError(f"{path} must be a readable Parquet file: {first}") from error
    return having(rows, needed, path)


def having(rows: pl.DataFrame, needed: Sequence[str], path: Path) -> pl.DataFrame:
    """The rows, if they have these columns; raises ProfileError that lists what is there."""
    missing = [name for name in needed if name not in rows.columns]
    if missing:
        raise ProfileError(f"{path} must have the columns {', '.join(missing)}; it has {', '.join(rows.columns)}")
    return rows


def gpu_name(name: str) -> str:
    """The catalog's name of a device, or the source's own."""
    try:
        return catalog.gpu(name).name
    except UnknownNameError:
        return name


def model_name(name: str) -> str:
    """The catalog's name of a model, or the source's own."""
    known = catalog.models()
    wanted = name.lower()
    for key, spec in known.items():
        if wanted in {key.lower(), *(alias.lower() for alias in spec.metadata.aliases)}:
            return key
    return name


def dtype(name: str) -> str:
    """Our spelling of a dtype, or the source's own ("fp8_block")."""
    try:
        return dtype_name(name)
    except UnknownNameError:
        return name


def assembled(metadata: ProfileFacts, frames: Rows, where: Path) -> Profile:
    """A profile of stacked frames with columns named as a profile's; doubtful values are noted.

    Raises:
        ProfileError: No row is left, or one holds what it must not.
    """
    kept = [frame for frame in frames if len(frame)]
    if not kept:
        raise ProfileError(f"{where} must hold rows that a profile has a place for; it holds none")
    rows = pl.concat(kept, how="diagonal_relaxed")
    holes = rows.filter(pl.col("seconds").is_null())
    if len(holes):
        raise ProfileError(f"{where} must hold a time in every row; {len(holes)} rows have none")
    columns = {name: _column(rows, name) for name in COLUMNS if name in rows.columns}
    try:
        profile = Profile(metadata, columns)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from error
    return replace(profile, metadata=replace(metadata, notes=(*metadata.notes, *warnings(profile))))


def _column(rows: pl.DataFrame, name: str) -> Any:
    blank: Any = "" if name in TEXT_COLUMNS else float("nan") if name == "spread_s" else 0
    filled = rows[name].fill_null(blank)
    return np.array(filled.to_list(), dtype=np.str_) if name in TEXT_COLUMNS else filled.to_numpy()


def entries(counts: Mapping[str, int]) -> str:
    """Names with their rows ("alltoall (168)"), sorted."""
    return ", ".join(f"{name} ({rows:,})" for name, rows in sorted(counts.items()))


def names_in(folder: Path) -> str:
    """What a folder holds, for a message."""
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
