"""Reads trace files into memory, and the trace formats with one request per row."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
from polars.exceptions import PolarsError

from lengthwise.schema.errors import TraceError, UnknownNameError
from lengthwise.schema.workload import MAX_TENANTS, UNCAPPED

Floats = npt.NDArray[np.float64]

_SUFFIXES = {".gz", ".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".txt"}


@dataclass(frozen=True, eq=False)
class Source:
    """The decompressed content of a trace file."""

    path: Path
    data: bytes

    @classmethod
    def load(cls, path: Path) -> Source:
        """Return a file's content, decompressed. Raises TraceError if the file cannot be read, or is empty."""
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
        """Return the file's name without its suffixes."""
        stem = self.path
        while stem.suffix.lower() in _SUFFIXES:
            stem = stem.with_suffix("")
        return stem.name

    @cached_property
    def header(self) -> list[str]:
        """Return the column names in the first line of a CSV file."""
        line = self.data.split(b"\n", 1)[0].decode("utf-8", "replace")
        try:
            return next(csv.reader([line.rstrip("\r")]), [])
        except csv.Error:
            return []

    @cached_property
    def first_object(self) -> dict[str, Any] | None:
        """Return the JSON object in the first line; None if the line is not an object."""
        line = self.data.lstrip().split(b"\n", 1)[0]
        if not line.startswith(b"{"):
            return None
        try:
            value: dict[str, Any] = json.loads(line)
        except ValueError:
            return None
        return value

    @cached_property
    def first_item(self) -> dict[str, Any] | None:
        """Return the first JSON object of a file of objects on several lines, or of a list; None for other files."""
        try:
            return next(self.json_objects())[1] if self.data.lstrip()[:1] in (b"{", b"[") else None
        except (TraceError, StopIteration):
            return None

    def fault(self, line: int | None, message: str) -> TraceError:
        """Return an error that names the file and the line, counted from 1 with the header; None: no line."""
        return TraceError(f"{self.path}{'' if line is None else f', line {line}'}: {message}")

    def csv_rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the line number and cells of each row. Raises TraceError if a row has another number of cells."""
        reader = csv.reader(io.StringIO(self.data.rstrip().decode("utf-8", "replace"), newline=""))
        next(reader)
        start = reader.line_num + 1
        try:
            for cells in reader:
                if len(cells) != len(self.header):
                    message = f"a row must have {len(self.header)} cells; this one has {len(cells)} (cut off?)"
                    raise self.fault(start, message)
                yield start, dict(zip(self.header, cells, strict=True))
                start = reader.line_num + 1
        except csv.Error as error:
            raise self.fault(reader.line_num, f"cannot be read as CSV: {error}") from error

    def json_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the line number and object of each line. Raises TraceError if a line is not a JSON object."""
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

    def json_objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the line number and the value of each JSON object. Objects may span lines, and be in a list.

        Raises TraceError if the text has another value or is no JSON.
        """
        text, at, line, decoder = self.data.decode("utf-8", "replace"), 0, 1, json.JSONDecoder()
        while found := _NEXT_VALUE.search(text, at):
            start = found.start()
            line += text.count("\n", at, start)
            try:
                value, at = decoder.raw_decode(text, start)
            except ValueError as error:
                raise self.fault(line, f"not a JSON object, or cut off: {error}") from error
            if not isinstance(value, dict):
                raise self.fault(line, f"must be a JSON object; it is {json.dumps(value)[:60]}")
            yield line, value
            line += text.count("\n", start, at)


_NEXT_VALUE = re.compile(r"[^\s,\[\]]")


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of a file, with the file's times."""

    arrival_s: npt.NDArray[np.float64]  # [n] seconds since any time
    prompt_tokens: npt.NDArray[np.int64]  # [n], at least 0
    output_tokens: npt.NDArray[np.int64]  # [n], at least 0; requests of 0 tokens are left out later
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # [n], by name in ``Workload.extra``
    name: str = ""

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Trace:
        """Return the trace with the requests at the indices ``rows``, in this order."""
        extra = {name: values[rows] for name, values in self.extra.items()}
        return Trace(self.arrival_s[rows], self.prompt_tokens[rows], self.output_tokens[rows], extra, self.name)


