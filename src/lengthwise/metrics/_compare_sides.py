"""The requests of two runs that are compared, and the values that they have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.metrics._compare_result import ClientSeconds, Side
from lengthwise.metrics.columns import request_column
from lengthwise.metrics.summarize import Window, common, counts_of, rows_of, window_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured
from lengthwise.schema.records import Records, RequestRecords, TokenGaps
from lengthwise.schema.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SAME_SHARE, _SAME_S = 1e-3, 5e-3
"""Arrivals are the same within a thousandth of the run, or 5 ms."""


@dataclass(frozen=True)
class Run:
    """One side: its records, and the requests that count."""

    measured: Measured
    rows: Window

    @property
    def records(self) -> Records:
        """All that was left behind."""
        return self.measured.records

    @property
    def requests(self) -> RequestRecords:
        """The requests that count."""
        return rows_of(self.records.requests, self.rows)

    @property
    def places(self) -> Ints:
        """[all requests] the row of each among those that count; -1 where it does not."""
        places = np.full(len(self.records.requests.arrival_s), -1)
        places[self.rows] = np.arange(len(places[self.rows]))
        return places

    @property
    def warmed_up(self) -> bool:
        """Whether requests were left out that came before those that count."""
        return bool(self.start_s > np.nanmin(self.records.requests.arrival_s))

    @property
    def start_s(self) -> float:
        """When the first of them arrived."""
        return float(self.requests.arrival_s.min())

    def column(self, metric: str) -> Floats:
        """[rows] seconds; NaN where something never came."""
        values: Floats = request_column(self.requests, f"{metric}_s")
        return values

    def side(self, fallback: str) -> Side:
        """Its facts."""
        name = self.records.name or fallback
        span_s = self.records.end_s - self.start_s
        return Side(name, self.measured.source, counts_of(self.requests), span_s, self._client())

    def _client(self) -> ClientSeconds | None:
        told = self.measured.client_s
        known = np.zeros(0) if told is None else told[self.rows][np.isfinite(told[self.rows])]
        if not len(known):
            return None
        return ClientSeconds(float(known.mean()), float(np.median(known)), float(known.max()))


def runs_of(a: Measured, b: Measured, paired: bool, warmup_s: float) -> tuple[Run, Run]:
    """Both runs without their warm-up; paired ones have the same rows."""
    windows = [window_of(side.records, warmup_s, 0) for side in (a, b)]
    if paired:
        both = common(*windows)
        if not len(rows_of(a.records.requests, both).arrival_s):
            raise InputError(
                f"both runs must have requests in common after the warm-up; with warmup_s {warmup_s:g} they have none"
            )
        windows = [both, both]
    return Run(a, windows[0]), Run(b, windows[1])


def are_same(a: Workload, b: Workload) -> bool:
    """Whether both are of the same requests at the same times."""
    return are_same_lengths(a, b) and are_same_times(a, b)


def are_same_lengths(a: Workload, b: Workload) -> bool:
    """Whether prompts and outputs, request by request, are as long in both."""
    alike = len(a) == len(b) and a.concurrency == b.concurrency
    return alike and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("prompt_tokens", "output_tokens")
    )


def are_same_times(a: Workload, b: Workload) -> bool:
    """Whether requests arrive at the same times, from the first one on."""
    ours, theirs = (w.arrival_s - w.arrival_s[0] for w in (a, b))
    span_s = float(max(ours[-1], theirs[-1]))
    return bool(np.abs(ours - theirs).max() <= max(_SAME_SHARE * span_s, _SAME_S))


def gaps_as_columns(gaps: TokenGaps) -> tuple[Floats, Ints]:
    """Times between tokens, ascending, and how often each was seen."""
    if gaps.gap_s is not None and gaps.count is not None:
        values, count = gaps.gap_s, gaps.count
    else:
        middle = (gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2
        values, count = np.minimum(middle, gaps.max_s), gaps.histogram
    used = count > 0
    return values[used], count[used]
