"""Writes files atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from lengthwise.schema.errors import OutputError


def write_atomic(path: Path | str, data: bytes | Callable[[Path], None]) -> None:
    """Write a file atomically: on any failure, the old content remains.

    The content goes to a hidden file in the same folder, which is flushed to the disk and renamed. Links are followed.
    A device or a pipe (``/dev/stdout``) is written in place, not atomically.

    Args:
        path: Its folder must exist.
        data: The bytes, or a function that writes them to a path with the suffix of ``path``.

    Raises:
        OutputError: The folder is missing or not writable, ``path`` is a folder, or the disk is full. Other errors of a
            ``data`` function pass through.
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
    temporary = target.with_name(f".{uuid.uuid4().hex}.{target.name[-128:]}")
    try:
        _write(temporary, data)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write(path: Path, data: bytes | Callable[[Path], None]) -> None:
    if callable(data):
        data(path)
    else:
        path.write_bytes(data)


def path_fault(target: Path) -> str:
    """Return the reason why a file cannot be created or replaced at a path, or "". Permissions are not checked."""
    if target.is_dir():
        return "it is a folder; give the name of a file"
    if not target.parent.exists():
        return f"its folder {target.parent} does not exist; create it first"
    return "" if target.parent.is_dir() else f"{target.parent} is a file, not a folder; choose another place"


def _reason(target: Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return path_fault(target) or f"no permission to write in {target.parent}; choose another place"
    return path_fault(target) or f"{getattr(error, 'strerror', None) or error}"
