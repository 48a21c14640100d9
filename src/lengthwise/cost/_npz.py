"""Reading npz files that a user names."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.errors import ProfileError


def read_npz(path: Path | str) -> dict[str, Any]:
    """All arrays of an npz by name.

    Raises:
        ProfileError: There is no such file, or it is not an npz.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError as error:
        raise ProfileError(f"there is no file {path}") from error
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ProfileError(f"{path} must be a readable npz file: {error}") from error
