"""What was predicted of each request, and predicted again as its tokens came."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MOST_TOKENS = 1e12


@dataclass(frozen=True)
class Predictions:
    """Predicted output lengths of n requests, a row for every window of tokens that is looked at.

    Row ``start[i] + w`` holds what was predicted of request ``i`` once it had produced
    ``w * window_tokens`` tokens; the last row of a request holds from there on. How many rows a
    request has may follow its true length: the engine alone looks rows up, by tokens produced,
    and hands a policy the numbers of one row.

    Attributes:
        window_tokens: Tokens between two predictions, at least 1.
        start: [n + 1] int64, increasing; request ``i`` has rows ``start[i]`` to ``start[i + 1] - 1``.
        total_tokens: [m] float64, the predicted output length: tokens so far and those to come.
        index_tokens: [m] float64, the key of an order that knows the whole distribution (Gittins:
            smallest first); equal to the remaining tokens where nothing better is known.
    """

    window_tokens: int
    start: Ints
    total_tokens: Floats
    index_tokens: Floats

    def __len__(self) -> int:
        return len(self.start) - 1

    def __post_init__(self) -> None:
        for column, dtype in (
            ("start", np.int64),
            ("total_tokens", np.float64),
            ("index_tokens", np.float64),
        ):
            value = np.require(getattr(self, column), dtype=dtype, requirements=["C", "A"])
            object.__setattr__(self, column, value)
        if self.window_tokens < 1:
            raise InputError(f"window_tokens must be at least 1; it is {self.window_tokens}")
        start = self.start
        if len(start) < 2 or start[0] != 0 or (np.diff(start) < 1).any():
            raise InputError("start must begin at 0 and grow by at least one row a request")
        for column in ("total_tokens", "index_tokens"):
            self._check(column, getattr(self, column))

    def _check(self, column: str, values: Floats) -> None:
        if values.shape != (self.start[-1],):
            raise InputError(
                f"{column} must have {self.start[-1]} rows, as start says; it has shape {values.shape}"
            )
        good = np.isfinite(values) & (values >= 0) & (values < MOST_TOKENS)
        if not good.all():
            row = int(np.argmin(good))
            request = int(np.searchsorted(self.start, row, side="right")) - 1
            raise InputError(
                f"{column} must be finite, not negative and below 1e12; request {request} has {values[row]}"
            )

    @property
    def first_tokens(self) -> Floats:
        """[n] float64, what was predicted before the first token."""
        return self.total_tokens[self.start[:-1]]

    def take(self, rows: npt.NDArray[np.int64]) -> Predictions:
        """The predictions of some of the requests, in the order of ``rows``."""
        lengths = np.diff(self.start)[rows]
        start = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(self.start[:-1][rows] - start[:-1], lengths) + np.arange(start[-1])
        return Predictions(self.window_tokens, start, self.total_tokens[at], self.index_tokens[at])
