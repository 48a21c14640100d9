"""The predictor that comes with the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from lengthwise.predict.save import load

NAME = "default"


@cache
def default() -> Any:
    """The small lexical predictor that is shipped; its ``facts_`` are its card.

    It was trained on data whose licences allow it: docs/default-predictor-card.md says which, how well it
    does, and where it does not.
    """
    with as_file(files("lengthwise.predict") / "data" / "default.lwp") as path:
        return load(path)


def opened(source: Path | str) -> Any:
    """The predictor of a file, or the shipped one, by the name "default".

    Raises:
        InputError: There is no such file, or it is no predictor.
    """
    return default() if str(source) == NAME and not Path(source).exists() else load(source)
