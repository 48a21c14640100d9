"""File format of records: one Parquet file with a row per request, and everything else in its metadata.

Columns: those of ``RequestRecords``; those of the ``Workload``, prefixed with "workload."; where recorded, times and
tokens of chunks, "pieces.at_s" and "pieces.tokens" (a list per request), and "client_s", the seconds from when a
request was due until it was sent. The metadata's key "lengthwise.records" holds a JSON object::

    {"format": "lengthwise.records", "version": 1, "kind": "simulated" | "measured", "made_by": str,
     "source", "metadata", "warnings", "errors": as in RunResult,
     "name", "seed", "end_s": as in Records,
     "workload": {"name", "concurrency", ...}, "gaps", "totals", "series", "steps": records of columns;
     an array is {"dtype", "length", "zlib"}, the last being base64 of its bytes packed by zlib}

Within a version, keys are added but neither removed nor changed.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import zlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.files import write_atomic
from lengthwise.schema.records import (
    Records,
    ReplicaTotals,
    RequestRecords,
    RunResult,
    StepRecords,
    TimeSeries,
    TokenGaps,
    TokenTimes,
)
from lengthwise.schema.workload import Predictions, Workload
from lengthwise.workload import writers
from lengthwise.workload.writers import MAIN_COLUMNS, OPTIONAL_COLUMNS, PREDICTION_COLUMNS

T = TypeVar("T")
_KINDS = frozenset("bif")
_MAX_BYTES = 1 << 32


def packed(value: Any) -> Any:
    """Return a dataclass of arrays as JSON. An array becomes {"dtype", "length", "zlib"}, and None stays None."""

    def item(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value.item() if isinstance(value, np.generic) else value
        plain = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        text = base64.b64encode(zlib.compress(plain.tobytes(), 6)).decode()
        return {"dtype": plain.dtype.str, "length": len(plain), "zlib": text}

    return None if value is None else {f.name: item(getattr(value, f.name)) for f in dataclasses.fields(value)}


def unpacked(kind: type[T], encoded: Mapping[str, Any] | None) -> T:
    """Return the ``kind`` that ``packed`` encoded. Raises KeyError, ValueError or TypeError for anything else."""

    def value(item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        dtype, length = np.dtype(item["dtype"]), int(item["length"])
        if dtype.kind not in _KINDS or not 0 <= length * dtype.itemsize <= _MAX_BYTES:
            raise ValueError(f"an array of {length} x {dtype} is not of this format")
        # Decompress at most one byte too many, so that a damaged length cannot exhaust the memory.
        compressed, limit = base64.b64decode(item["zlib"], validate=True), length * dtype.itemsize + 1
        data = zlib.decompressobj().decompress(compressed, limit)
        array = np.frombuffer(data, dtype)  # a length that does not divide raises
        if len(array) != length:
            raise ValueError(f"an array of {length} numbers holds {len(array)}")
        return array.astype(dtype.newbyteorder("="))

    if encoded is None:
        raise ValueError(f"{kind.__name__} is missing")
    return kind(**{f.name: value(encoded[f.name]) for f in dataclasses.fields(kind)})  # type: ignore[arg-type]


PREFIX = "workload."
_EXTRA = PREFIX + "extra."
_ROWS = PREFIX + "predictions."


def columns_of(workload: Workload) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a workload into columns of requests and plain values. Raises OutputError for data that cannot be stored."""
    columns = {PREFIX + n: v for n in (*MAIN_COLUMNS, *OPTIONAL_COLUMNS) if (v := getattr(workload, n)) is not None}
    extra = {name: np.asarray(values) for name, values in workload.extra.items()}
    columns |= {_EXTRA + name: writers.extra_series(name, values) for name, values in extra.items()}
    rest: dict[str, Any] = {"name": workload.name, "concurrency": workload.concurrency}
    rest["extra"] = {name: values.dtype.str for name, values in extra.items()}
    if workload.predictions is not None:
        predictions = workload.predictions
        columns |= {_ROWS + n: writers.lists_of(predictions.start, getattr(predictions, n)) for n in PREDICTION_COLUMNS}
        rest["window_tokens"] = int(predictions.window_tokens)
    columns |= {PREFIX + name: column for name, column in writers.relation_columns(workload).items()}
    if workload.prefixes is not None:
        rest["block_tokens"] = workload.prefixes.block_tokens
    return columns, rest


def workload_of(frame: Any, rest: dict[str, Any]) -> Workload:
    """Return the workload that ``columns_of`` split. Invalid data raises errors of polars, numpy or Workload."""
    given = {n: frame[PREFIX + n].to_numpy() for n in MAIN_COLUMNS}
    given |= {n: frame[PREFIX + n].to_numpy() for n in OPTIONAL_COLUMNS if PREFIX + n in frame.columns}
    predictions = None
    if "window_tokens" in rest:
        (start, total), (_, index) = (writers.flat(frame[_ROWS + name]) for name in PREDICTION_COLUMNS)
        predictions = Predictions(rest["window_tokens"], start, total, index)
    own = frame.select(pl.col(f"^{PREFIX}.*$").name.map(lambda name: name.removeprefix(PREFIX)))
    after, prefixes = writers.relations_of(own, rest.get("block_tokens", 0))
    return Workload(
        **given,
        after=after,
        prefixes=prefixes,
        extra={name: _extra_values(frame[_EXTRA + name], dtype) for name, dtype in rest["extra"].items()},
        predictions=predictions,
        concurrency=rest["concurrency"],
        name=rest["name"],
    )


