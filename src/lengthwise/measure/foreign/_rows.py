"""Requests as another program told them, and Measured made of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lengthwise.measure._assemble import records_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured, TokenTimes
from lengthwise.schema.records import Records, Status
from lengthwise.schema.workload import Workload

NONE = math.nan


@dataclass(slots=True)
class Told:
    """One request, in seconds on one clock for all; NaN for what was not told.

    Attributes:
        arrival_s: When it was due, or sent where only that is known.
        prompt_tokens: As counted there.
        output_tokens: Produced.
        first_s: First token.
        last_s: Last token.
        scheduled_s: First put into a step.
        queued_s: Came to the engine's queue.
        gap_s: Times between pieces of the answer, after the first.
        wanted_tokens: Asked for, where it was told; 0: as many as came.
        failure: Of what it failed; "" where it did not.
        cut_off: Whether the end of the run, or the user, cut it off.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float = NONE
    last_s: float = NONE
    scheduled_s: float = NONE
    queued_s: float = NONE
    gap_s: Sequence[float] = ()
    wanted_tokens: int = 0
    failure: str = ""
    cut_off: bool = False

    @property
    def status(self) -> Status:
        """The bucket."""
        if self.cut_off or self.failure:
            return Status.REJECTED if self.failure.startswith("http ") else Status.UNFINISHED
        return Status.FINISHED


@dataclass
class Story:
    """All that a file tells.

    Attributes:
        source: The program.
        rows: Its requests.
        facts: JSON-able.
        doubts: What the format does not tell.
        concurrency: Of a closed loop.
    """

    source: str
    rows: list[Told]
    facts: Mapping[str, Any] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    concurrency: int | None = None


def measured_of(story: Story, name: str) -> Measured:
    """The story in order of arrival, its first request at 0.

    Raises:
        InputError: It has no requests, or one of them has lengths that cannot be.
    """
    if not story.rows:
        raise InputError("results must hold at least one request; these hold none")
    rows = sorted(story.rows, key=lambda row: row.arrival_s)
    zero_s = rows[0].arrival_s if math.isfinite(rows[0].arrival_s) else 0.0
    times = _times(rows, zero_s)
    done = [row.status == Status.FINISHED for row in rows]
    records = _records(rows, times, done, name)
    arrival_s = records.requests.arrival_s
    closed = story.concurrency is not None
    extra = {} if np.isnan(times["queued_s"]).all() else {"queued_s": times["queued_s"]}
    workload = Workload(
        arrival_s=np.zeros(len(rows)) if closed else arrival_s,
        prompt_tokens=np.array([max(1, row.prompt_tokens) for row in rows]),
        output_tokens=np.array([max(1, row.wanted_tokens or row.output_tokens) for row in rows]),
        extra=extra,
        concurrency=story.concurrency,
        name=name,
    )
    errors = Counter(row.failure for row in rows if row.failure)
    tokens = _pieces(rows, zero_s)
    return Measured(
        records, workload, story.source, dict(story.facts), tuple(_doubts(story, rows)), dict(errors), tokens
    )


def _times(rows: Sequence[Told], zero_s: float) -> dict[str, Any]:
    names = ("arrival_s", "first_s", "last_s", "scheduled_s", "queued_s")
    return {name: np.array([getattr(row, name) for row in rows], float) - zero_s for name in names}


def _records(rows: Sequence[Told], times: Mapping[str, Any], done: Sequence[bool], name: str) -> Records:
    ends = np.concatenate([times["last_s"], times["first_s"], times["arrival_s"]])
    tokens = _pieces(rows, rows[0].arrival_s)
    gaps = np.array([gap for row in rows for gap in row.gap_s], float)
    return records_of(
        arrival_s=times["arrival_s"],
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        output_tokens=np.array([row.output_tokens for row in rows]),
        status=[row.status for row in rows],
        first_token_s=times["first_s"],
        finished_s=np.where(done, times["last_s"], np.nan),
        end_s=float(np.nanmax(ends)),
        scheduled_s=times["scheduled_s"],
        tokens=tokens,
        gap_s=gaps,
        name=name,
    )


def _pieces(rows: Sequence[Told], zero_s: float) -> TokenTimes | None:
    """Times of pieces, where gaps were told; a piece is one token where they are as many."""
    if not any(len(row.gap_s) for row in rows):
        return None
    at_s: list[Any] = []
    tokens: list[Any] = []
    for row in rows:
        known = math.isfinite(row.first_s)
        pieces = len(row.gap_s) + 1 if known else 0
        at_s.append(row.first_s - zero_s + np.concatenate([[0.0], np.cumsum(row.gap_s)]) if known else [])
        tokens.append(np.full(pieces, int(pieces == row.output_tokens)))
    start = np.concatenate([[0], np.cumsum([len(part) for part in at_s])]).astype(np.int64)
    return TokenTimes(start, np.concatenate(at_s).astype(float), np.concatenate(tokens).astype(np.int64))


def _doubts(story: Story, rows: Sequence[Told]) -> list[str]:
    made = list(story.doubts)
    finished = [row for row in rows if row.status == Status.FINISHED]
    vague = sum(len(row.gap_s) > 0 and len(row.gap_s) + 1 != row.output_tokens for row in finished)
    if vague:
        made.append(
            f"in {vague:,} of {len(finished):,} answers pieces are not tokens: times between tokens (TBT) are "
            "times between pieces there"
        )
    if not any(len(row.gap_s) for row in finished):
        made.append("times between tokens are not told; nothing is known of TBT")
    if len(finished) < len(rows):
        made.append(
            f"{len(rows) - len(finished):,} of {len(rows):,} requests did not finish; latencies are of the rest"
        )
    return made
