"""Workloads to files, in our own format or in one that other tools read."""

from __future__ import annotations

import gzip
import io
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, OutputError, TraceError, UnknownNameError
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import Predictions, Workload
from lengthwise.workload.trace_rows import TEXTS, Source

_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
_OPTIONAL = ("predicted_tokens", "priority", "tenant")
_INTEGERS = ("prompt_tokens", "output_tokens", "priority", "tenant")
_EXTRA = "extra."
_ROWS = "predictions."
_MADE = ("total_tokens", "index_tokens")
_KEY = "lengthwise.workload"
_RECORDS, _ASKED = "lengthwise.records", "workload."
"""A file of records holds the requests that were asked for: its columns after this prefix."""


def write_parquet(workload: Workload, path: Path) -> None:
    """A Parquet file with all there is of the workload."""
    import polars as pl

    columns = {name: getattr(workload, name) for name in (*_COLUMNS, *_OPTIONAL)}
    columns = {name: values for name, values in columns.items() if values is not None}
    columns |= {_EXTRA + name: _to_storage(name, values) for name, values in workload.extra.items()}
    rest = {"version": 1, "name": workload.name, "concurrency": workload.concurrency}
    if workload.predictions is not None:
        columns |= _rows_by_request(workload.predictions)
        rest["window_tokens"] = int(workload.predictions.window_tokens)
    pl.DataFrame(columns).write_parquet(path, metadata={_KEY: json.dumps(rest)})


def is_workload(source: Source) -> bool:
    """Whether it can be ours: it has our main columns, or cannot be read."""
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        return set(_COLUMNS) <= set(pl.read_parquet_schema(io.BytesIO(source.data)))
    except (PolarsError, OSError, ValueError):
        return True


def read_parquet(source: Source) -> Workload:
    """The workload of a file that ``write_parquet`` wrote, or of one with its three main columns.

    Of a file of records (a run, simulated or measured) it is the requests that were asked for.

    Raises:
        TraceError: The file is cut off or damaged, lacks a column, or holds a value that cannot be used.
    """
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        frame = pl.read_parquet(io.BytesIO(source.data))
        metadata = pl.read_parquet_metadata(io.BytesIO(source.data))
        rest = json.loads(metadata.get(_KEY, "{}"))
        if _RECORDS in metadata:
            rest = json.loads(metadata[_RECORDS]).get("workload", {})
            frame = frame.select(pl.col(f"^{_ASKED}.*$").name.map(lambda name: name.removeprefix(_ASKED)))
    except (PolarsError, OSError, ValueError) as error:
        raise source.fault(None, f"the Parquet file is cut off or damaged ({_first_line(error)})") from error
    missing = [name for name in _COLUMNS if name not in frame.columns]
    if missing:
        raise source.fault(None, f"lacks the columns {', '.join(missing)}; it has {', '.join(frame.columns)}")
    if frame.is_empty():
        raise source.fault(None, "holds no request; a trace must hold at least one")
    try:
        columns: dict[str, Any] = {n: _numbers(source, frame[n]) for n in (*_COLUMNS, *_OPTIONAL) if n in frame.columns}
        return Workload(
            **columns,
            extra=_extra(frame),
            predictions=_predictions(source, frame, rest.get("window_tokens", 0)),
            concurrency=rest.get("concurrency"),
            name=rest.get("name", source.name),
        )
    except TraceError:
        raise
    except InputError as error:
        raise source.fault(None, str(error)) from error


def _extra(frame: Any) -> dict[str, npt.NDArray[Any]]:
    """Our further columns, and texts that another wrote."""
    import polars as pl

    texts = {n: TEXTS[n] for n in reversed(frame.columns) if n in TEXTS and frame[n].dtype == pl.String}
    own = {n: n.removeprefix(_EXTRA) for n in frame.columns if n.startswith(_EXTRA)}
    return {name: _column(frame[n]) for n, name in (texts | own).items()}


def _rows_by_request(predictions: Predictions) -> dict[str, Any]:
    """A list a request for each column of its rows."""
    import polars as pl

    inner = predictions.start[1:-1]
    return {_ROWS + n: pl.Series([part.tolist() for part in np.split(getattr(predictions, n), inner)]) for n in _MADE}


def _predictions(source: Source, frame: Any, window_tokens: int) -> Predictions | None:
    lists = [frame[_ROWS + n] for n in _MADE if _ROWS + n in frame.columns]
    if len(lists) < len(_MADE):
        return None
    lengths = [one.list.len().fill_null(0).to_numpy() for one in lists]
    if not (lengths[0] == lengths[1]).all() or (lengths[0] < 1).any():
        raise source.fault(None, "each request must have as many predicted totals as indices, at least one")
    start = np.concatenate([[0], np.cumsum(lengths[0], dtype=np.int64)])
    total, index = (_numbers(source, one.explode()) for one in lists)
    return Predictions(window_tokens, start, total, index)


def _to_storage(name: str, values: Any) -> Any:
    import polars as pl

    array = np.asarray(values)
    try:
        if array.dtype != object:
            return pl.Series(array)
        plain = [item.tolist() if isinstance(item, np.ndarray) else item for item in array]
        return pl.Series(plain, strict=True)
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise OutputError(f"the column {name} cannot be stored: {_first_line(error)}") from error


