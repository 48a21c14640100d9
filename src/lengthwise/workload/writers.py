"""Writes workloads to Parquet (lossless) or to another tool's format, and reads Parquet files."""

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
from lengthwise.schema.files import write_atomic
from lengthwise.schema.workload import UNCAPPED, After, Predictions, SharedPrefixes, Workload
from lengthwise.workload.trace_rows import HASHED_TOKENS, TEXTS, Source

MAIN_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL_COLUMNS = ("predicted_tokens", "priority", "tenant", "max_tokens", "ignore_eos")
_INTEGERS = ("prompt_tokens", "output_tokens", "priority", "tenant", "max_tokens")
_EXTRA, _PREDICTIONS = "extra.", "predictions."
PREDICTION_COLUMNS = ("total_tokens", "gittins_rank")
_KEY = "lengthwise.workload"
_RECORDS_KEY, _WORKLOAD = "lengthwise.records", "workload."  # prefix of the workload's columns in a file of records


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
    columns |= relation_columns(workload)
    if workload.prefixes is not None:
        metadata["block_tokens"] = workload.prefixes.block_tokens
    pl.DataFrame(columns).write_parquet(path, metadata={_KEY: json.dumps(metadata)})


_PARENTS, _DELAY, _IDS, _TURN = "after.parent", "after.delay_s", "prefixes.block_ids", "prefixes.previous_turn"


def relation_columns(workload: Workload) -> dict[str, Any]:
    """Return dependencies and shared prefixes as columns of a file; {} if the workload has neither."""
    columns: dict[str, Any] = {}
    if workload.after is not None:
        columns |= {_PARENTS: lists_of(workload.after.start, workload.after.parent), _DELAY: workload.after.delay_s}
    if workload.prefixes is not None:
        columns[_IDS] = lists_of(workload.prefixes.start, workload.prefixes.block_ids)
        columns[_TURN] = workload.prefixes.turns
    return columns


def relations_of(frame: Any, block_tokens: int) -> tuple[After | None, SharedPrefixes | None]:
    """Return the dependencies and shared prefixes in a frame with ``relation_columns``; None where it lacks them."""
    after = prefixes = None
    if _PARENTS in frame.columns:
        after = After(*flat(frame[_PARENTS]), frame[_DELAY].to_numpy())
    if _IDS in frame.columns:
        prefixes = SharedPrefixes(block_tokens, *flat(frame[_IDS]), frame[_TURN].to_numpy())
    return after, prefixes


