"""Workloads: requests as columns."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MAX_TOKENS = 1e12


@dataclass(frozen=True)
class Predictions:
    """Predicted output lengths of n requests, with one row for every window of produced tokens.

    Row ``start[i] + w`` is the prediction for request ``i`` after ``w * window_tokens`` tokens; a request's last row
    holds from there on. The number of rows may depend on the true length, so only the engine looks rows up; a policy
    sees the numbers of one row.
    """

    window_tokens: int  # tokens between two predictions, at least 1
    start: Ints  # [n + 1] int64, increasing
    total_tokens: Floats  # [m] float64, predicted output length: tokens so far and to come
    # [m] float64, Gittins rank of the complete distribution, smallest first; the predicted remaining tokens if the
    # distribution is unknown.
    gittins_rank: Floats

    def __len__(self) -> int:
        return len(self.start) - 1

    def __post_init__(self) -> None:
        for column, dtype in (("start", np.int64), ("total_tokens", np.float64), ("gittins_rank", np.float64)):
            value = np.require(getattr(self, column), dtype=dtype, requirements=["C", "A"])
            object.__setattr__(self, column, value)
        if self.window_tokens < 1:
            raise InputError(f"window_tokens must be at least 1; it is {self.window_tokens}")
        start = self.start
        if len(start) < 2 or start[0] != 0 or (np.diff(start) < 1).any():
            raise InputError("start must begin at 0 and grow by at least one row a request")
        for column in ("total_tokens", "gittins_rank"):
            self._check(column, getattr(self, column))

    def _check(self, column: str, values: Floats) -> None:
        if values.shape != (self.start[-1],):
            raise InputError(f"{column} must have {self.start[-1]} rows, as start says; it has shape {values.shape}")
        good = np.isfinite(values) & (values >= 0) & (values < MAX_TOKENS)
        if not good.all():
            row = int(np.argmin(good))
            request = int(np.searchsorted(self.start, row, side="right")) - 1
            raise InputError(
                f"{column} must be finite, not negative and below 1e12; request {request} has {values[row]}"
            )

    @property
    def first_tokens(self) -> Floats:
        """Return [n] float64, the predictions before the first token."""
        return self.total_tokens[self.start[:-1]]

    def take(self, rows: npt.NDArray[np.int64]) -> Predictions:
        """Return the predictions of these requests, in the order of ``rows``."""
        lengths = np.diff(self.start)[rows]
        start = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(self.start[:-1][rows] - start[:-1], lengths) + np.arange(start[-1])
        return Predictions(self.window_tokens, start, self.total_tokens[at], self.gittins_rank[at])


MAX_TENANTS = 1_000_000


@dataclass(frozen=True)
class After:
    """Dependencies: request i is sent once all of ``parent[start[i]:start[i + 1]]`` have finished."""

    start: Ints  # [n+1] int64, from 0, not decreasing
    parent: Ints  # [m] int64, each smaller than the number of its child

    def __post_init__(self) -> None:
        for name in ("start", "parent"):
            value = np.asarray(getattr(self, name))
            _require_whole(name, value)
            object.__setattr__(self, name, np.ascontiguousarray(value, dtype=np.int64))
        start, m = self.start, len(self.parent)
        if start.ndim != 1 or len(start) < 2 or start[0] != 0 or start[-1] != m or (np.diff(start) < 0).any():
            raise InputError(
                f"after.start must go from 0 to the {m} parents without going down, one entry more than requests; "
                f"it has {len(start)} entries" + (f", from {start[0]} to {start[-1]}" if len(start) else "")
            )
        child = np.repeat(np.arange(len(start) - 1), np.diff(start))
        good = (self.parent >= 0) & (self.parent < child)
        if not good.all():
            bad = int(np.argmin(good))
            raise InputError(
                f"a parent must come before its child; request {child[bad]} has the parent {self.parent[bad]}"
            )

    def __len__(self) -> int:
        return len(self.start) - 1


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    Only the engine reads ``output_tokens``; a policy sees ``predicted_tokens``.
    """

    # [n] float64, not decreasing, from 0; in a closed loop all 0, and a request is sent when another ends.
    arrival_s: Floats
    prompt_tokens: Ints  # [n] int64, at least 1
    output_tokens: Ints  # [n] int64, at least 1
    # [n] float64 or None, predicted output length before the first token; by default the first rows of
    # ``predictions``.
    predicted_tokens: Floats | None = None
    priority: Ints | None = None  # [n] int64 or None; smaller is scheduled first
    # More columns of length n: "session", "class", "prompt", "block_ids" (object).
    extra: dict[str, Any] = field(default_factory=dict)
    concurrency: int | None = None  # requests in the system of a closed loop; None: an open loop
    name: str = ""
    predictions: Predictions | None = None  # predictions that are renewed as tokens arrive
    tenant: Ints | None = None  # [n] int64 from 0 or None; fair schedulers share capacity among tenants
    # A child is sent when its ``arrival_s`` has come and its parents have finished. None: no dependencies.
    after: After | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __post_init__(self) -> None:
        if self.predictions is not None and self.predicted_tokens is None:
            object.__setattr__(self, "predicted_tokens", self.predictions.first_tokens)
        for column, dtype in COLUMNS.items():
            value = getattr(self, column)
            if value is not None:
                if dtype is np.int64:
                    _require_whole(column, np.asarray(value))
                object.__setattr__(self, column, np.ascontiguousarray(value, dtype=dtype))
        self._check()

    def require_independent(self, owner: str) -> None:
        """Raise InputError if requests depend on others; ``owner`` names the feature that cannot use them."""
        if self.after is not None:
            raise InputError(
                f"{owner} does not support requests that depend on others (Workload.after) yet. Remove them "
                "(dataclasses.replace(workload, after=None)), or simulate"
            )

    def _check(self) -> None:
        n = len(self.arrival_s)
        if n == 0:
            raise InputError("a workload must hold at least one request; this one is empty")
        for column in COLUMNS:
            value = getattr(self, column)
            if value is not None and value.shape != (n,):
                raise InputError(f"{column} must have one value for each request ({n}); it has shape {value.shape}")
        _require(np.isfinite(self.arrival_s), self.arrival_s, "arrival_s must be finite")
        _require(self.arrival_s >= 0, self.arrival_s, "arrival_s must not be negative")
        step = np.diff(self.arrival_s, prepend=self.arrival_s[0])
        _require(step >= 0, self.arrival_s, "arrival_s must not decrease; sort the requests")
        for column in ("prompt_tokens", "output_tokens"):
            value = getattr(self, column)
            _require(value >= 1, value, f"{column} must be at least 1")
            _require(value < MAX_TOKENS, value, f"{column} must be below 1e12")
        if self.predicted_tokens is not None:
            value = self.predicted_tokens
            _require(np.isfinite(value) & (value >= 0), value, "predicted_tokens must be finite and not negative")
            _require(value < MAX_TOKENS, value, "predicted_tokens must be below 1e12")
        if self.tenant is not None:
            good = (self.tenant >= 0) & (self.tenant < MAX_TENANTS)
            _require(good, self.tenant, f"tenant must be from 0 to {MAX_TENANTS - 1}")
        for name, part, has in (("predictions", self.predictions, "they have"), ("after", self.after, "it has")):
            if part is not None and len(part) != n:
                raise InputError(f"{name} must have as many requests as the workload ({n}); {has} {len(part)}")
        if self.concurrency is not None:
            self._check_closed_loop(self.concurrency)

    def _check_closed_loop(self, concurrency: int) -> None:
        if concurrency < 1:
            raise InputError(f"concurrency must be at least 1; it is {concurrency}")
        _require(self.arrival_s == 0, self.arrival_s, "arrival_s must be 0 throughout in a closed loop")
        if self.after is not None:
            raise InputError(
                "concurrency and after exclude each other: a closed loop sends a request when any other ends"
            )