def _numbers(source: Source, series: Any) -> npt.NDArray[Any]:
    if not series.dtype.is_numeric() or series.null_count():
        raise source.fault(None, f"{series.name} must hold a number in every row")
    array: npt.NDArray[Any] = series.to_numpy()
    if series.name in _INTEGERS and not series.dtype.is_integer():
        raise source.fault(None, f"{series.name} must hold whole numbers; it holds {series.dtype}")
    return array


def _column(series: Any) -> npt.NDArray[Any]:
    import polars as pl

    if isinstance(series.dtype, pl.List):
        lists = np.empty(len(series), object)
        for row, item in enumerate(series):
            lists[row] = None if item is None else item.to_numpy()
        return lists
    array: npt.NDArray[Any] = series.to_numpy()
    return array


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


if TYPE_CHECKING:
    import polars as pl

_BY_SUFFIX = {".parquet": "parquet", ".csv": "vidur", ".jsonl": "mooncake"}
WRITABLE = ("azure", "mooncake", "parquet", "vidur")
"""What ``write(format=)`` may name."""


def write(workload: Workload, path: Path | str, format: str | None = None) -> None:  # noqa: A002
    """The workload in a file, which is written whole or not at all.

    Only Parquet keeps everything. The others keep arrivals and lengths, Vidur's also tenants, Mooncake's
    those, "block_ids" and "session", and Azure's rounds times to 100 ns and starts them at 1970-01-01.
    None of them has a place for a concurrency, so that a closed loop must go to Parquet. A name that ends
    in .gz is packed.

    Args:
        workload: What to write.
        path: Its ending tells the format: .parquet (our own), .csv (Vidur's), .jsonl (Mooncake's).
        format: "azure", "mooncake", "parquet" or "vidur", whatever the name.

    Raises:
        OutputError: The format is not clear, cannot hold the workload, or the file cannot be written.
        UnknownNameError: There is no such format.
        InputError: Requests come after others, for which no format has a place.
    """
    workload.require_nobody_after("a file")
    path = Path(path)
    packed = path.suffix.lower() == ".gz"
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    chosen = format or _BY_SUFFIX.get(suffix)
    if chosen is None:
        raise OutputError(f"{path}: the name must end in {', '.join(_BY_SUFFIX)}, or a format be given")
    if chosen not in WRITABLE:
        raise UnknownNameError("format to write", chosen, WRITABLE)
    if chosen != "parquet" and workload.concurrency is not None:
        raise OutputError(f"{path}: the format {chosen} cannot hold a closed loop; write a .parquet file")
    writer = partial(_WRITERS[chosen], workload)
    write_whole(path, partial(_packed, writer) if packed else writer)


def _packed(writer: partial[None], path: Path) -> None:
    writer(path)
    # No time in the header: the same workload gives the same bytes.
    path.write_bytes(gzip.compress(path.read_bytes(), compresslevel=6, mtime=0))


def _vidur(workload: Workload, path: Path) -> None:
    frame = _frame(workload, ("arrived_at", "num_prefill_tokens", "num_decode_tokens"), workload.arrival_s)
    frame = _with_tenants(workload, frame)
    with path.open("wb") as file:  # by its name polars would guess a compression
        frame.write_csv(file)


def _azure(workload: Workload, path: Path) -> None:
    import polars as pl

    ns = pl.Series(np.rint(workload.arrival_s * 1e7).astype(np.int64) * 100)
    dates = ns.cast(pl.Datetime("ns")).dt.strftime("%Y-%m-%d %H:%M:%S%.9f").str.head(-2)
    with path.open("wb") as file:
        _frame(workload, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), dates).write_csv(file)


def _mooncake(workload: Workload, path: Path) -> None:
    import polars as pl

    arrival_ms = workload.arrival_s * 1e3
    if (arrival_ms == np.rint(arrival_ms)).all():  # as Mooncake writes them
        arrival_ms = arrival_ms.astype(np.int64)
    frame = _frame(workload, ("timestamp", "input_length", "output_length"), arrival_ms)
    if "block_ids" in workload.extra:
        ids = [np.asarray(row).tolist() for row in workload.extra["block_ids"]]
        frame = frame.with_columns(pl.Series("hash_ids", ids, dtype=pl.List(pl.Int64)))
    if "session" in workload.extra:
        frame = frame.with_columns(pl.Series("session_id", workload.extra["session"]))
    frame = _with_tenants(workload, frame)
    with path.open("wb") as file:
        frame.write_ndjson(file)


def _with_tenants(workload: Workload, frame: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    return frame if workload.tenant is None else frame.with_columns(pl.Series("tenant", workload.tenant))


def _frame(workload: Workload, names: tuple[str, str, str], times: object) -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame(dict(zip(names, (times, workload.prompt_tokens, workload.output_tokens), strict=True)))


_WRITERS = {"azure": _azure, "mooncake": _mooncake, "parquet": write_parquet, "vidur": _vidur}
