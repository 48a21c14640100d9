"""Records in one Parquet file: a row a request, and in its metadata all that is not a row.

Columns are those of ``RequestRecords`` by their names, those of the ``Workload`` after "workload.", and where
token times were kept "pieces.at_s" and "pieces.tokens", a list a request; "client_s" where a client told of
itself. The metadata's key
"lengthwise.records" holds a JSON object::

    {"format": "lengthwise.records", "version": 1, "kind": "simulated" | "measured", "made_by": str,
     "source", "facts", "doubts", "errors": as in Measured, "name", "seed", "end_s": as in Records,
     "workload": {"name", "concurrency", ...}, "gaps", "totals", "series", "steps": records of columns;
     an array is {"dtype", "length", "zlib"}, the last being base64 of its bytes packed by zlib}

Keys are only ever added within a version.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zlib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.measure._packed import packed, unpacked
from lengthwise.measure._workload_columns import columns_of, flat, lists, workload_of
from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.files import write_whole
from lengthwise.schema.measured import Measured, TokenTimes
from lengthwise.schema.records import (
    Records,
    ReplicaTotals,
    RequestRecords,
    StepRecords,
    TimeSeries,
    TokenGaps,
)

FORMAT, VERSION = "lengthwise.records", 1
_KEY = "lengthwise.records"
_AT, _TOKENS, _CLIENT = "pieces.at_s", "pieces.tokens", "client_s"
_PARTS: dict[str, type] = {"gaps": TokenGaps, "totals": ReplicaTotals, "series": TimeSeries}


def write_records(measured: Measured, path: Path | str) -> None:
    """A file from which ``read_records`` makes the same again, to the bit; written whole or not at all.

    Raises:
        OutputError: The file cannot be written, or ``facts`` or the workload's ``extra`` hold live objects.
    """
    requests = measured.records.requests
    columns = {f.name: getattr(requests, f.name) for f in dataclasses.fields(requests)}
    asked, rest = columns_of(measured.workload)
    columns |= asked
    if measured.tokens is not None:
        start = measured.tokens.start
        columns |= {_AT: lists(start, measured.tokens.at_s), _TOKENS: lists(start, measured.tokens.tokens)}
    if measured.client_s is not None:
        columns[_CLIENT] = measured.client_s
    write_whole(path, partial(_write, columns, _text(measured, rest)))


def read_records(path: Path | str) -> Measured:
    """What ``write_records`` wrote.

    Raises:
        InputError: There is no such file, it is cut off or damaged, holds something else, or is of a
            version that is not known here.
    """
    path = Path(path)
    frame, metadata = _opened(path)
    meta = _checked(path, metadata)
    try:
        return _measured(frame, meta)
    except _damages() as error:
        raise InputError(
            f"{path} must hold records as they were written; a part is missing or damaged: {error}"
        ) from error


def _write(columns: dict[str, Any], text: str, path: Path) -> None:
    import polars as pl

    pl.DataFrame(columns).write_parquet(path, metadata={_KEY: text})


def _text(measured: Measured, workload: dict[str, Any]) -> str:
    records = measured.records
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "simulated" if measured.is_simulated else "measured",
        "made_by": f"lengthwise {version('lengthwise')}",
        "source": measured.source,
        "facts": dict(measured.facts),
        "doubts": list(measured.doubts),
        "errors": dict(measured.errors),
        "name": records.name,
        "seed": records.seed,
        "end_s": records.end_s,
        "workload": workload,
        **{name: packed(getattr(records, name)) for name in _PARTS},
        "steps": packed(records.steps),
    }
    try:
        return json.dumps(meta, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise OutputError(f"facts of records must be plain values that JSON knows; {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none")


def _opened(path: Path) -> tuple[Any, dict[str, str]]:
    import polars as pl

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file of records {path}") from None
    except OSError as error:
        raise InputError(f"cannot read the records {path}: {error.strerror}") from error
    try:
        return pl.read_parquet(io.BytesIO(data)), pl.read_parquet_metadata(io.BytesIO(data))
    except _damages() as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"{path} must be a whole Parquet file of records; it is cut off, damaged or something else ({reason})"
        ) from error


def _checked(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        meta = json.loads(metadata.get(_KEY, "null"))
    except ValueError:
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        held = ", ".join(key for key in metadata if key.startswith("lengthwise.")) or "none of ours"
        raise InputError(
            f"{path} must be a file of records (of `simulate --records` or `bench --records`); it is {held}"
        )
    if meta.get("version") != VERSION:
        raise InputError(
            f"{path} must be of version {VERSION}; it is of {meta.get('version')!r}, written by "
            f"{meta.get('made_by', 'unknown')}: write it again with this version"
        )
    return meta


def _measured(frame: Any, meta: dict[str, Any]) -> Measured:
    requests = {f.name: frame[f.name].to_numpy() for f in dataclasses.fields(RequestRecords)}
    records = Records(
        requests=RequestRecords(**requests),
        steps=None if meta["steps"] is None else unpacked(StepRecords, meta["steps"]),
        **{name: unpacked(made, meta[name]) for name, made in _PARTS.items()},
        end_s=float(meta["end_s"]),
        seed=int(meta["seed"]),
        name=meta["name"],
    )
    tokens = None
    if _AT in frame.columns:
        start, at_s = flat(frame[_AT])
        tokens = TokenTimes(start, at_s, flat(frame[_TOKENS])[1])
    return Measured(
        records,
        workload_of(frame, meta["workload"]),
        meta["source"],
        meta["facts"],
        tuple(meta["doubts"]),
        meta["errors"],
        tokens,
        frame[_CLIENT].to_numpy() if _CLIENT in frame.columns else None,
    )


def _damages() -> tuple[type[Exception], ...]:
    """What a file that is not as it was written makes its readers raise."""
    from polars.exceptions import PolarsError

    return (KeyError, ValueError, TypeError, AttributeError, OSError, InputError, zlib.error, PolarsError)
