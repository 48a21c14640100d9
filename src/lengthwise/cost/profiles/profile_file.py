"""Reads and writes profiles: Parquet files of a row per point, whose own metadata hold the profile's as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.files import write_atomic
from lengthwise.schema.profile import COLUMNS, TEXT_COLUMNS, Profile, ProfileFacts

VERSION = 1
_KEY = "lengthwise.profile"
_ADVICE = "Write one with `lengthwise profile run` or `lengthwise profile import`."


def write_profile(profile: Profile, path: Path | str) -> None:
    """Write a profile to a Parquet file atomically. Raises ProfileError without rows, and OutputError on failure."""
    _require_rows(profile, f"the profile {profile.metadata.name}")
    try:
        metadata = json.dumps({"version": VERSION, "metadata": dataclasses.asdict(profile.metadata)})
    except (TypeError, ValueError) as error:
        raise ProfileError(f"a profile's metadata must be JSON-able; {error}") from error
    columns = {n: profile[n].tolist() if n in TEXT_COLUMNS else profile[n] for n in COLUMNS}
    frame = pl.DataFrame(columns, schema_overrides=dict.fromkeys(TEXT_COLUMNS, pl.String))
    write_atomic(path, lambda place: frame.write_parquet(place, metadata={_KEY: metadata}))


def read_profile(path: Path | str) -> Profile:
    """Read a profile that ``write_profile`` wrote. Raises ProfileError for a missing, damaged or other file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror or error}. {_ADVICE}") from error
    try:
        text = pl.read_parquet_metadata(io.BytesIO(data)).get(_KEY)
        if text is None:
            raise ProfileError(f"{path} must be a profile of lengthwise; it is another Parquet file. {_ADVICE}")
        header = json.loads(text)
        if header["version"] != VERSION:
            found = f"it is of version {header['version']}. Update lengthwise."
            raise ProfileError(f"{path} must be a profile of version {VERSION}; {found}")
        saved = header["metadata"]
        known = {field.name for field in dataclasses.fields(ProfileFacts)}
        values = {name: value for name, value in saved.items() if name in known}
        metadata = ProfileFacts(**values | {"notes": tuple(saved.get("notes", ()))})
        frame = pl.read_parquet(io.BytesIO(data))
    except (PolarsError, ValueError, KeyError, TypeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        found = f"it is none, or is damaged ({first})"
        raise ProfileError(f"{path} must be a profile of lengthwise; {found}. {_ADVICE}") from error
    if incomplete := [name for name in frame.columns if frame[name].null_count()]:
        raise ProfileError(f"{path} must hold a value in every row; {', '.join(incomplete)} lacks some")
    columns = {
        name: np.array(frame[name].to_list(), dtype=np.str_) if name in TEXT_COLUMNS else frame[name].to_numpy()
        for name in frame.columns
    }
    try:
        profile = Profile(metadata, columns)
    except (InputError, ValueError) as error:
        raise ProfileError(f"{path}: {error}") from error
    _require_rows(profile, str(path))
    return profile


def _require_rows(profile: Profile, name: str) -> None:
    if not len(profile):
        raise ProfileError(f"{name} must hold a measured point or more; it has no rows. {_ADVICE}")
