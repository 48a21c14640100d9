"""Npz files, read with errors that name them and written whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.errors import ProfileError
from lengthwise.schema.files import write_whole


def read_npz(path: Path | str) -> dict[str, Any]:
    """All arrays of an npz by name.

    Raises:
        ProfileError: There is no such file, or it is not an npz of plain arrays.
    """
    try:
        # Opened here, since np.load leaves the file open when it is damaged.
        with Path(path).open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ProfileError(f"{path} must be a readable npz file; it is a single array (npy)")
            return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError as error:
        raise ProfileError(f"there is no file {path}") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ProfileError(f"{path} must be a readable npz file: {error}") from error


def write_npz(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """An npz at ``path`` of these arrays, whole or not at all.

    Raises:
        OutputError: It cannot be written.
    """

    def write(whole: Path) -> None:
        with whole.open("wb") as file:
            np.savez(file, **arrays)

    write_whole(path, write)
