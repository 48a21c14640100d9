"""Our own format: one Parquet file, a row a measured point, the facts as JSON in its metadata."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.files import write_whole
from lengthwise.schema.profile import COLUMNS, TEXT_COLUMNS, Profile, ProfileFacts

VERSION = 1
_KEY = "lengthwise.profile"
_WRITE = "Write one with `lengthwise profile run` or `lengthwise profile import`."


def write_profile(profile: Profile, path: Path | str) -> None:
    """A Parquet file that holds the profile to the last bit, whole or not at all.

    The key "lengthwise.profile" of its metadata holds ``{"version": 1, "facts": {...}}``.

    Raises:
        OutputError: The file cannot be written.
        ProfileError: The facts are no JSON, or there are no rows.
    """
    import polars as pl

    _require_rows(profile, f"the profile {profile.metadata.name}")
    try:
        about = json.dumps({"version": VERSION, "metadata": dataclasses.asdict(profile.metadata)})
    except (TypeError, ValueError) as error:
        raise ProfileError(f"a profile's facts must be JSON-able; {error}") from error
    columns = {n: profile[n].tolist() if n in TEXT_COLUMNS else profile[n] for n in COLUMNS}
    frame = pl.DataFrame(columns, schema_overrides=dict.fromkeys(TEXT_COLUMNS, pl.String))
    write_whole(path, lambda place: frame.write_parquet(place, metadata={_KEY: about}))


def read_profile(path: Path | str) -> Profile:
    """The profile of a file that ``write_profile`` wrote.

    Raises:
        ProfileError: There is no such file, it is no profile, has no rows, is damaged, or of a newer version.
    """
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror or error}. {_WRITE}") from error
    try:
        about = pl.read_parquet_metadata(io.BytesIO(data)).get(_KEY)
        if about is None:
            raise ProfileError(f"{path} must be a profile of lengthwise; it is another Parquet file. {_WRITE}")
        metadata = _metadata(json.loads(about), path)
        frame = pl.read_parquet(io.BytesIO(data))
    except (PolarsError, ValueError, KeyError, TypeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProfileError(
            f"{path} must be a profile of lengthwise; it is none, or is damaged ({first}). {_WRITE}"
        ) from error
    return _profile(metadata, frame, path)


def _metadata(description: dict[str, Any], path: Path | str) -> ProfileFacts:
    version = description["version"]
    if version != VERSION:
        raise ProfileError(
            f"{path} must be a profile of version {VERSION}; it is of version {version}. Update lengthwise."
        )
    metadata = description["metadata"]
    known = {field.name for field in dataclasses.fields(ProfileFacts)}
    kept = {name: value for name, value in metadata.items() if name in known}
    return ProfileFacts(**kept | {"notes": tuple(metadata.get("notes", ()))})


def _profile(metadata: ProfileFacts, frame: Any, path: Path | str) -> Profile:
    holes = [name for name in frame.columns if frame[name].null_count()]
    if holes:
        raise ProfileError(f"{path} must hold a value in every row; {', '.join(holes)} lacks some")
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


def _require_rows(profile: Profile, what: str) -> None:
    if not len(profile):
        raise ProfileError(f"{what} must hold a measured point or more; it has no rows. {_WRITE}")
