"""Defines workloads: requests as columns, their dependencies, shared prefixes and predictions."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MAX_TOKENS = 1e12  # exclusive upper limit of all lengths and predictions, in tokens
UNCAPPED = 10**12  # ``Workload.max_tokens`` of a request whose client sets no limit


@dataclass(frozen=True)
class Predictions:
    """Predicted output lengths of n requests, with a new prediction after every ``window_tokens`` output tokens.

    Row ``start[i] + w`` is the prediction for request ``i`` after ``w * window_tokens`` tokens; the last row of a
    request also applies later. The number of rows may reveal the true length, so the engine looks up the row and gives
    a policy only the numbers in it.
    """

    window_tokens: int  # tokens between two predictions, at least 1
    start: Ints  # [n + 1] int64, from 0, increasing
    total_tokens: Floats  # [m] float64, predicted length of the complete output, at least 0
    # [m] float64, Gittins rank of the predicted distribution; without a distribution the predicted remaining tokens.
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
        """Return the output lengths predicted before the first token, [n] float64."""
        return self.total_tokens[self.start[:-1]]

    def take(self, rows: npt.NDArray[np.int64]) -> Predictions:
        """Return the predictions for the requests ``rows``, in this order."""
        start, at = _rows_of(self.start, rows)
        return Predictions(self.window_tokens, start, self.total_tokens[at], self.gittins_rank[at])


MAX_TENANTS = 1_000_000


@dataclass(frozen=True)
class After:
    """Dependencies: request i is sent ``delay_s[i]`` seconds after the last of its parents has finished.

    The parents are the requests ``parent[start[i]:start[i + 1]]``. A request without parents is sent at its arrival.
    """

    start: Ints  # [n + 1] int64, from 0, not decreasing
    parent: Ints  # [m] int64, each smaller than the number of its child
    delay_s: Floats | None = None  # [n] float64, at least 0: a user thinks, a tool works; None: all 0

    def __post_init__(self) -> None:
        for name in ("start", "parent"):
            value = np.asarray(getattr(self, name))
            _require_whole(name, value)
            object.__setattr__(self, name, np.ascontiguousarray(value, dtype=np.int64))
        start, m = self.start, len(self.parent)
        delay_s = np.ascontiguousarray(np.zeros(len(start) - 1) if self.delay_s is None else self.delay_s, np.float64)
        object.__setattr__(self, "delay_s", delay_s)
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
        if delay_s.shape != (len(start) - 1,):
            raise InputError(f"after.delay_s must have one value a request ({len(start) - 1}); it has {len(delay_s)}")
        good = np.isfinite(delay_s) & (delay_s >= 0)
        _require(good, delay_s, "after.delay_s must be finite and not negative")

    def __len__(self) -> int:
        return len(self.start) - 1

    def take(self, rows: Ints) -> After:
        """Return the dependencies among the requests ``rows``. Raises InputError if a parent is not among them."""
        start, at = _rows_of(self.start, rows)
        child = np.repeat(np.asarray(rows), np.diff(start))
        assert self.delay_s is not None
        return After(start, _renumbered(len(self), rows, self.parent[at], child), self.delay_s[rows])


@dataclass(frozen=True)
class SharedPrefixes:
    """Prompts that begin with the same tokens.

    Prompt i begins with blocks of ``block_tokens`` tokens, and ``block_ids[start[i] : start[i + 1]]`` identifies their
    contents. Two prompts share the blocks of the longest common prefix of their ids. A block that a prompt fills only
    in part is not shared. A later turn of a session has no ids: its prompt begins with the prompt and the output of the
    request ``previous_turn``. All other tokens occur in one request only.
    """

    block_tokens: int  # tokens of a block, at least 1
    start: Ints  # [n + 1] int64, from 0, not decreasing
    block_ids: Ints  # [m] int64, at least 0; equal ids are equal contents
    previous_turn: Ints | None = None  # [n] int64, number of an earlier request, or -1: none; None: all -1

    def __post_init__(self) -> None:
        n = len(self.start) - 1
        turns = np.full(n, -1) if self.previous_turn is None else self.previous_turn
        object.__setattr__(self, "previous_turn", turns)
        for name in ("start", "block_ids", "previous_turn"):
            value = np.asarray(getattr(self, name))
            _require_whole(f"prefixes.{name}", value)
            object.__setattr__(self, name, np.ascontiguousarray(value, dtype=np.int64))
        if self.block_tokens < 1:
            raise InputError(f"prefixes.block_tokens must be at least 1; it is {self.block_tokens}")
        start, ids = self.start, self.block_ids
        if n < 1 or start[0] != 0 or start[-1] != len(ids) or (np.diff(start) < 0).any():
            raise InputError(f"prefixes.start must go from 0 to the {len(ids)} block_ids without going down")
        _require(ids >= 0, ids, "prefixes.block_ids must be at least 0")
        turns = self.turns
        if turns.shape != (n,):
            raise InputError(f"prefixes.previous_turn must have one value for each request ({n}); it has {len(turns)}")
        _require((turns >= -1) & (turns < np.arange(n)), turns, "a previous turn must come before its request")
        both = (turns >= 0) & (np.diff(start) > 0)
        _require(~both, turns, "a request has either block_ids or a previous turn, not both")

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def turns(self) -> Ints:
        """Return the number of the request that each prompt continues, or -1, [n] int64."""
        assert self.previous_turn is not None
        return self.previous_turn

    def take(self, rows: Ints) -> SharedPrefixes:
        """Return the prefixes of the requests ``rows``. Raises InputError if a previous turn is not among them."""
        start, at = _rows_of(self.start, rows)
        turns = self.turns[rows].copy()
        later = np.flatnonzero(turns >= 0)
        turns[later] = _renumbered(len(self), rows, turns[later], np.asarray(rows)[later])
        return SharedPrefixes(self.block_tokens, start, self.block_ids[at], turns)

    def within(self, prompt_tokens: Ints) -> SharedPrefixes:
        """Return the shared prefixes after the prompts are shortened to ``prompt_tokens`` [n]."""
        blocks = -(-np.asarray(prompt_tokens) // self.block_tokens)
        place = np.arange(len(self.block_ids)) - np.repeat(self.start[:-1], np.diff(self.start))
        start = np.concatenate([[0], np.cumsum(np.minimum(np.diff(self.start), blocks))])
        ids = self.block_ids[place < np.repeat(blocks, np.diff(self.start))]
        return SharedPrefixes(self.block_tokens, start, ids, self.turns)


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    Only the engine reads ``output_tokens``. A policy sees ``predicted_tokens``.
    """

    # [n] float64, at least 0, not decreasing. In a closed loop all are 0, and a request is sent when another one ends.
    arrival_s: Floats
    prompt_tokens: Ints  # [n] int64, at least 1
    output_tokens: Ints  # [n] int64, at least 1
    # [n] float64 or None, predicted output lengths before the first token; default: ``predictions.first_tokens``.
    predicted_tokens: Floats | None = None
    priority: Ints | None = None  # [n] int64 or None; smaller is scheduled first
    extra: dict[str, Any] = field(default_factory=dict)  # more columns [n]: "session", "turn", "class", "prompt"
    concurrency: int | None = None  # of a closed loop: number of requests in the system; None: an open loop
    name: str = ""
    predictions: Predictions | None = None  # predictions that are renewed as tokens arrive
    tenant: Ints | None = None  # [n] int64 from 0 or None; fair schedulers share capacity among tenants
    after: After | None = None  # a child is sent no earlier than its ``arrival_s``; None: no dependencies
    prefixes: SharedPrefixes | None = None  # None: no two prompts begin alike
    # [n] int64 or None, the client's limit of the output: at least ``output_tokens``; UNCAPPED: it sets none.
    max_tokens: Ints | None = None
    ignore_eos: npt.NDArray[np.bool_] | None = None  # [n] or None; where true, an output has exactly ``max_tokens``

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

    @property
    def session_starts_s(self) -> Floats:
        """Return the arrivals of the requests without parents, at which sessions or single requests start."""
        return self.arrival_s if self.after is None else self.arrival_s[np.diff(self.after.start) == 0]

    def earliest_s(self, jct_s: float = 0.0) -> Floats:
        """Return the time at which each request would be sent if every JCT were ``jct_s``, [n] float64."""
        sent_s, after = self.arrival_s.copy(), self.after
        if after is not None:
            assert after.delay_s is not None
            for i in np.flatnonzero(np.diff(after.start)):
                parents = after.parent[after.start[i] : after.start[i + 1]]
                sent_s[i] = max(sent_s[i], sent_s[parents].max() + jct_s + after.delay_s[i])
        return sent_s

    @property
    def previous_turn(self) -> Ints:
        """Return the number of each request's predecessor in its session, or -1, [n] int64.

        The predecessor is the request that the prompt continues (``prefixes``) or, without one, the last earlier
        request with the same value in the column "session" of ``extra``. A negative value there means no session.
        """
        before = np.full(len(self), -1)
        if "session" in self.extra:
            session = np.unique(self.extra["session"], return_inverse=True)[1].reshape(-1)
            order = np.argsort(session, kind="stable")
            same = np.diff(session[order]) == 0
            if np.issubdtype(np.asarray(self.extra["session"]).dtype, np.number):
                same &= np.asarray(self.extra["session"])[order][1:] >= 0
            before[order[1:][same]] = order[:-1][same]
        return before if self.prefixes is None else np.where(self.prefixes.turns >= 0, self.prefixes.turns, before)

    def take(self, rows: Ints, arrival_s: Floats | None = None) -> Workload:
        """Return the workload of the requests ``rows``, in this order; ``arrival_s`` replaces their arrivals.

        Raises InputError if a request depends on one that is not among them.
        """
        rows = np.asarray(rows, np.int64)
        columns = {name: value[rows] for name in COLUMNS if (value := getattr(self, name)) is not None}
        if arrival_s is not None:
            columns["arrival_s"] = arrival_s
        parts = {name: part.take(rows) for name in PARTS if (part := getattr(self, name)) is not None}
        return replace(self, **columns, **parts, extra={name: values[rows] for name, values in self.extra.items()})

    def with_arrivals(self, arrival_s: Floats) -> Workload:
        """Return the requests with other arrivals. The copy shares all other columns, which are not checked again."""
        made = copy(self)
        object.__setattr__(made, "arrival_s", np.ascontiguousarray(arrival_s, np.float64))
        _require_arrivals(made.arrival_s)
        return made

    def without_dependencies(self) -> Workload:
        """Return the workload without ``after`` and ``previous_turn``: every request is sent at its arrival."""
        prefixes = self.prefixes and SharedPrefixes(
            self.prefixes.block_tokens, self.prefixes.start, self.prefixes.block_ids
        )
        return replace(self, after=None, prefixes=prefixes)

    def require_independent(self, owner: str) -> None:
        """Raise InputError if requests depend on others. ``owner`` names the feature that does not support that."""
        if self.after is not None:
            raise InputError(
                f"{owner} does not support requests that depend on others (Workload.after) yet. Remove them "
                "(workload.without_dependencies()), or simulate"
            )

    def _check(self) -> None:
        n = len(self.arrival_s)
        if n == 0:
            raise InputError("a workload must hold at least one request; this one is empty")
        for column in COLUMNS:
            value = getattr(self, column)
            if value is not None and value.shape != (n,):
                raise InputError(f"{column} must have one value for each request ({n}); it has shape {value.shape}")
        _require_arrivals(self.arrival_s)
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
        self._check_max_tokens()
        for name in PARTS:
            part = getattr(self, name)
            if part is not None and len(part) != n:
                raise InputError(f"{name} must have as many requests as the workload ({n}), not {len(part)}")
        self._check_prefixes()
        if self.concurrency is not None:
            self._check_closed_loop(self.concurrency)

    def _check_max_tokens(self) -> None:
        cap, output = self.max_tokens, self.output_tokens
        if cap is not None:
            self._require_cap(
                output <= cap, "max_tokens must be at least output_tokens, as an engine ends an output there"
            )
            _require(cap <= UNCAPPED, cap, f"max_tokens must be at most {UNCAPPED} (no limit)")
        if self.ignore_eos is None:
            return
        if cap is None:
            raise InputError("ignore_eos needs max_tokens, where outputs then end; give max_tokens, or leave it out")
        exact = ~self.ignore_eos | (output == cap)
        self._require_cap(
            exact, "with ignore_eos, output_tokens must equal max_tokens, as no other token ends an output"
        )

    def _require_cap(self, good: npt.NDArray[np.bool_], message: str) -> None:
        if not good.all():
            i = int(np.argmin(good))
            assert self.max_tokens is not None
            raise InputError(
                f"{message}; request {i} has {self.output_tokens[i]} output tokens and max_tokens {self.max_tokens[i]}"
            )

    def _check_prefixes(self) -> None:
        prefixes = self.prefixes
        if prefixes is None:
            return
        turns = prefixes.turns
        later = np.flatnonzero(turns >= 0)
        before = np.zeros(len(self), np.int64)
        before[later] = (self.prompt_tokens + self.output_tokens)[turns[later]]
        short = "the prompt of a later turn must hold the prompt and the output of the turn before it"
        _require(self.prompt_tokens > before, self.prompt_tokens, f"{short} and at least one new token")
        most = -(-self.prompt_tokens // prefixes.block_tokens)
        ids = np.diff(prefixes.start)
        _require(
            ids <= most, ids, f"a prompt may have as many block_ids as it has blocks of {prefixes.block_tokens} tokens"
        )
        waits = np.zeros(0, np.int64)
        if self.after is not None:
            waits = np.repeat(np.arange(len(self)), np.diff(self.after.start)) * len(self) + self.after.parent
        missing = ~np.isin(later * len(self) + turns[later], waits)
        if missing.any():
            i = int(later[np.argmax(missing)])
            raise InputError(
                f"a later turn must wait for the turn before it; Workload.after does not give request {i} the parent "
                f"{turns[i]}"
            )

    def _check_closed_loop(self, concurrency: int) -> None:
        if concurrency < 1:
            raise InputError(f"concurrency must be at least 1; it is {concurrency}")
        _require(self.arrival_s == 0, self.arrival_s, "arrival_s must be 0 throughout in a closed loop")
        if self.after is not None:
            raise InputError(
                "concurrency and after exclude each other: a closed loop sends a request when any other ends"
            )


def _require_arrivals(arrival_s: Floats) -> None:
    _require(np.isfinite(arrival_s), arrival_s, "arrival_s must be finite")
    _require(arrival_s >= 0, arrival_s, "arrival_s must not be negative")
    step = np.diff(arrival_s, prepend=arrival_s[0])
    _require(step >= 0, arrival_s, "arrival_s must not decrease; sort the requests")


COLUMNS: dict[str, type] = {
    "arrival_s": np.float64,
    "prompt_tokens": np.int64,
    "output_tokens": np.int64,
    "predicted_tokens": np.float64,
    "priority": np.int64,
    "tenant": np.int64,
    "max_tokens": np.int64,
    "ignore_eos": np.bool_,
}
PARTS = ("predictions", "after", "prefixes")  # optional records that have several rows for a request


def _rows_of(start: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the starts of the lists ``rows`` when concatenated, and the old indices of their items."""
    counts = np.diff(start)[rows]
    new = np.concatenate([[0], np.cumsum(counts)])
    return new, np.repeat(start[:-1][rows] - new[:-1], counts) + np.arange(new[-1])


def _renumbered(n: int, rows: Ints, required: Ints, owner: Ints) -> Ints:
    """Return the places in ``rows`` of the requests ``required``; ``owner[k]`` is the request that needs each."""
    place = np.full(n, -1)
    place[rows] = np.arange(len(rows))
    missing = place[required] < 0
    if missing.any():
        i = int(np.argmax(missing))
        raise InputError(
            f"request {owner[i]} depends on request {required[i]}, which is left out; take complete sessions, or the "
            "first requests"
        )
    return place[required]


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

The coefficients minimize the squared relative error on 13,195 outputs of 35 models under Mistral's tokenizer Tekken
(131,072 tokens): half of the estimates are within 3.6 %, 90 % within 10 %. The bytes account for scripts without
spaces."""


def estimated_tokens(text: str) -> int:
    """Estimate the number of tokens of a text (at least 1) without a tokenizer, from its bytes, words and digits.

    Tokenizers differ by 20 % from one another, so use the engine's own counts where lengths must match.
    """
    words, digits = len(_WORD.findall(text)), len(_DIGIT.findall(text))
    tokens = PER_BYTE * len(text.encode("utf-8", "replace")) + PER_WORD * words + PER_DIGIT * digits
    return max(1, round(tokens))