_DATE_FORMAT = "%Y-%m-%d %H:%M:%S%.f"


def is_date(text: str | None) -> bool:
    """Return whether a text looks like a date or .NET ticks (of 100 ns). ``parse_dates`` may still reject it."""
    try:
        return text is not None and (text.isdigit() or datetime.fromisoformat(text) is not None)
    except ValueError:
        return False


def parse_dates(series: pl.Series) -> Floats | None:
    """Return the seconds [n] since the first date or .NET tick; None if one of them is invalid."""
    ticks, per_s = series.cast(pl.Int64, strict=False), 1e7
    if ticks.null_count():
        plain = series.str.replace("T", " ", literal=True)
        if len(plain) and (plain[0] or "")[19:].strip(".0123456789"):
            with_zone = plain.str.replace("Z", "+00:00", literal=True)
            dates = with_zone.str.to_datetime(f"{_DATE_FORMAT}%#z", time_unit="ns", strict=False)
        else:
            dates = plain.str.to_datetime(_DATE_FORMAT, time_unit="ns", strict=False)
        ticks, per_s = dates.to_physical(), 1e9
    if ticks.null_count():
        return None
    numbers = ticks.to_numpy()
    return np.asarray((numbers - numbers[:1]) / per_s)


HASHED_TOKENS = 512  # tokens of a block of Mooncake's ``hash_ids``, unless rows have a ``block_size``
TEXTS = {"prompt": "prompt", "output": "output", "response": "output", "model": "model"}  # text columns of every format


@dataclass(frozen=True)
class RowFormat:
    """A trace format with one request per row, and its columns."""

    name: str  # name in ``read(format=)``
    kind: Literal["csv", "jsonl"]
    arrival: str
    unit_s: float | None  # seconds in one unit of arrivals; None for dates or 100-ns ticks
    prompt: str
    output: str
    extra: Mapping[str, str] = field(default_factory=dict)  # other optional columns, and their names in the workload
    arrival_optional: bool = False  # whether the arrival column may be missing: all requests then arrive at 0
    drops_empty: bool = False  # whether rows of 0 prompt or output tokens are failed requests, to be left out

    @property
    def min_tokens(self) -> int:
        """Return the smallest valid number of tokens."""
        return 0 if self.drops_empty else 1

    @property
    def required(self) -> list[str]:
        """Return the columns that a file must have."""
        return [*([] if self.arrival_optional else [self.arrival]), self.prompt, self.output]

    def optional(self, columns: list[str]) -> dict[str, str]:
        """Return the optional columns among ``columns``, with their names in ``Workload.extra``."""
        taken = {*self.required, self.arrival, *self.extra}
        texts = {c: TEXTS[c.lower()] for c in reversed(columns) if c not in taken and c.lower() in TEXTS}
        once = {name: column for column, name in texts.items() if name not in self.extra.values()}
        return {c: name for c, name in self.extra.items() if c in columns} | {c: n for n, c in once.items()}


