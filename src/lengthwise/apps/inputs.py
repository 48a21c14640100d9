"""The rows that an application works on: JSONL, CSV and Parquet, each row a mapping of fields."""

from __future__ import annotations

import csv
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, overload

from lengthwise.apps._row_sequences import First, Numbered, Row, Table
from lengthwise.schema.errors import InputError, UnknownNameError

FORMS = (".jsonl", ".csv", ".parquet")
_PAGE = 20_000
_WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"


@dataclass(frozen=True, eq=False)
class Rows:
    """What an application is run on.

    Attributes:
        ids: What tells rows apart: a field's values, or their numbers from 0.
        rows: Their fields.
        source: The file.
        sha256: Of its bytes, in hex; of some of its rows, also of how many.
    """

    ids: Sequence[str]
    rows: Sequence[Row]
    source: str = ""
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, count: int) -> Rows:
        """The first so many of them, or all where there are no more."""
        if count >= len(self):
            return self
        digest = hashlib.sha256(f"the first {count} of {self.sha256}".encode()).hexdigest()
        return Rows(self.ids[:count], First(self.rows, count), self.source, digest)


def read_rows(
    path: Path | str, id_field: str | None = None, check: Callable[[Row], None] | None = None
) -> Rows:
    """The rows of a file, all looked at once; JSONL stays on disk and is read again where it is needed.

    Of CSV, columns of whole numbers are numbers and all else is text as it stands, an empty one none.

    Args:
        path: A .jsonl, .csv or .parquet file.
        id_field: The field that tells rows apart: texts or whole numbers, each once. None: they are numbered.
        check: Raises InputError where a row is no good.

    Raises:
        InputError: The file cannot be read, or a row is none; with its line.
    """
    path = Path(path).expanduser()
    suffix = path.suffix.lower()
    if suffix not in FORMS:
        raise InputError(f"inputs must be a file that ends in {', '.join(FORMS)}; {path} came")
    if not path.is_file():
        raise InputError(f"there is no file of inputs {path}; name one that ends in {', '.join(FORMS)}")
    try:
        told = _Ids(str(path), id_field, check)
        rows = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}[suffix](path, told)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not len(rows):
        raise InputError(f"{path} must have at least one row; it has none")
    return Rows(told.ids if id_field else Numbered(len(rows)), rows, str(path), digest)


@dataclass
class _Ids:
    """Collects what tells rows apart, and refuses what does not."""

    source: str
    name: str | None
    check: Callable[[Row], None] | None = None
    ids: list[str] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def looks(self) -> bool:
        """Whether rows are looked at."""
        return self.name is not None or self.check is not None

    def add(self, row: Row, line: int) -> None:
        try:
            if self.check is not None:
                self.check(row)
        except InputError as error:
            raise InputError(f"{self.source}, line {line}: {error}") from None
        if self.name is not None:
            self._tell(row, line, self.name)

    def _tell(self, row: Row, line: int, name: str) -> None:
        if name not in row:
            problem = UnknownNameError("field for the id", name, row)
            raise InputError(f"{self.source}, line {line}: {problem}")
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise InputError(
                f"{self.source}, line {line}: an id must be a text or a whole number; "
                f"{name} is {value!r}. Take another field, or none to number rows"
            )
        text = str(value)
        first = self.seen.setdefault(text, line)
        if first != line:
            raise InputError(
                f"{self.source}, line {line}: every id must be there once; {text!r} is also in line {first}"
            )
        self.ids.append(text)


class Lines(Sequence[Row]):
    """Rows of a JSONL file that stay there, found by where their lines begin."""

    def __init__(self, path: Path, starts: array[int]) -> None:
        self._path, self._starts = path, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        """One row, or some."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        with self._path.open("rb") as file:
            file.seek(self._starts[at])
            return self._row(file.read(self._starts[at + 1] - self._starts[at]))

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            for text in file:
                if text.strip():
                    yield self._row(text)

    def _row(self, text: bytes) -> Row:
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{self._path} must stay as it is while it is worked on; it has changed")
        return row


def _jsonl(path: Path, ids: _Ids) -> Lines:
    starts, at = array("q"), 0
    with path.open("rb") as file:
        for line, text in enumerate(file, 1):
            if text.strip():
                ids.add(_object(text, path, line), line)
                starts.append(at)
            at += len(text)
    starts.append(at)
    return Lines(path, starts)


def _object(text: bytes, path: Path, line: int) -> Row:
    try:
        row = json.loads(text)
    except UnicodeDecodeError:
        raise InputError(f"{path}, line {line}: must be UTF-8 text; byte {text[:20]!r}... is not") from None
    except ValueError as error:
        raise InputError(f"{path}, line {line}: must be a JSON object; {error}") from None
    if not isinstance(row, dict):
        raise InputError(
            f'{path}, line {line}: must be a JSON object such as {{"question": "..."}}; it is a {type(row).__name__}'
        )
    return row


def _csv(path: Path, ids: _Ids) -> Table:
    import polars as pl

    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = _header(path, next(reader, []))
            schema = dict.fromkeys(names, pl.String)
            values = _checked(path, reader, names, ids)
            pages = [
                pl.DataFrame(page, schema=schema, orient="row")
                for page in iter(lambda: list(islice(values, _PAGE)), [])
            ]
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: must be CSV; {error}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: must be UTF-8 text; {error.reason} at byte {error.start}") from None
    frame = pl.concat(pages) if pages else pl.DataFrame(schema=schema)
    whole = [name for name in names if _is_whole(frame[name])]
    return Table(frame.with_columns(pl.col(name).cast(pl.Int64) for name in whole))


def _header(path: Path, names: list[str]) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice or not all(names):
        raise InputError(
            f"{path}, line 1: must be a header that names every column once; it is {','.join(names) or 'empty'!r}"
        )
    return names


def _checked(path: Path, reader: Any, names: list[str], ids: _Ids) -> Iterator[list[str | None]]:
    """Rows with as many values as there are columns; empty lines are left out."""
    for values in reader:
        if not values:
            continue
        if len(values) != len(names):
            raise InputError(
                f"{path}, line {reader.line_num}: must have {len(names)} values as the header does; it has "
                f'{len(values)}. Put texts with commas between "..."'
            )
        if ids.looks:
            ids.add(dict(zip(names, values, strict=True)), reader.line_num)
        yield [value or None for value in values]


def _is_whole(column: Any) -> bool:
    """Whether all of it are whole numbers as Python writes them, so that none loses zeros that it begins with."""
    there = column.drop_nulls()
    return bool(len(there)) and bool(there.str.contains(_WHOLE).all())


def _parquet(path: Path, ids: _Ids) -> Table:
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        frame = pl.read_parquet(path)
    except PolarsError as error:
        raise InputError(f"{path} must be Parquet; {str(error).splitlines()[0]}") from None
    if ids.looks:
        for line, row in enumerate(frame.iter_rows(named=True, buffer_size=_PAGE), 1):
            ids.add(row, line)
    return Table(frame)


__all__ = ["FORMS", "Row", "Rows", "read_rows"]
