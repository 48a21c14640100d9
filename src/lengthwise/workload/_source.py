"""A trace file in memory: its bytes, its lines, and errors that name it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lengthwise.schema.errors import TraceError

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
            raise TraceError(
                f"{path}: the gzip file is cut off or damaged ({error}); fetch it again"
            ) from error
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