FORMATS = {
    f.name: f
    for f in (
        RowFormat("azure", "csv", "TIMESTAMP", None, "ContextTokens", "GeneratedTokens"),
        RowFormat(
            "burstgpt", "csv", "Timestamp", 1.0, "Request tokens", "Response tokens",
            {"Model": "class", "Session ID": "session"}, drops_empty=True,
        ),
        RowFormat(
            "vidur", "csv", "arrived_at", 1.0, "num_prefill_tokens", "num_decode_tokens",
            {
                "tenant": "tenant", "priority": "priority", "max_tokens": "max_tokens", "ignore_eos": "ignore_eos",
                "session": "session", "turn": "turn",
            },
            arrival_optional=True,
        ),
        RowFormat("splitwise", "csv", "arrival_timestamp", 1.0, "prompt_size", "token_size"),
        RowFormat(
            "mooncake", "jsonl", "timestamp", 1e-3, "input_length", "output_length",
            {
                "hash_ids": "block_ids", "session_id": "session", "priority": "priority", "tenant": "tenant",
                "block_size": "block_tokens", "max_tokens": "max_tokens", "ignore_eos": "ignore_eos",
            },
        ),
        RowFormat(
            "aibrix", "jsonl", "timestamp_ms", 1e-3, "prompt_length", "output_length",
            {"prompt": "prompt"}, drops_empty=True,
        ),
        RowFormat("llmservingsim", "jsonl", "arrival_time_ns", 1e-9, "input_toks", "output_toks"),
    )
}  # fmt: skip


ARRIVALS = {"arrival_s": 1.0, "arrival_ms": 1e-3, "arrival_us": 1e-6, "arrival_ns": 1e-9, "arrival_date": None}
"""Our names for the column of arrivals, with seconds in one unit."""
COLUMNS = ("prompt_tokens", "output_tokens", *ARRIVALS, *FORMATS["vidur"].extra)
"""Our names for columns of a CSV file; a date may also be in .NET ticks."""


def with_columns(source: Source, columns: Mapping[str, str]) -> tuple[Source, RowFormat]:
    """Return a CSV file whose header has our names, and its format. ``columns`` maps our names (COLUMNS) to the file's.

    Raises UnknownNameError for another name, and TraceError if the file is no CSV or lacks a column, if the prompt or
    output tokens have no column, if several columns are arrivals, or if a column of the file has two names.
    """
    if unknown := sorted(set(columns) - {*COLUMNS}):
        raise UnknownNameError("column", unknown[0], COLUMNS)
    header = [] if source.data.lstrip()[:1] in (b"{", b"[") or source.data[:4] == b"PAR1" else source.header
    arrivals = [name for name in ARRIVALS if name in columns]
    if lacks := [name for name in columns.values() if name not in header]:
        shown = f"the columns {', '.join(header[:12])[:200]}" if header else "no header of a CSV file"
        raise source.fault(1, f"must have the column {lacks[0]!r}, which columns name; it has {shown}")
    if lacks := [name for name in COLUMNS[:2] if name not in columns]:
        names = ", ".join(header[:12])[:200]
        raise source.fault(None, f"columns must name that of {lacks[0]}: {lacks[0]}=NAME, where NAME is one of {names}")
    if len(arrivals) > 1 or len(set(columns.values())) < len(columns):
        raise source.fault(None, f"columns must give each column one name, and arrivals one column; they are {columns}")
    named = {column: name for name, column in columns.items()}
    new = [named.get(column, f"{column} (unused)" if column in columns else column) for column in header]
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(new)
    arrival, rest = arrivals[0] if arrivals else "arrival_s", source.data.partition(b"\n")[2]
    (prompt, output), extra = COLUMNS[:2], FORMATS["vidur"].extra
    form = RowFormat(
        "columns", "csv", arrival, ARRIVALS[arrival], prompt, output, extra, not arrivals, drops_empty=True
    )
    return Source(source.path, line.getvalue().encode() + rest), form


