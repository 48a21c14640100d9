"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from lengthwise.schema.errors import OutputError


def write_whole(path: Path | str, data: bytes | Callable[[Path], None]) -> None:
    """A file at ``path`` that holds all of ``data``, or, on any failure, what stood there before.

    The content goes to a hidden file in the same folder, is flushed to the disk and renamed. A link
    is followed; a device or a pipe (``/dev/stdout``) is written in place, since nothing can be renamed
    over it.

    Args:
        path: Where the file shall stand. Its folder must exist.
        data: The bytes, or a function that writes them to the path it is given (which ends like ``path``).

    Raises:
        OutputError: The folder is missing or not writable, ``path`` is a folder, or the disk is full.
            What a ``data`` function raises, other than OSError, passes through.
    """
    target = Path(path)
    try:
        target = target.resolve()
        if target.exists() and not target.is_file():
            _write(target, data)
        else:
            _replace(target, data)
    except (OSError, RuntimeError) as error:
        raise OutputError(f"cannot write {path}: {_reason(target, error)}") from error


def _replace(target: Path, data: bytes | Callable[[Path], None]) -> None:
    whole = target.with_name(f".{uuid.uuid4().hex}.{target.name[-128:]}")
    try:
        _write(whole, data)
        with whole.open("rb+") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, whole)
        whole.replace(target)
    finally:
        whole.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system lets a folder be flushed
        _flush_folder(target.parent)


def _write(path: Path, data: bytes | Callable[[Path], None]) -> None:
    if callable(data):
        data(path)
    else:
        path.write_bytes(data)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(target: Path, error: Exception) -> str:
    folder = target.parent
    if target.is_dir():
        return "it is a folder; give the name of a file"
    if not folder.exists():
        return f"its folder {folder} does not exist; create it first"
    if not folder.is_dir():
        return f"{folder} is a file, not a folder; choose another place"
    if isinstance(error, PermissionError):
        return f"no permission to write in {folder}; choose another place"
    return f"{getattr(error, 'strerror', None) or error}"
