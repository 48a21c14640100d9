"""What a predictor keeps on the disk, checked as it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Arrays = dict[str, npt.NDArray[Any]]
State = tuple[dict[str, Any], Arrays]


def fitted(predictor: object, attribute: str) -> Any:
    """What the predictor learnt under this name; InputError where it has learnt nothing yet."""
    value = getattr(predictor, attribute, None)
    if value is None:
        raise InputError(
            f"a {type(predictor).__name__} must learn before it predicts; call fit(samples) first"
        )
    return value


def array(arrays: Mapping[str, npt.NDArray[Any]], name: str, ndim: int) -> npt.NDArray[np.float64]:
    """A saved array of finite numbers with so many dimensions."""
    found = arrays.get(name)
    if found is None:
        raise InputError(f"there must be an array {name}; there are {', '.join(sorted(arrays)) or 'none'}")
    if found.ndim != ndim or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise InputError(
            f"{name} must be finite numbers of {ndim} dimensions; it is {found.dtype} {found.shape}"
        )
    return found.astype(np.float64)


def quantile_table(arrays: Mapping[str, npt.NDArray[Any]], name: str, levels: int) -> npt.NDArray[np.float64]:
    """A saved table of quantiles, [rows, levels]."""
    table = array(arrays, name, 2)
    if table.shape[1] != levels or not len(table) or (table < 1).any() or (np.diff(table, axis=1) < 0).any():
        raise InputError(f"{name} must hold {levels} quantiles a row that are at least 1 and do not decrease")
    return table


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    """Arrays of an inner predictor under names of their own."""
    return {f"{prefix}/{name}": values for name, values in arrays.items()}


def within(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays that were put under the prefix, by their own names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): values for name, values in arrays.items() if name.startswith(start)}