def _extra_values(series: Any, dtype: str) -> npt.NDArray[Any]:
    if not isinstance(series.dtype, pl.List):
        array: npt.NDArray[Any] = series.to_numpy()
        return np.array(series.to_list(), object) if np.dtype(dtype) == object else array.astype(dtype)
    return writers.to_array(series)


FORMAT, VERSION = "lengthwise.records", 1
_KEY = "lengthwise.records"
_AT, _TOKENS, _CLIENT = "pieces.at_s", "pieces.tokens", "client_s"
_PARTS: dict[str, type] = {"gaps": TokenGaps, "totals": ReplicaTotals, "series": TimeSeries}


def write_records(measured: RunResult, path: Path | str) -> None:
    """Write a run to a file, atomically and without loss. Raises OutputError if it cannot be written."""
    records, tokens = measured.records, measured.tokens
    names = [f.name for f in dataclasses.fields(RequestRecords)]
    requested, workload = columns_of(measured.workload)
    columns = {name: getattr(records.requests, name) for name in names} | requested
    columns = {name: column for name, column in columns.items() if column is not None}
    if tokens is not None:
        columns[_AT] = writers.lists_of(tokens.start, tokens.at_s)
        columns[_TOKENS] = writers.lists_of(tokens.start, tokens.tokens)
    if measured.client_s is not None:
        columns[_CLIENT] = measured.client_s
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "simulated" if measured.is_simulated else "measured",
        "made_by": f"lengthwise {version('lengthwise')}",
        "source": measured.source,
        "metadata": dict(measured.metadata),
        "warnings": list(measured.warnings),
        "errors": dict(measured.errors),
        **{name: getattr(records, name) for name in ("name", "seed", "end_s")},
        "workload": workload,
        **{name: packed(getattr(records, name)) for name in (*_PARTS, "steps")},
    }

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} is none")

    try:
        text = json.dumps(meta, ensure_ascii=False, default=plain)
    except (TypeError, ValueError) as error:
        raise OutputError(f"metadata of records must be plain values that JSON knows; {error}") from error
    write_atomic(path, lambda target: pl.DataFrame(columns).write_parquet(target, metadata={_KEY: text}))


def read_records(path: Path | str) -> RunResult:
    """Read a run that ``write_records`` wrote. Raises InputError for a missing, damaged or unknown file."""
    path = Path(path)
    damages = (
        KeyError, ValueError, TypeError, AttributeError, OSError, InputError, zlib.error, pl.exceptions.PolarsError,
    )  # fmt: skip
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file of records {path}") from None
    except OSError as error:
        raise InputError(f"cannot read the records {path}: {error.strerror}") from error
    try:
        frame, metadata = pl.read_parquet(io.BytesIO(data)), pl.read_parquet_metadata(io.BytesIO(data))
    except damages as error:
        reason = (str(error).splitlines() or [""])[0]
        found = f"it is cut off, damaged or something else ({reason})"
        raise InputError(f"{path} must be a complete Parquet file of records; {found}") from error
    try:
        meta = json.loads(metadata.get(_KEY, "null"))
    except ValueError:
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = ", ".join(key for key in metadata if key.startswith("lengthwise.")) or "another program's file"
        raise InputError(
            f"{path} must be a file of records (of `simulate --records` or `bench --records`); it is {found}"
        )
    if meta.get("version") != VERSION:
        detail = f"written by {meta.get('made_by', 'unknown')}: write it again with this version"
        raise InputError(f"{path} must be of version {VERSION}; it is of {meta.get('version')!r}, {detail}")
    try:
        return _measured(frame, meta)
    except damages as error:
        problem = f"a part is missing or damaged: {error}"
        raise InputError(f"{path} must hold records as they were written; {problem}") from error


def _measured(frame: Any, meta: dict[str, Any]) -> RunResult:
    names = [f.name for f in dataclasses.fields(RequestRecords)]
    records = Records(
        requests=RequestRecords(**{name: frame[name].to_numpy() for name in names if name in frame.columns}),
        steps=None if meta["steps"] is None else unpacked(StepRecords, meta["steps"]),
        **{name: unpacked(kind, meta[name]) for name, kind in _PARTS.items()},
        end_s=float(meta["end_s"]),
        seed=int(meta["seed"]),
        name=meta["name"],
    )
    return RunResult(
        records,
        workload_of(frame, meta["workload"]),
        meta["source"],
        meta["metadata"],
        tuple(meta["warnings"]),
        meta["errors"],
        TokenTimes(*writers.flat(frame[_AT]), writers.flat(frame[_TOKENS])[1]) if _AT in frame.columns else None,
        frame[_CLIENT].to_numpy() if _CLIENT in frame.columns else None,
    )
