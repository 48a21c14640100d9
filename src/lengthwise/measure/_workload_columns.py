"""A workload as columns of a data frame, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import OutputError
from lengthwise.schema.prediction import Predictions
from lengthwise.schema.workload import Workload

PREFIX = "workload."
_EXTRA = PREFIX + "extra."
_ROWS = PREFIX + "predictions."
_ALWAYS = ("arrival_s", "prompt_tokens", "output_tokens")
_OPTIONAL = ("predicted_tokens", "priority", "tenant")
_MADE = ("total_tokens", "index_tokens")


def columns_of(workload: Workload) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns by name, a row a request, and what is not a column as plain values.

    Raises:
        OutputError: A column of ``extra`` holds objects that have no place in a file.
    """
    workload.require_nobody_after("a file of records")
    columns = {PREFIX + n: v for n in (*_ALWAYS, *_OPTIONAL) if (v := getattr(workload, n)) is not None}
    extra = {name: np.asarray(values) for name, values in workload.extra.items()}
    columns |= {_EXTRA + name: _storable(name, values) for name, values in extra.items()}
    rest: dict[str, Any] = {"name": workload.name, "concurrency": workload.concurrency}
    rest["extra"] = {name: values.dtype.str for name, values in extra.items()}
    if workload.predictions is not None:
        made = workload.predictions
        columns |= {_ROWS + n: lists(made.start, getattr(made, n)) for n in _MADE}
        rest["window_tokens"] = int(made.window_tokens)
    return columns, rest


def workload_of(frame: Any, rest: dict[str, Any]) -> Workload:
    """The workload of ``columns_of``; raises what polars, numpy or the workload raise where it is not one."""
    given = {n: frame[PREFIX + n].to_numpy() for n in _ALWAYS}
    given |= {n: frame[PREFIX + n].to_numpy() for n in _OPTIONAL if PREFIX + n in frame.columns}
    predictions = None
    if "window_tokens" in rest:
        start, total = flat(frame[_ROWS + _MADE[0]])
        predictions = Predictions(rest["window_tokens"], start, total, flat(frame[_ROWS + _MADE[1]])[1])
    return Workload(
        **given,
        extra={name: _column(frame[_EXTRA + name], dtype) for name, dtype in rest["extra"].items()},
        predictions=predictions,
        concurrency=rest["concurrency"],
        name=rest["name"],
    )


def lists(start: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> Any:
    """A column of lists: row i has ``values[start[i]:start[i + 1]]``."""
    import polars as pl

    inner = pl.from_numpy(np.asarray(values), schema=["v"])["v"]
    row = pl.Series("row", np.repeat(np.arange(len(start) - 1), np.diff(start)))
    whole = pl.DataFrame({"row": pl.Series(np.arange(len(start) - 1))})
    grouped = pl.DataFrame([row, inner]).group_by("row", maintain_order=True).agg("v")
    joined = whole.join(grouped, on="row", how="left", maintain_order="left")["v"]
    return joined.fill_null(pl.Series([[]], dtype=pl.List(inner.dtype)))


def flat(series: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Starts and values of a column of ``lists``."""
    lengths = series.list.len().to_numpy().astype(np.int64)
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return start, series.filter(series.list.len() > 0).explode().to_numpy()


def _storable(name: str, values: npt.NDArray[Any]) -> Any:
    import polars as pl

    try:
        if values.dtype != object:
            return pl.Series(values)
        plain = [item.tolist() if isinstance(item, np.ndarray) else item for item in values]
        kinds = {item.dtype for item in values if isinstance(item, np.ndarray)}
        if len(kinds) == 1 and not any(plain):  # nothing but empty lists, which tell no kind by themselves
            return pl.Series(plain, dtype=pl.List(pl.Series(np.empty(0, kinds.pop())).dtype))
        return pl.Series(plain, strict=True)
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
        raise OutputError(
            f"extra[{name!r}] must hold numbers, texts or lists of one kind; it cannot be stored: {error}"
        ) from error


def _column(series: Any, dtype: str) -> npt.NDArray[Any]:
    import polars as pl

    if not isinstance(series.dtype, pl.List):
        array: npt.NDArray[Any] = series.to_numpy()
        return np.array(series.to_list(), object) if np.dtype(dtype) == object else array.astype(dtype)
    rows = np.empty(len(series), object)
    for at, item in enumerate(series):
        rows[at] = None if item is None else item.to_numpy()
    return rows
