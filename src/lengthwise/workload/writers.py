"""Writes workloads to files, in Parquet (lossless) or in a format of another tool, and reads the Parquet files."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import polars as pl
from polars.exceptions import PolarsError

from lengthwise.schema.errors import InputError, OutputError, TraceError, UnknownNameError
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import Predictions, Workload
from lengthwise.workload.trace_rows import TEXTS, Source

MAIN_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL_COLUMNS = ("predicted_tokens", "priority", "tenant")
_INTEGERS = ("prompt_tokens", "output_tokens", "priority", "tenant")
_EXTRA, _PREDICTIONS = "extra.", "predictions."
PREDICTION_COLUMNS = ("total_tokens", "gittins_rank")
_KEY = "lengthwise.workload"
_RECORDS_KEY, _WORKLOAD = "lengthwise.records", "workload."  # prefix of the requested workload's columns


def write_parquet(workload: Workload, path: Path) -> None:
    """Write the complete workload to a Parquet file."""
    columns = {name: getattr(workload, name) for name in (*MAIN_COLUMNS, *OPTIONAL_COLUMNS)}
    columns = {name: values for name, values in columns.items() if values is not None}
    columns |= {_EXTRA + name: extra_series(name, np.asarray(values)) for name, values in workload.extra.items()}
    metadata = {"version": 1, "name": workload.name, "concurrency": workload.concurrency}
    predictions = workload.predictions
    if predictions is not None:
        for name in PREDICTION_COLUMNS:
            columns[_PREDICTIONS + name] = lists_of(predictions.start, getattr(predictions, name))
        metadata["window_tokens"] = int(predictions.window_tokens)
    pl.DataFrame(columns).write_parquet(path, metadata={_KEY: json.dumps(metadata)})


def is_workload(source: Source) -> bool:
    """Return whether a Parquet file has the main columns of a workload, or cannot be read."""
    try:
        return set(MAIN_COLUMNS) <= set(pl.read_parquet_schema(io.BytesIO(source.data)))
    except (PolarsError, OSError, ValueError):
        return True


def read_parquet(source: Source) -> Workload:
    """Return a workload from ``write_parquet``, a file of records, or three columns; raise TraceError otherwise."""
    try:
        frame = pl.read_parquet(io.BytesIO(source.data))
        file_metadata = pl.read_parquet_metadata(io.BytesIO(source.data))
        metadata = json.loads(file_metadata.get(_KEY, "{}"))
        if _RECORDS_KEY in file_metadata:
            metadata = json.loads(file_metadata[_RECORDS_KEY]).get("workload", {})
            frame = frame.select(pl.col(f"^{_WORKLOAD}.*$").name.map(lambda name: name.removeprefix(_WORKLOAD)))
    except (PolarsError, OSError, ValueError) as error:
        raise source.fault(None, f"the Parquet file is cut off or damaged ({_first_line(error)})") from error
    missing = [name for name in MAIN_COLUMNS if name not in frame.columns]
    if missing:
        raise source.fault(None, f"lacks the columns {', '.join(missing)}; it has {', '.join(frame.columns)}")
    if frame.is_empty():
        raise source.fault(None, "holds no request; a trace must hold at least one")
    try:
        columns: dict[str, Any] = {
            n: _numbers(source, frame[n]) for n in (*MAIN_COLUMNS, *OPTIONAL_COLUMNS) if n in frame.columns
        }
        texts = {n: TEXTS[n] for n in reversed(frame.columns) if n in TEXTS and frame[n].dtype == pl.String}
        own = {n: n.removeprefix(_EXTRA) for n in frame.columns if n.startswith(_EXTRA)}
        return Workload(
            **columns,
            extra={name: to_array(frame[n]) for n, name in (texts | own).items()},
            predictions=_predictions(source, frame, metadata.get("window_tokens", 0)),
            concurrency=metadata.get("concurrency"),
            name=metadata.get("name", source.name),
        )
    except TraceError:
        raise
    except InputError as error:
        raise source.fault(None, str(error)) from error


def _predictions(source: Source, frame: Any, window_tokens: int) -> Predictions | None:
    names = [_PREDICTIONS + name for name in PREDICTION_COLUMNS]
    if not set(names) <= set(frame.columns):
        return None
    lists = [frame[name] for name in names]
    lengths = [series.list.len().fill_null(0).to_numpy() for series in lists]
    if not (lengths[0] == lengths[1]).all() or (lengths[0] < 1).any():
        raise source.fault(None, "each request must have as many predicted totals as indices, at least one")
    start = np.concatenate([[0], np.cumsum(lengths[0], dtype=np.int64)])
    total, index = (_numbers(source, series.explode()) for series in lists)
    return Predictions(window_tokens, start, total, index)


def extra_series(name: str, values: npt.NDArray[Any]) -> Any:
    """Return a column of ``Workload.extra`` for a file; raise OutputError for values of several kinds."""
    try:
        if values.dtype != object:
            return pl.Series(values)
        plain = [item.tolist() if isinstance(item, np.ndarray) else item for item in values]
        kinds = {item.dtype for item in values if isinstance(item, np.ndarray)}
        if len(kinds) == 1 and not any(plain):  # polars cannot infer a type from empty lists
            return pl.Series(plain, dtype=pl.List(pl.Series(np.empty(0, kinds.pop())).dtype))
        return pl.Series(plain, strict=True)
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
        kinds_text = "it must hold numbers, texts or lists of one kind"
        raise OutputError(f"the column {name} cannot be stored: {kinds_text} ({_first_line(error)})") from error


def lists_of(start: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> Any:
    """Return a column of lists: row i has ``values[start[i]:start[i + 1]]``."""
    inner = pl.from_numpy(np.asarray(values), schema=["v"])["v"]
    row = pl.Series("row", np.repeat(np.arange(len(start) - 1), np.diff(start)))
    every = pl.DataFrame({"row": pl.Series(np.arange(len(start) - 1))})
    grouped = pl.DataFrame([row, inner]).group_by("row", maintain_order=True).agg("v")
    joined = every.join(grouped, on="row", how="left", maintain_order="left")["v"]
    return joined.fill_null(pl.Series([[]], dtype=pl.List(inner.dtype)))


def _numbers(source: Source, series: Any) -> npt.NDArray[Any]:
    if not series.dtype.is_numeric() or series.null_count():
        raise source.fault(None, f"{series.name} must hold a number in every row")
    if series.name in _INTEGERS and not series.dtype.is_integer():
        raise source.fault(None, f"{series.name} must hold whole numbers; it holds {series.dtype}")
    return np.asarray(series.to_numpy())


def to_array(series: Any) -> npt.NDArray[Any]:
    """Return a column as an array; one of lists as an object array of arrays."""
    if isinstance(series.dtype, pl.List):
        lists = np.empty(len(series), object)
        for row, item in enumerate(series):
            lists[row] = None if item is None else item.to_numpy()
        return lists
    return np.asarray(series.to_numpy())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_BY_SUFFIX = {".parquet": "parquet", ".csv": "vidur", ".jsonl": "mooncake"}
WRITABLE = ("azure", "mooncake", "parquet", "vidur")  # names that ``write(format=)`` accepts


def write(workload: Workload, path: Path | str, format: str | None = None) -> None:  # noqa: A002
    """Write a workload to a file atomically, compressed if its name ends in .gz.

    Only Parquet is lossless and can hold a closed loop. The other formats have arrivals and lengths, Vidur's also
    tenants, Mooncake's tenants, "block_ids" and "session"; Azure's rounds times to 100 ns and starts them at
    1970-01-01. The suffix .parquet, .csv (Vidur's) or .jsonl (Mooncake's) chooses the format unless ``format`` names
    one of WRITABLE. Raises OutputError if the format is unclear, cannot represent the workload, or the file cannot be
    written.
    """
    workload.require_independent("a file")
    path = Path(path)
    is_gzip = path.suffix.lower() == ".gz"
    chosen = format or _BY_SUFFIX.get((path.with_suffix("") if is_gzip else path).suffix.lower())
    if chosen is None:
        raise OutputError(f"{path}: the name must end in {', '.join(_BY_SUFFIX)}, or a format be given")
    if chosen not in WRITABLE:
        raise UnknownNameError("format to write", chosen, WRITABLE)
    if chosen != "parquet" and workload.concurrency is not None:
        raise OutputError(f"{path}: the format {chosen} cannot hold a closed loop; write a .parquet file")

    def write_file(target: Path) -> None:
        if chosen == "parquet":
            write_parquet(workload, target)
        else:
            # An open file, as polars would guess a compression from the name.
            with target.open("wb") as file:
                _write_rows(workload, chosen, file)
        if is_gzip:
            # Without a time in the header the same workload gives the same bytes.
            target.write_bytes(gzip.compress(target.read_bytes(), compresslevel=6, mtime=0))

    write_whole(path, write_file)


def _write_rows(workload: Workload, form: str, file: BinaryIO) -> None:
    prompt, output, tenant = workload.prompt_tokens, workload.output_tokens, workload.tenant
    tenants = {} if tenant is None else {"tenant": pl.Series(tenant)}
    if form == "vidur":
        rows = {"arrived_at": workload.arrival_s, "num_prefill_tokens": prompt, "num_decode_tokens": output}
        pl.DataFrame(rows | tenants).write_csv(file)
    elif form == "azure":
        ns = pl.Series(np.rint(workload.arrival_s * 1e7).astype(np.int64) * 100)
        dates = ns.cast(pl.Datetime("ns")).dt.strftime("%Y-%m-%d %H:%M:%S%.9f").str.head(-2)
        pl.DataFrame({"TIMESTAMP": dates, "ContextTokens": prompt, "GeneratedTokens": output}).write_csv(file)
    else:
        arrival_ms = workload.arrival_s * 1e3
        if (arrival_ms == np.rint(arrival_ms)).all():
            # Mooncake writes integers.
            arrival_ms = arrival_ms.astype(np.int64)
        columns: dict[str, Any] = {"timestamp": arrival_ms, "input_length": prompt, "output_length": output}
        if "block_ids" in workload.extra:
            ids = [np.asarray(row).tolist() for row in workload.extra["block_ids"]]
            columns["hash_ids"] = pl.Series(ids, dtype=pl.List(pl.Int64))
        if "session" in workload.extra:
            columns["session_id"] = pl.Series(workload.extra["session"])
        pl.DataFrame(columns | tenants).write_ndjson(file)