def read_rows(source: Source, form: RowFormat) -> Trace:
    """Return the requests of a file in its order. Raises TraceError if it does not have the format ``form``."""
    columns = source.header if form.kind == "csv" else list(source.first_object or {})
    if form.kind == "jsonl":  # rows after the first may have more columns
        columns += [name for name in form.extra if name not in columns and f'"{name}"'.encode() in source.data]
    if form.arrival_optional and form.arrival not in columns:
        name = next((name for name in ARRIVALS if name in columns), form.arrival)
        form = replace(form, arrival=name, unit_s=ARRIVALS.get(name, form.unit_s))
    if not set(form.required) <= set(columns):
        raise source.fault(
            1, f"the format {form.name} needs {', '.join(form.required)}; the file has {', '.join(columns[:12])}"
        )
    if form.kind == "csv" and (unread := _MEANINGFUL & set(columns) - set(form.extra)):
        raise source.fault(1, f"the format {form.name} has no column {min(unread)}; {_ELSEWHERE}")
    if "turn" in form.extra and "turn" in columns and "session" not in columns:
        raise source.fault(1, "a column turn needs a column session, whose turns it numbers; add it, or take turn out")
    try:
        trace = _to_trace(source, form, _read_frame(source, form, columns))
    except (PolarsError, OverflowError) as error:
        raise _first_fault(source, form, columns, str(error)) from error
    if trace is None:
        raise _first_fault(source, form, columns, "a value is missing or out of range")
    if "turn" in trace.extra:
        _check_turns(source, form, trace)
    return trace


def _check_turns(source: Source, form: RowFormat, trace: Trace) -> None:
    """Raise TraceError if a turn is more than one above its session's largest earlier turn (equal ones: parallel)."""
    columns = {"at": trace.arrival_s, "turn": trace.extra["turn"], "session": trace.extra["session"]}
    rows = pl.DataFrame(columns).with_row_index("row").sort("at", "turn", maintain_order=True)
    before = pl.col("turn").cum_max().shift(1, fill_value=-1).over("session")
    most = pl.when(pl.col("session") < 0).then(0).otherwise(before + 1)  # below 0: none
    wrong = rows.with_columns(most=most).filter(pl.col("turn") > pl.col("most")).sort("row")
    if len(wrong):
        row, turn, most = wrong.select("row", "turn", "most").row(0)
        need = f"turn must be at most {most} here, one more than in the rows of its session before it"
        need = need if most else "turn must be 0 in the first row of a session, and in a row without a session"
        fault = f"{need}; it is {turn}. Number the requests of each session from 0, or take the column out"
        raise source.fault(line_of(source, form, row), fault)


def line_of(source: Source, form: RowFormat, row: int) -> int:
    """Return the line number, in the file, of the row with the index ``row``."""
    return next(islice(_lines(source, form), row, None))[0]


def _lines(source: Source, form: RowFormat) -> Iterator[tuple[int, dict[str, Any]]]:
    return source.csv_rows() if form.kind == "csv" else source.json_rows()


_MEANINGFUL = {
    *FORMATS["vidur"].extra, *FORMATS["mooncake"].extra, "delay", "wait_for", "tool_wait_ms", "previous_turn",
} - {"block_size"}  # fmt: skip
"""Columns that lengthwise reads in some format. A CSV file of a format that ignores them may not have them."""
_ELSEWHERE = (
    f"CSV files with {', '.join(FORMATS['vidur'].required)} have {', '.join(FORMATS['vidur'].extra)}, and JSONL files "
    "of Mooncake's format hash_ids, session_id, wait_for and delay. Rename the columns, or take this one out"
)
_TYPES = {
    "max_tokens": pl.Int64,
    "ignore_eos": pl.Boolean,
    "priority": pl.Int64,
    "turn": pl.Int64,
    "block_size": pl.Int64,
    "hash_ids": pl.List(pl.Int64),
}  # others are texts
_MISSING = {"session": -1, "max_tokens": UNCAPPED, "ignore_eos": False}


def _read_frame(source: Source, form: RowFormat, columns: list[str]) -> pl.DataFrame:
    types: dict[str, Any] = {form.prompt: pl.Float64, form.output: pl.Float64}
    if form.arrival in columns:
        types[form.arrival] = pl.String if form.unit_s is None else pl.Float64
    optional = form.optional(columns)
    if form.kind == "csv":
        types |= {name: _TYPES.get(name, pl.String) for name in optional}
        return pl.read_csv(source.data.rstrip(), columns=list(types), schema_overrides=types)
    first = source.first_object or {}
    texts = [name for name, what in optional.items() if what in TEXTS.values()]
    types |= {name: _TYPES.get(name, pl.String) for name in optional if name not in texts or type(first[name]) is str}
    frame = pl.read_ndjson(source.data, schema=types)
    empty = [name for name in optional if name in types and name not in _MISSING and frame[name].is_null().all()]
    return frame.drop(empty)


