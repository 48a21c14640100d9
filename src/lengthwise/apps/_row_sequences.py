"""Rows and their numbers as sequences that hold no more than they must."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, overload

_PAGE = 20_000
Row = Mapping[str, Any]


class Numbered(Sequence[str]):
    """The texts of 0 .. n-1, none of them held."""

    def __init__(self, n: int) -> None:
        self._numbers = range(n)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        """One, or some."""
        return [str(i) for i in self._numbers[at]] if isinstance(at, slice) else str(self._numbers[at])


class Table(Sequence[Row]):
    """Rows of a polars frame."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def __len__(self) -> int:
        return int(self._frame.height)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        """One row, or some."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        row: Row = self._frame.row(range(len(self))[at], named=True)
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self._frame.iter_rows(named=True, buffer_size=_PAGE))


class First(Sequence[Row]):
    """The first so many of some rows."""

    def __init__(self, rows: Sequence[Row], count: int) -> None:
        self._rows, self._numbers = rows, range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        """One row, or some."""
        found = self._numbers[at]
        return [self._rows[i] for i in found] if isinstance(found, range) else self._rows[found]

    def __iter__(self) -> Iterator[Row]:
        return islice(iter(self._rows), len(self))
