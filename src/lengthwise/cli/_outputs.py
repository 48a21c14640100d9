"""What a command shall write is known to be possible before it starts to work."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from lengthwise.schema.errors import MissingExtraError, OutputError


def require_writable(paths: Iterable[Path]) -> None:
    """Raises OutputError if one of the files cannot be written, or is meant twice."""
    seen = set()
    for path in paths:
        target = path.resolve()
        reason = _why_not(target)
        if reason:
            raise OutputError(f"cannot write {path}: {reason}")
        if target in seen:
            raise OutputError(f"cannot write two things to {path}; give each a file of its own")
        seen.add(target)


def require_plotly() -> None:
    """Raises MissingExtraError where no HTML report could be made."""
    if find_spec("plotly") is None:
        raise MissingExtraError("the HTML report", "report")


def _why_not(target: Path) -> str:
    folder = target.parent
    if target.is_dir():
        return "it is a folder; give the name of a file"
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file, not a folder; choose another place"
    if not folder.is_dir():
        return f"its folder {folder} does not exist; create it first"
    if not os.access(folder if not target.exists() else target, os.W_OK):
        return f"no permission to write in {folder}; choose another place"
    return ""