def _to_trace(source: Source, form: RowFormat, frame: pl.DataFrame) -> Trace | None:
    lengths = []
    for column in (form.prompt, form.output):
        values = frame[column].to_numpy()
        with np.errstate(invalid="ignore"):
            valid = (values >= form.min_tokens) & (values < 2**53) & (values == np.floor(values))
        if frame[column].null_count() or not valid.all():
            return None
        lengths.append(values.astype(np.int64))
    name, arrival_s = source.name, np.zeros(len(frame))
    if form.arrival not in frame.columns:
        name += " (lengths only: all at once)"
    elif frame[form.arrival].null_count():
        return None
    elif form.unit_s is None:
        dates_s = parse_dates(frame[form.arrival])
        if dates_s is None:
            return None
        arrival_s = dates_s
    else:
        values = frame[form.arrival].to_numpy()
        if not (np.isfinite(values) & (values >= 0)).all():
            return None
        arrival_s = (values - values[:1]) * form.unit_s
    optional = form.optional(frame.columns)
    extra = {optional[c]: _to_column(frame[c], optional[c]) for c in frame.columns if c in optional}
    if "max_tokens" not in extra:
        extra.pop("ignore_eos", None)  # of no request
    is_valid = _limits_fit(extra, lengths[1]) and not (extra.get("turn", lengths[1]) < 0).any()
    if "hash_ids" in frame.columns:
        ids = frame["hash_ids"]
        is_valid = is_valid and not ids.filter(ids.list.len() > 0).explode().null_count()
    return Trace(arrival_s, lengths[0], lengths[1], extra, name) if is_valid else None


def _limits_fit(extra: Mapping[str, npt.NDArray[Any]], output: npt.NDArray[np.int64]) -> bool:
    """Return whether outputs are at most max_tokens, and equal to it with ignore_eos."""
    cap, is_exact = extra.get("max_tokens", np.full(len(output), UNCAPPED)), extra.get("ignore_eos", False)
    return bool(((output <= cap) & (cap <= UNCAPPED) & (~np.asarray(is_exact) | (output == cap))).all())


def _to_column(series: pl.Series, name: str) -> npt.NDArray[Any]:
    if isinstance(series.dtype, pl.List):
        lengths = series.list.len().fill_null(0)
        ends = np.cumsum(lengths.to_numpy())
        flat = series.filter(lengths > 0).explode().to_numpy()
        lists = np.empty(len(series), object)
        for row, ids in enumerate(np.split(flat, ends[:-1])):
            lists[row] = ids
        return lists
    if name == "tenant":
        numbers = series.cast(pl.Int64, strict=False)
        if not numbers.null_count() and ((numbers >= 0) & (numbers < MAX_TENANTS)).all():
            return numbers.to_numpy()
        # Names are numbered in order of appearance; requests without a name are one more tenant.
        names = series.drop_nulls().unique(maintain_order=True)
        return series.replace_strict(names, range(len(names)), default=len(names), return_dtype=pl.Int64).to_numpy()
    if name == "session" and (numbers := series.cast(pl.Int64, strict=False)).cast(pl.String).equals(series):
        series = numbers
    if series.dtype in (pl.Int64, pl.Boolean):
        return series.fill_null(_MISSING.get(name, 0)).to_numpy()
    if name in TEXTS.values():
        return series.to_numpy().astype(object)
    # Many rows have few names: codes in order of appearance take less memory than texts; -1 means no name.
    names = series.drop_nulls().unique(maintain_order=True)
    codes = series.replace_strict(names, range(len(names)), default=-1, return_dtype=pl.Int64).to_numpy()
    return codes if name == "session" else np.array([*names, ""])[codes]


