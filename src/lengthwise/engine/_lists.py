"""Columns of which a request has several entries: its predictions, and who comes after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Predictions by request and window, as in ``Predictions``; ``window`` 0: none are made again."""

    window: int
    start: Array
    total: Array
    index: Array


@dataclass(frozen=True)
class Followers:
    """Who comes after each request: ``child[start[i]:start[i + 1]]``; ``left`` [n]: how many each one waits for."""

    start: Array
    child: Array
    left: Array
