"""A trace file in memory: its bytes, its lines, and errors that name it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import TraceError
from lengthwise.schema.workload import MAX_TENANTS

_SUFFIXES = {".gz", ".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".txt"}


@dataclass(frozen=True, eq=False)
class Source:
    """What a trace file holds, unpacked."""

    path: Path
    data: bytes

    @classmethod
    def load(cls, path: Path) -> Source:
        """The file's bytes, unpacked where they are gzip.

        Raises:
            TraceError: The file is missing, cannot be read, is cut off or is empty.
        """
        try:
            data = path.read_bytes()
            if data[:2] == b"\x1f\x8b":
                data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: the gzip file is cut off or damaged ({error}); fetch it again") from error
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
        if not data.strip():
            raise TraceError(f"{path}: the file is empty; a trace must hold at least one request")
        return cls(path, data.removeprefix(b"\xef\xbb\xbf"))

    @property
    def name(self) -> str:
        """The file's name without what tells its format."""
        stem = self.path
        while stem.suffix.lower() in _SUFFIXES:
            stem = stem.with_suffix("")
        return stem.name

    @cached_property
    def header(self) -> list[str]:
        """Column names of a CSV file."""
        line = self.data.split(b"\n", 1)[0].decode("utf-8", "replace")
        try:
            return next(csv.reader([line.rstrip("\r")]), [])
        except csv.Error:
            return []

    @cached_property
    def first_object(self) -> dict[str, Any] | None:
        """The first line as a JSON object; None where it is something else."""
        line = self.data.lstrip().split(b"\n", 1)[0]
        if not line.startswith(b"{"):
            return None
        try:
            value: dict[str, Any] = json.loads(line)
        except ValueError:
            return None
        return value

    def fault(self, line: int | None, message: str) -> TraceError:
        """An error that names the file and, where there is one, the line (1-based, the header counted)."""
        return TraceError(f"{self.path}{'' if line is None else f', line {line}'}: {message}")

    def csv_rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Line number and cells of each row after the header.

        Raises:
            TraceError: A row is empty or has another number of cells than the header.
        """
        reader = csv.reader(io.StringIO(self.data.rstrip().decode("utf-8", "replace"), newline=""))
        next(reader)
        start = reader.line_num + 1
        for cells in self._readable(reader):
            if len(cells) != len(self.header):
                raise self.fault(
                    start, f"a row must have {len(self.header)} cells; this one has {len(cells)} (cut off?)"
                )
            yield start, dict(zip(self.header, cells, strict=True))
            start = reader.line_num + 1

    def _readable(self, reader: Iterator[list[str]]) -> Iterator[list[str]]:
        try:
            yield from reader
        except csv.Error as error:
            raise self.fault(reader.line_num, f"cannot be read as CSV: {error}") from error  # type: ignore[attr-defined]

    def json_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and value of each line that is not blank.

        Raises:
            TraceError: A line is not a JSON object.
        """
        for number, line in enumerate(self.data.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise self.fault(number, f"not a JSON object, or cut off: {error}") from error
            if not isinstance(value, dict):
                raise self.fault(number, f"must be a JSON object; it is {json.dumps(value)[:60]}")
            yield number, value


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests as a file has them, before they are sorted, moved to 0 and cut.

    Attributes:
        arrival_s: [n] seconds on any clock.
        prompt_tokens: [n], from 0.
        output_tokens: [n], from 0; requests of 0 tokens are left out later.
        extra: Further columns of length n, under their names in the workload.
        name: For tables and reports.
    """

    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    name: str = ""

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Trace:
        """The trace of these rows, in their order."""
        extra = {name: values[rows] for name, values in self.extra.items()}
        return Trace(self.arrival_s[rows], self.prompt_tokens[rows], self.output_tokens[rows], extra, self.name)


if TYPE_CHECKING:
    import polars as pl

_TICKS_PER_S = 1e7
_WRITTEN = "%Y-%m-%d %H:%M:%S%.f"


def is_date(text: str | None) -> bool:
    """Whether a single text is such a date; quick for one, where polars is quick for many."""
    try:
        return text is not None and (text.isdigit() or datetime.fromisoformat(text) is not None)
    except ValueError:
        return False


def parse_dates(series: pl.Series) -> npt.NDArray[np.float64] | None:
    """Seconds since the first of the dates, [n]; None where one is not a date.

    Dates look like 2023-11-16 18:15:46.6805900, with a T or a zone allowed, or are all whole numbers of
    100 ns (.NET ticks).
    """
    import polars as pl

    ticks = series.cast(pl.Int64, strict=False)
    per_s = _TICKS_PER_S
    if ticks.null_count():
        plain = series.str.replace("T", " ", literal=True)
        if len(plain) and (plain[0] or "")[19:].strip(".0123456789"):
            zoned = plain.str.replace("Z", "+00:00", literal=True)
            dates = zoned.str.to_datetime(f"{_WRITTEN}%#z", time_unit="ns", strict=False)
        else:
            dates = plain.str.to_datetime(_WRITTEN, time_unit="ns", strict=False)
        ticks, per_s = dates.to_physical(), 1e9
    if ticks.null_count():
        return None
    numbers = ticks.to_numpy()
    seconds: npt.NDArray[np.float64] = (numbers - numbers[:1]) / per_s
    return seconds


if TYPE_CHECKING:
    import polars as pl

Floats = npt.NDArray[np.float64]

TEXTS = {"prompt": "prompt", "output": "output", "response": "output", "model": "model"}
"""Columns of any format that are kept where they hold text: column -> name in the workload."""


@dataclass(frozen=True)
class RowFormat:
    """Which columns of a file mean what.

    Attributes:
        name: What ``read(format=)`` calls it.
        kind: How rows are written.
        arrival: Column of arrival times.
        unit_s: Seconds in one unit of that column; None where it holds dates or 100-ns ticks.
        prompt: Column of prompt tokens.
        output: Column of output tokens.
        extra: Further columns that are kept where they are present: column -> name in the workload. Texts of
            prompts and outputs and names of models are kept besides.
        arrival_optional: Without the arrival column all requests come at 0.
        drops_empty: Rows of 0 prompt or output tokens are failed requests, and are left out.
    """

    name: str
    kind: Literal["csv", "jsonl"]
    arrival: str
    unit_s: float | None
    prompt: str
    output: str
    extra: Mapping[str, str] = field(default_factory=dict)
    arrival_optional: bool = False
    drops_empty: bool = False

    @property
    def needed(self) -> list[str]:
        """Columns that must be there."""
        return [*([] if self.arrival_optional else [self.arrival]), self.prompt, self.output]

    def retained(self, columns: list[str]) -> dict[str, str]:
        """Further columns of these that are kept: column -> name in the workload, each name once."""
        taken = {*self.needed, self.arrival, *self.extra}
        texts = {c: TEXTS[c.lower()] for c in reversed(columns) if c not in taken and c.lower() in TEXTS}
        once = {name: column for column, name in texts.items() if name not in self.extra.values()}
        return {c: name for c, name in self.extra.items() if c in columns} | {c: n for n, c in once.items()}

    def matches(self, columns: list[str]) -> bool:
        """Whether a file with these columns can be of this format."""
        return set(self.needed) <= set(columns)


FORMATS = {
    f.name: f
    for f in (
        RowFormat("azure", "csv", "TIMESTAMP", None, "ContextTokens", "GeneratedTokens"),
        RowFormat(
            "burstgpt",
            "csv",
            "Timestamp",
            1.0,
            "Request tokens",
            "Response tokens",
            {"Model": "class", "Session ID": "session"},
            drops_empty=True,
        ),
        RowFormat(
            "vidur",
            "csv",
            "arrived_at",
            1.0,
            "num_prefill_tokens",
            "num_decode_tokens",
            {"tenant": "tenant"},
            arrival_optional=True,
        ),
        RowFormat("splitwise", "csv", "arrival_timestamp", 1.0, "prompt_size", "token_size"),
        RowFormat(
            "mooncake",
            "jsonl",
            "timestamp",
            1e-3,
            "input_length",
            "output_length",
            {"hash_ids": "block_ids", "session_id": "session", "priority": "priority", "tenant": "tenant"},
        ),
        RowFormat(
            "aibrix",
            "jsonl",
            "timestamp_ms",
            1e-3,
            "prompt_length",
            "output_length",
            {"prompt": "prompt"},
            drops_empty=True,
        ),
        RowFormat("llmservingsim", "jsonl", "arrival_time_ns", 1e-9, "input_toks", "output_toks"),
    )
}


def read_rows(source: Source, form: RowFormat) -> Trace:
    """The trace in a file of this format, in the order of the file.

    Raises:
        TraceError: A column is missing, or a row cannot be used; the message names file and line.
    """
    from polars.exceptions import PolarsError

    columns = _columns(source, form)
    if not form.matches(columns):
        raise source.fault(
            1, f"the format {form.name} needs {', '.join(form.needed)}; there are {', '.join(columns[:12])}"
        )
    try:
        frame = _frame(source, form, columns)
        trace = _trace(source, form, frame)
    except (PolarsError, OverflowError) as error:
        raise _first_fault(source, form, columns, str(error)) from error
    if trace is None:
        raise _first_fault(source, form, columns, "a value is missing or out of range")
    return trace


def line_of(source: Source, form: RowFormat, row: int) -> int:
    """The line of a row counted from 0."""
    return next(islice(_lines(source, form), row, None))[0]


def _columns(source: Source, form: RowFormat) -> list[str]:
    return source.header if form.kind == "csv" else list(source.first_object or {})


def _lines(source: Source, form: RowFormat) -> Iterator[tuple[int, dict[str, Any]]]:
    return source.csv_rows() if form.kind == "csv" else source.json_rows()


def _frame(source: Source, form: RowFormat, columns: list[str]) -> pl.DataFrame:
    import polars as pl

    types: dict[str, Any] = {form.prompt: pl.Float64, form.output: pl.Float64}
    if form.arrival in columns:
        types[form.arrival] = pl.String if form.unit_s is None else pl.Float64
    kept = form.retained(columns)
    if form.kind == "csv":
        types |= dict.fromkeys(kept, pl.String)
        return pl.read_csv(source.data.rstrip(), columns=list(types), schema_overrides=types)
    kinds = {int: pl.Int64, str: pl.String, list: pl.List(pl.Int64)}
    values = source.first_object or {}
    types |= {name: kinds[type(values[name])] for name in kept if type(values.get(name)) in kinds}
    return pl.read_ndjson(source.data, schema=types)


def _trace(source: Source, form: RowFormat, frame: pl.DataFrame) -> Trace | None:
    """The columns as a trace; None where a value is missing or out of range."""
    least = 0 if form.drops_empty else 1
    prompt, output = (_tokens(frame[name], least) for name in (form.prompt, form.output))
    arrival_s = _seconds(form, frame) if form.arrival in frame.columns else np.zeros(len(frame))
    if prompt is None or output is None or arrival_s is None:
        return None
    name = source.name
    if form.arrival not in frame.columns:
        name += " (lengths only: all at once)"
    kept = form.retained(frame.columns)
    extra = {kept[c]: _column(frame[c], kept[c]) for c in frame.columns if c in kept}
    return Trace(arrival_s, prompt, output, extra, name)


def _tokens(series: pl.Series, least: int) -> npt.NDArray[np.int64] | None:
    if series.null_count():
        return None
    values = series.to_numpy()
    with np.errstate(invalid="ignore"):
        good = (values >= least) & (values < 2**53) & (values == np.floor(values))
    return values.astype(np.int64) if good.all() else None


def _seconds(form: RowFormat, frame: pl.DataFrame) -> Floats | None:
    series = frame[form.arrival]
    if series.null_count():
        return None
    if form.unit_s is None:
        return parse_dates(series)
    values: Floats = series.to_numpy()
    return (values - values[:1]) * form.unit_s if np.isfinite(values).all() and (values >= 0).all() else None


def _column(series: pl.Series, name: str) -> npt.NDArray[Any]:
    """A further column as the workload holds it: numbers, codes, texts, or lists of ids."""
    import polars as pl

    if isinstance(series.dtype, pl.List):
        lengths = series.list.len().fill_null(0)
        ends = np.cumsum(lengths.to_numpy())
        flat = series.filter(lengths > 0).explode().to_numpy()
        lists = np.empty(len(series), object)
        for row, ids in enumerate(np.split(flat, ends[:-1])):
            lists[row] = ids
        return lists
    if name == "tenant":
        return _tenants(series)
    if series.dtype == pl.Int64:
        return series.fill_null(-1 if name == "session" else 0).to_numpy()
    if name in TEXTS.values():
        return series.to_numpy().astype(object)
    # Few names, many rows: codes in order of appearance take less room than a text each; -1 is none.
    names = series.drop_nulls().unique(maintain_order=True)
    codes = series.replace_strict(names, range(len(names)), default=-1, return_dtype=pl.Int64).to_numpy()
    return codes if name == "session" else np.array([*names, ""])[codes]


def _tenants(series: pl.Series) -> npt.NDArray[np.int64]:
    """Tenants that are numbered from 0 as they are; others by name, in order of appearance; none is one more."""
    import polars as pl

    numbers = series.cast(pl.Int64, strict=False)
    if not numbers.null_count() and ((numbers >= 0) & (numbers < MAX_TENANTS)).all():
        return numbers.to_numpy()
    names = series.drop_nulls().unique(maintain_order=True)
    return series.replace_strict(names, range(len(names)), default=len(names), return_dtype=pl.Int64).to_numpy()


def _first_fault(source: Source, form: RowFormat, columns: list[str], otherwise: str) -> TraceError:
    """The error of the first row that cannot be used."""
    try:
        for line, cells in _lines(source, form):
            message = _complaint(form, columns, cells)
            if message:
                return source.fault(line, message)
    except TraceError as error:
        return error
    return source.fault(None, f"cannot be read as {form.name}: {otherwise.splitlines()[0]}")


def _complaint(form: RowFormat, columns: list[str], cells: Mapping[str, Any]) -> str | None:
    least = 0 if form.drops_empty else 1
    for name in (form.prompt, form.output):
        value = _number(cells.get(name), form.kind)
        if value is None or not (least <= value < 2**53 and value == int(value)):
            return f"{name} must be a whole number of tokens from {least} up; it is {_shown(cells, name)}"
    if form.arrival not in columns:
        return None
    if form.unit_s is None:
        good = is_date(cells.get(form.arrival))
        return None if good else f"{form.arrival} must be a date; it is {_shown(cells, form.arrival)}"
    value = _number(cells.get(form.arrival), form.kind)
    if value is None or not 0 <= value < np.inf:
        return f"{form.arrival} must be a time from 0 up; it is {_shown(cells, form.arrival)}"
    return None


def _number(value: Any, kind: str) -> float | None:
    if kind == "jsonl":
        return float(value) if type(value) in (int, float) else None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _shown(cells: Mapping[str, Any], name: str) -> str:
    return f"{cells[name]!r:.60}" if cells.get(name) not in (None, "") else "missing"