def _first_fault(source: Source, form: RowFormat, columns: list[str], fallback: str) -> TraceError:
    try:
        for line, cells in _lines(source, form):
            if message := row_fault(form, columns, cells):
                return source.fault(line, message)
    except TraceError as error:
        return error
    return source.fault(None, f"cannot be read as {form.name}: {fallback.splitlines()[0]}")


def row_fault(form: RowFormat, columns: list[str], cells: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a row's lengths, its optional columns or its arrival, or None.

    The arrival is not checked if ``columns`` has no arrivals.
    """
    for name in (form.prompt, form.output):
        value = _number(cells.get(name), form.kind)
        if value is None or not (form.min_tokens <= value < 2**53 and value == int(value)):
            return f"{name} must be a whole number of tokens from {form.min_tokens} up; it is {_shown(cells, name)}"
    if (fault := _column_fault(form, cells)) or form.arrival not in columns:
        return fault
    if form.unit_s is None:
        is_valid, what = is_date(cells.get(form.arrival)), "a date"
    else:
        value = _number(cells.get(form.arrival), form.kind)
        is_valid, what = value is not None and 0 <= value < np.inf, "a time from 0 up"
    return None if is_valid else f"{form.arrival} must be {what}; it is {_shown(cells, form.arrival)}"


def _column_fault(form: RowFormat, cells: Mapping[str, Any]) -> str | None:
    """Return the fault of a row's optional columns, or None."""
    for name, least in (("priority", -(2**63)), ("turn", 0)):
        if name not in form.extra or (given := cells.get(name)) in (None, ""):
            continue
        value = _number(given, form.kind)
        if value is None or value != int(value) or not least <= value < 2**63:
            return f"{name} must be a whole number{' from 0 up' if least == 0 else ''}; it is {given!r:.60}"
    if "hash_ids" in form.extra:
        ids = [] if cells.get("hash_ids") is None else cells["hash_ids"]
        if fault := hash_fault(ids, int(cells[form.prompt]), cells.get("block_size", HASHED_TOKENS)):
            return fault
    return _limit_fault(form, cells) if "max_tokens" in form.extra else None


def hash_fault(ids: Any, prompt_tokens: int, block_tokens: Any) -> str | None:
    """Return the fault of a row's hash_ids or block_size, or None."""
    if type(block_tokens) is not int or block_tokens < 1:
        return f"block_size must be a number of tokens from 1 up; it is {block_tokens!r:.60}"
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**63 for one in ids):
        return f"hash_ids must be a list of whole numbers from 0 to 2^63 - 1; it is {ids!r:.60}"
    if len(ids) > -(-prompt_tokens // block_tokens):
        return (
            f"a prompt of {prompt_tokens} tokens has at most {-(-prompt_tokens // block_tokens)} blocks of "
            f"{block_tokens} tokens (block_size in each row); it has {len(ids)} hash_ids"
        )
    return None


def _limit_fault(form: RowFormat, cells: Mapping[str, Any]) -> str | None:
    """Return the fault of a row's max_tokens or ignore_eos, or None."""
    given, output, is_exact = cells.get("max_tokens"), cells[form.output], cells.get("ignore_eos")
    if form.kind == "csv":
        output = int(float(output))
        is_exact = {"true": True, "false": False, "": False}.get(str(is_exact or ""), is_exact)
    cap = UNCAPPED if given in (None, "") else _number(given, form.kind)
    if cap is None or cap != int(cap) or not float(output) <= cap <= UNCAPPED:
        return f"max_tokens must be a whole number from {form.output} ({output}) up, or missing; it is {given!r}"
    if is_exact is not None and type(is_exact) is not bool:
        return f"ignore_eos must be true or false; it is {is_exact!r:.60}"
    if is_exact and cap != output:
        return f"with ignore_eos, {form.output} must equal max_tokens; they are {output} and {given}"
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