COLUMNS: dict[str, type] = {
    "arrival_s": np.float64,
    "prompt_tokens": np.int64,
    "output_tokens": np.int64,
    "predicted_tokens": np.float64,
    "priority": np.int64,
    "tenant": np.int64,
}


def _require_whole(column: str, values: npt.NDArray[Any]) -> None:
    if not np.issubdtype(values.dtype, np.integer) and values.ndim == 1 and len(values):
        numbers = values.astype(np.float64)
        _require(np.isfinite(numbers) & (numbers == np.floor(numbers)), values, f"{column} must be whole numbers")


def _require(good: npt.NDArray[np.bool_], values: npt.NDArray[Any], message: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise InputError(f"{message}; request {row} has {values[row]}")


_WORD = re.compile(r"\w+|[^\w\s]")
_DIGIT = re.compile(r"\d")

PER_BYTE, PER_WORD, PER_DIGIT = 0.060, 0.717, 1.099
"""Tokens by UTF-8 byte, by word or punctuation mark, and by digit.

Least squares of the relative error on 13,195 outputs of 35 models under Mistral's Tekken (131,072 tokens): half are
within 3.6 %, 90 % within 10 %. The bytes account for scripts without spaces."""


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text (at least 1) without a tokenizer, from its bytes, words and digits.

    Tokenizers differ by 20 % from one another, so use the engine's own counts where lengths must match.
    """
    words, digits = len(_WORD.findall(text)), len(_DIGIT.findall(text))
    tokens = PER_BYTE * len(text.encode("utf-8", "replace")) + PER_WORD * words + PER_DIGIT * digits
    return max(1, round(tokens))
