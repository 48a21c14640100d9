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

import base64
import dataclasses
import io
import json
import zlib
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.files import write_whole
from lengthwise.schema.records import (
    Measured,
    Records,
    ReplicaTotals,
    RequestRecords,
    StepRecords,
    TimeSeries,
    TokenGaps,
    TokenTimes,
)
from lengthwise.schema.workload import Predictions, Workload

T = TypeVar("T")
_KINDS = frozenset("bif")
_MAX_BYTES = 1 << 32


def packed(value: Any) -> Any:
    """A record of columns as plain JSON: arrays become {"dtype", "length", "zlib"}, None stays."""
    if value is None:
        return None
    return {f.name: _item(getattr(value, f.name)) for f in dataclasses.fields(value)}


def unpacked(made: type[T], text: Mapping[str, Any] | None) -> T:
    """The record that was packed; KeyError, ValueError or TypeError where it is not one."""
    if text is None:
        raise ValueError(f"{made.__name__} is missing")
    fields = [f.name for f in dataclasses.fields(made)]  # type: ignore[arg-type]
    return made(**{name: _value(text[name]) for name in fields})


def _item(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value.item() if isinstance(value, np.generic) else value
    plain = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    text = base64.b64encode(zlib.compress(plain.tobytes(), 6)).decode()
    return {"dtype": plain.dtype.str, "length": len(plain), "zlib": text}


def _value(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    dtype, length = np.dtype(item["dtype"]), int(item["length"])
    if dtype.kind not in _KINDS or not 0 <= length * dtype.itemsize <= _MAX_BYTES:
        raise ValueError(f"an array of {length} x {dtype} is none of ours")
    inflate = zlib.decompressobj()
    data = inflate.decompress(base64.b64decode(item["zlib"], validate=True), length * dtype.itemsize + 1)
    array = np.frombuffer(data, dtype)  # a length that does not divide raises
    if len(array) != length:
        raise ValueError(f"an array of {length} numbers holds {len(array)}")
    return array.astype(dtype.newbyteorder("="))


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
    columns |= {_EXTRA + name: _to_storage(name, values) for name, values in extra.items()}
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


def _to_storage(name: str, values: npt.NDArray[Any]) -> Any:
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
        "metadata": dict(measured.metadata),
        "warnings": list(measured.warnings),
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
        meta["metadata"],
        tuple(meta["warnings"]),
        meta["errors"],
        tokens,
        frame[_CLIENT].to_numpy() if _CLIENT in frame.columns else None,
    )


def _damages() -> tuple[type[Exception], ...]:
    """What a file that is not as it was written makes its readers raise."""
    from polars.exceptions import PolarsError

    return (KeyError, ValueError, TypeError, AttributeError, OSError, InputError, zlib.error, PolarsError)
