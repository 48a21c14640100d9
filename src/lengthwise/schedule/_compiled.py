"""The compiled loops, from the disk cache or made once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from lengthwise import _jit
from lengthwise.schedule import _kernel
from lengthwise.schedule._reading import DegreeTables

_LINE, _GRID = np.zeros(1), np.zeros((1, 1))
_EXAMPLE = DegreeTables(_GRID, _LINE, _GRID, _LINE, _GRID, _GRID, _LINE, False, 64, 1.0, 0.0)
"""What the type of tables follows from."""


@lru_cache(maxsize=8)
def compiled(name: str) -> Any:
    """A function of ``_kernel``: "rra_rows", "waa_rows", "steady_round" or "visits"."""
    return _jit.compile_now(getattr(_kernel, name), _signature(name), cached=True)


def _signature(name: str) -> Any:
    t, f, i = _jit.type_of(_EXAMPLE), _jit.f8_1d, _jit.i8_1d
    grid, number, whole, flag = _jit.type_of(_GRID), _jit.f8, _jit.i8, _jit.type_of(False)
    scratch = (grid, f, f, f, f, f, grid)
    if name == "rra_rows":
        return whole(t, t, grid, f, f, i, i, i, i, i, grid, number, f, grid, *scratch, grid)
    if name == "waa_rows":
        sides = (grid, f, grid, f)
        return whole(t, t, *sides, f, i, f, whole, number, number, number, flag, number, f, f, grid, grid)
    if name == "steady_round":
        return _jit.type_of((0.0, 0.0))(whole, whole, whole, whole, f, *scratch)
    return whole(t, f, f, f, f, f, f, flag, number, f)
