"""Npz files, read with errors that name them and written whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.errors import ProfileError
from lengthwise.schema.files import write_whole


def read_npz(path: Path | str, only: Collection[str] | None = None) -> dict[str, Any]:
    """All arrays of an npz by name, or those of ``only`` that it has.

    Raises:
        ProfileError: There is no such file, or it is not an npz of plain arrays.
    """
    try:
        # Opened here, since np.load leaves the file open when it is damaged.
        with Path(path).open("rb") as file:
            _require_npz(file.read(8), path)
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            return {name: loaded[name] for name in loaded.files if only is None or name in only}
    except FileNotFoundError as error:
        raise ProfileError(f"there is no file {path}") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy's advice on arrays of objects (allow_pickle) would run whatever the file holds.
        what = "one of its arrays holds objects" if "allow_pickle" in str(error) else error
        raise ProfileError(f"{path} must be a readable npz file: {what}") from error


def _require_npz(start: bytes, path: Path | str) -> None:
    """Nothing, if a file starts as a zip; else an error that says what it is instead."""
    if start.startswith(b"PK"):
        return
    if start.startswith(b"PAR1"):
        raise ProfileError(
            f"{path} must be a readable npz file; it is a Parquet file. A profile of operators is taken as "
            f"profile:{path}, or made an npz by `lengthwise profile fit {path} --out FILE.npz`"
        )
    known = {b"\x93NUMPY": "a single array (npy)", b"\x1f\x8b": "packed by gzip"}
    other = "of another kind" if start else "empty"
    is_what = next((what for magic, what in known.items() if start.startswith(magic)), other)
    raise ProfileError(f"{path} must be a readable npz file; it is {is_what}")


def write_npz(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """An npz at ``path`` of these arrays, whole or not at all.

    Raises:
        OutputError: It cannot be written.
    """

    def write(whole: Path) -> None:
        with whole.open("wb") as file:
            np.savez(file, **arrays)

    write_whole(path, write)