def flat(series: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return the starts [n + 1] and the values [m] of a column of n lists: the inverse of ``lists_of``."""
    lengths = series.list.len().to_numpy().astype(np.int64)
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return start, series.filter(series.list.len() > 0).explode().to_numpy()


def may_be_workload(source: Source) -> bool:
    """Return whether a Parquet file has the main columns of a workload; also True if it cannot be read."""
    try:
        return set(MAIN_COLUMNS) <= set(pl.read_parquet_schema(io.BytesIO(source.data)))
    except (PolarsError, OSError, ValueError):
        return True


def read_parquet(source: Source) -> Workload:
    """Return the workload in a Parquet file of ``write_parquet``, or of the records of a run.

    A file that a user wrote needs only the three main columns. Raises TraceError if it is damaged or lacks them.
    """
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
        after, prefixes = relations_of(frame, metadata.get("block_tokens", 0))
        return Workload(
            **columns,
            after=after,
            prefixes=prefixes,
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
    """Return a column of ``Workload.extra`` for a file. Raises OutputError if its values have several types."""
    try:
        if values.dtype != object:
            return pl.Series(values)
        plain = [item.tolist() if isinstance(item, np.ndarray) else item for item in values]
        kinds = {item.dtype for item in values if isinstance(item, np.ndarray)}
        if len(kinds) == 1 and not any(plain):  # polars cannot infer a type from empty lists
            return pl.Series(plain, dtype=pl.List(pl.Series(np.empty(0, kinds.pop())).dtype))
        return pl.Series(plain, strict=True)
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
        kinds_text = "it must hold numbers, texts or lists of one type"
        raise OutputError(f"the column {name} cannot be stored: {kinds_text} ({_first_line(error)})") from error


def lists_of(start: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> Any:
    """Return a column of lists, in which row i is ``values[start[i]:start[i + 1]]``."""
    inner = pl.from_numpy(np.asarray(values), schema=["v"])["v"]
    row = pl.Series("row", np.repeat(np.arange(len(start) - 1), np.diff(start)))
    every = pl.DataFrame({"row": pl.Series(np.arange(len(start) - 1))})
    grouped = pl.DataFrame([row, inner]).group_by("row", maintain_order=True).agg("v")
    joined = every.join(grouped, on="row", how="left", maintain_order="left")["v"]
    return joined.fill_null(pl.Series([[]], dtype=pl.List(inner.dtype)))


def _numbers(source: Source, series: Any) -> npt.NDArray[Any]:
    if series.name == "max_tokens":
        series = series.fill_null(UNCAPPED)
    if series.name == "ignore_eos" and series.dtype == pl.Boolean and not series.null_count():
        return np.asarray(series.to_numpy())
    if not series.dtype.is_numeric() or series.null_count():
        raise source.fault(None, f"{series.name} must hold a number in every row")
    if series.name in _INTEGERS and not series.dtype.is_integer():
        raise source.fault(None, f"{series.name} must hold whole numbers; it holds {series.dtype}")
    return np.asarray(series.to_numpy())


def to_array(series: Any) -> npt.NDArray[Any]:
    """Return a column as an array; a column of lists becomes an object array of arrays."""
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
    """Write a workload to a file atomically; it is compressed if its name ends in .gz.

    Only Parquet is lossless and can store a closed loop. The other formats store arrivals and lengths. Vidur's also
    stores tenants and max_tokens, and Mooncake's stores those, ignore_eos, "session", shared prefixes and dependencies
    (as Agentic Mooncake, with the additional keys block_size and previous_turn). Azure's rounds times to 100 ns, and
    starts at 1970-01-01. ``format`` is one of WRITABLE. Without it, the suffix decides: .parquet, .csv (Vidur's) or
    .jsonl (Mooncake's). Raises OutputError if the format is unclear, cannot hold a closed loop or an arrival, or the
    file cannot be written; UnknownNameError for an unknown format; and InputError if it cannot hold dependencies.
    """
    path = Path(path)
    is_gzip = path.suffix.lower() == ".gz"
    chosen = format or _BY_SUFFIX.get((path.with_suffix("") if is_gzip else path).suffix.lower())
    if chosen is None:
        raise OutputError(f"{path}: without a format, the name must end in {', '.join(_BY_SUFFIX)}")
    if chosen not in WRITABLE:
        raise UnknownNameError("format to write", chosen, WRITABLE)
    if chosen not in ("parquet", "mooncake"):
        workload.require_independent(f"the format {chosen}")
    if chosen != "parquet" and workload.concurrency is not None:
        raise OutputError(f"{path}: the format {chosen} cannot hold a closed loop; write a .parquet file")

    def write_file(target: Path) -> None:
        if chosen == "parquet":
            write_parquet(workload, target)
        else:
            # An open file, because polars would infer a compression from the name.
            with target.open("wb") as file:
                _write_rows(workload, chosen, file)
        if is_gzip:
            # Without a time in the header, the same workload gives the same bytes.
            target.write_bytes(gzip.compress(target.read_bytes(), compresslevel=6, mtime=0))

    write_atomic(path, write_file)


def _write_rows(workload: Workload, form: str, file: BinaryIO) -> None:
    prompt, output, tenant = workload.prompt_tokens, workload.output_tokens, workload.tenant
    scheduling = {} if tenant is None else {"tenant": pl.Series(tenant)}
    if workload.max_tokens is not None:
        cap = pl.Series(workload.max_tokens)
        scheduling["max_tokens"] = pl.select(pl.when(cap < UNCAPPED).then(cap)).to_series()
    if form == "vidur":
        rows = {"arrived_at": workload.arrival_s, "num_prefill_tokens": prompt, "num_decode_tokens": output}
        pl.DataFrame(rows | scheduling).write_csv(file)
    elif form == "azure":
        ns = pl.Series(np.rint(workload.arrival_s * 1e7).astype(np.int64) * 100)
        dates = ns.cast(pl.Datetime("ns")).dt.strftime("%Y-%m-%d %H:%M:%S%.9f").str.head(-2)
        pl.DataFrame({"TIMESTAMP": dates, "ContextTokens": prompt, "GeneratedTokens": output}).write_csv(file)
    else:
        _write_mooncake(workload, scheduling, file)


def _write_mooncake(workload: Workload, scheduling: dict[str, Any], file: BinaryIO) -> None:
    arrival_ms = workload.arrival_s * 1e3
    if (arrival_ms == np.rint(arrival_ms)).all():
        # Mooncake writes integers.
        arrival_ms = arrival_ms.astype(np.int64)
    columns: dict[str, Any] = {
        "timestamp": arrival_ms,
        "input_length": workload.prompt_tokens,
        "output_length": workload.output_tokens,
    }
    prefixes, after = workload.prefixes, workload.after
    if prefixes is not None:
        columns["hash_ids"] = lists_of(prefixes.start, prefixes.block_ids)
        if prefixes.block_tokens != HASHED_TOKENS or not len(prefixes.block_ids):
            columns["block_size"] = np.full(len(workload), prefixes.block_tokens)
    if "session" in workload.extra:
        columns["session_id"] = pl.Series(workload.extra["session"])
    if workload.ignore_eos is not None:
        columns["ignore_eos"] = pl.Series(workload.ignore_eos)
    frame = pl.DataFrame(columns | scheduling)
    if after is None:
        frame.write_ndjson(file)
        return
    assert after.delay_s is not None
    turns = np.full(len(workload), -1) if prefixes is None else prefixes.turns
    for i, row in enumerate(frame.iter_rows(named=True)):
        parents = after.parent[after.start[i] : after.start[i + 1]].tolist()
        row["request_id"], row["wait_for"] = str(i), [str(parent) for parent in parents]
        if parents and row.pop("timestamp") != arrival_ms[parents].max():
            raise OutputError(
                "Mooncake cannot hold an arrival of a request that waits for others; write a .parquet file, or give "
                f"request {i} the arrival of its latest parent"
            )
        row["delay"] = after.delay_s[i] * 1e3
        row["previous_turn"] = None if turns[i] < 0 else str(turns[i])
        file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
