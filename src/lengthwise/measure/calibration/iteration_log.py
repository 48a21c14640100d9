"""Reads the log of a real engine's steps (iterations), and finds the steps of fitted requests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.measure.calibration.measured_runs import Mask, Run, holdout_start_s
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import BENCH, Floats, Ints, Status

LINE = re.compile(
    r"(?:(?P<at>\d\d-\d\d \d\d:\d\d:\d\d)[^\n]*?)?"
    r"Iteration\((?P<index>\d+)\): (?P<prompts>\d+) context requests?, (?P<prompt_tokens>\d+) context tokens?, "
    r"(?P<decodes>\d+) generation requests?, (?P<decode_tokens>\d+) generation tokens?, "
    r"iteration elapsed time: (?P<ms>[0-9.]+) ms(?P<dummy> \(dummy\))?"
    r"(?:,.*?KV cache usage: (?P<kv>[0-9.]+)%)?"
)
"""Line of a step in vLLM (0.14 and later, checked on 0.32) with ``--enable-logging-iteration-details``."""
MIN_STEPS = 20
YEAR_S = 366 * 86400.0  # a leap year: the log states month and day alone
_TOKEN_CELLS, _KV_CELLS = 8, 4  # groups per octave: steps within 9 % and 19 % are merged


@dataclass(frozen=True)
class Iterations:
    """The [m] logged steps of an engine, or [m] groups of similar steps, each with its median seconds."""

    prefill_seqs: Floats
    prefill_tokens: Floats
    decode_seqs: Floats
    kv_share: Floats  # share of the KV cache in use; NaN: unknown
    seconds: Floats  # the engine's time around the model's run, without a part of the host's time in a step
    steps: Ints  # number of logged steps in a row
    at_s: Floats | None = None  # when the engine logged the step, by its clock, in a leap year; NaN, None: unknown

    def __len__(self) -> int:
        return len(self.seconds)

    def select(self, rows: Mask) -> Iterations:
        """Return only the steps for which ``rows`` is true."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {name: None if column is None else column[rows] for name, column in columns.items()}
        return Iterations(**taken)


def read_iterations(path: Path | str) -> Iterations:
    """Read a log of vLLM without its dummy and empty steps. Raises InputError for fewer than MIN_STEPS steps."""
    try:
        text = Path(path).read_text("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"there must be a log to read at {path}: {error.strerror}") from error
    rows = []
    for found in LINE.finditer(text):
        counts = [float(found[name]) for name in ("prompts", "prompt_tokens", "decodes")]
        if found["dummy"] or sum(counts[1:]) <= 0 or float(found["ms"]) <= 0:
            continue
        at_s, kv_share = np.nan, float(found["kv"]) / 100 if found["kv"] else np.nan
        if found["at"] is not None:
            with contextlib.suppress(ValueError):  # not a date
                at_s = second_of_year(datetime.fromisoformat(f"2000-{found['at']}"))
        rows.append((*counts, kv_share, float(found["ms"]) / 1e3, at_s))
    if len(rows) < MIN_STEPS:
        hint = "Start vLLM with --enable-logging-iteration-details, and give its complete output"
        raise InputError(f"{path} must hold {MIN_STEPS} steps or more; it holds {len(rows)}. {hint}")
    prompts, tokens, decodes, kv, seconds, times_s = np.array(rows, dtype=np.float64).T
    known_s = times_s if np.isfinite(times_s).any() else None
    return Iterations(prompts, tokens, decodes, kv, seconds, np.ones(len(rows), dtype=np.int64), known_s)


def second_of_year(at: datetime) -> float:
    """Return the seconds since the start of the year, counted as a leap year. The time zone is ignored."""
    return (at.replace(year=2000, tzinfo=None) - datetime(2000, 1, 1)).total_seconds()  # noqa: DTZ001


def merge_similar(log: Iterations) -> Iterations:
    """Merge similar steps into groups. Each group has the median of their seconds and the mean of other columns."""

    def octaves(values: Floats, cells: int) -> Floats:
        return np.where(values < 8, np.floor(values), 8 + np.round(cells * np.log2(np.maximum(values, 8) / 8)))

    tokens, seqs = octaves(log.prefill_tokens, _TOKEN_CELLS), octaves(log.decode_seqs, _TOKEN_CELLS)
    kv = octaves(np.nan_to_num(log.kv_share) * 1e4, _KV_CELLS)
    _, cell = np.unique(np.column_stack([log.prefill_seqs, tokens, seqs, kv]), axis=0, return_inverse=True)
    cell = cell.reshape(-1)
    order = np.argsort(cell, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(cell[order])) + 1)
    names = ("prefill_seqs", "prefill_tokens", "decode_seqs", "kv_share")
    columns: dict[str, Any] = {name: np.array([getattr(log, name)[rows].mean() for rows in parts]) for name in names}
    columns["seconds"] = np.array([np.median(log.seconds[rows]) for rows in parts])  # unmoved by single delayed steps
    return Iterations(**columns, steps=np.array([len(rows) for rows in parts], dtype=np.int64))


ZONES_S = 900.0 * np.array(sorted(range(-56, 57), key=abs))  # offsets of clocks from UTC, the smallest first
SECOND_S = 1.0  # resolution of a line: a step falls anywhere within the logged second
SLACK_S = 1.0  # tolerance for differing clocks of two machines, or a late line
TOKENS_TOLERANCE = 0.05  # relative difference that is tolerated between tokens of a run and those logged in its time


def utc_s(log: Iterations, runs: Sequence[Run]) -> Floats | None:
    """Return when the steps were logged ([m]), in seconds of a leap year in UTC, or None if the log fits no run.

    The log states no time zone. The chosen zone is the one in which the log's token counts agree with the most runs.
    """
    if log.at_s is None:
        return None
    known = np.isfinite(log.at_s)
    at_s, second = np.unique(log.at_s[known], return_inverse=True)
    decodes: Floats = np.bincount(second.reshape(-1), weights=log.decode_seqs[known]).astype(np.float64)

    def agrees(run: Run, at_s: Floats) -> bool:
        second_s = run_clock_s(run, at_s)
        if second_s is None:
            return False
        start_s, end_s = span_s(run)
        own = float((run.workload.output_tokens - 1).sum())
        certain = decodes[(second_s >= start_s) & (second_s + SECOND_S <= end_s)].sum()
        possible = decodes[may_overlap(second_s, start_s - SLACK_S, end_s + SLACK_S)].sum()
        low, high = own * (1 - TOKENS_TOLERANCE), own * (1 + TOKENS_TOLERANCE)
        return bool(own > 0 and own / 2 <= certain <= high and possible >= low)

    agreeing = [sum(agrees(run, at_s - zone_s) for run in runs) for zone_s in ZONES_S]
    best = int(np.argmax(agreeing))
    return log.at_s - ZONES_S[best] if agreeing[best] else None


def run_clock_s(run: Run, at_s: Floats) -> Floats | None:
    """Convert UTC seconds of a year ([m]) to the records' clock, or return None if the run's start is unknown."""
    if run.measured.source != BENCH:
        return None
    try:
        started = datetime.fromisoformat(run.measured.metadata["start"])
    except (KeyError, TypeError, ValueError):
        return None
    if started.tzinfo is None:
        return None
    elapsed_s = at_s - second_of_year(started.astimezone(UTC))
    return np.asarray((elapsed_s + YEAR_S / 2) % YEAR_S - YEAR_S / 2)


def span_s(run: Run) -> tuple[float, float]:
    """Return when the first request of a run was due and when the run finished, by the records' clock."""
    return float(np.nanmin(run.measured.records.requests.arrival_s)), run.measured.records.end_s


def may_overlap(second_s: Floats, start_s: float, end_s: float) -> Mask:
    """Return whether steps logged in the second from ``second_s`` ([m]) may lie between ``start_s`` and ``end_s``."""
    return np.asarray((second_s + SECOND_S > start_s) & (second_s < end_s))


MIN_SECONDS_SHARE = 0.2  # share of the time between tokens that logged seconds must reach; 4 layers on a CPU reach half


def implausible_seconds(log: Iterations, runs: Sequence[Run]) -> str:
    """Return a reason why the logged seconds are too short for the times between tokens, or "" if they are not."""
    decodes = log.decode_seqs * log.steps
    step_s = float((decodes * log.seconds).sum() / decodes.sum()) if decodes.sum() > 0 else np.inf
    duration_s = tokens = 0.0
    for run in runs:
        r = run.measured.records.requests
        own = run.fit & (r.status == Status.FINISHED) & (r.output_tokens > 1)
        duration_s += float((r.finished_s - r.first_token_s)[own].sum())
        tokens += float((r.output_tokens - 1)[own].sum())
    between_s = duration_s / tokens if tokens and np.isfinite(duration_s) else 0.0
    if not step_s < MIN_SECONDS_SHARE * between_s:
        return ""
    return (
        f"a decode step takes {1e3 * step_s:.3g} ms by the log, but the requests' tokens came {1e3 * between_s:.3g} ms "
        "apart. vLLM's clock starts after the scheduler hands over a step; if the model runs in the scheduler's own "
        "process, the step is computed before that. Start vLLM with --distributed-executor-backend mp for such runs, "
        "or record its counters (`lengthwise bench --scrape`)"
    )


def fitted_steps(log: Iterations, runs: Sequence[Run]) -> Mask | None:
    """Return whether each step certainly is of fitted requests ([m]), or None if tokens and times do not show it."""
    if (log.steps != 1).any():  # groups of merged steps belong to no run
        return None
    at_s = utc_s(log, runs)
    found, known = np.zeros(len(log), dtype=np.bool_), at_s is not None
    for run in runs:
        if not run.fit.any() or run.workload.prefixes is not None:  # a step of cached prompts does not show its context
            continue
        own = _token_ranges(log, run, runs, at_s)
        known = known or bool(own)
        for first, last in own:
            count = last - first
            if run.validation.any():
                decoded = np.cumsum(log.decode_seqs[first:last])
                count = int(np.searchsorted(decoded, _min_decoded_tokens(run, holdout_start_s(run)), side="left"))
            found[first : first + count] = True
        if not own and at_s is not None:
            found |= _steps_by_clock(run, runs, at_s)
    return found if known else None


def _token_ranges(log: Iterations, run: Run, runs: Sequence[Run], at_s: Floats | None) -> list[tuple[int, int]]:
    """Return the ranges of indices of the steps that belong to a run, found by the run's numbers of tokens.

    Repeats of a run have equal numbers. Without times, their ranges are returned together, if none of them has held-out
    requests. The result is [] if the steps are ambiguous.
    """
    ranges, repeats = _matching_ranges(log, run), [other for other in runs if _token_sums(other) == _token_sums(run)]
    second_s = None if at_s is None else run_clock_s(run, at_s)
    if second_s is not None:
        near = may_overlap(second_s, span_s(run)[0] - SLACK_S, span_s(run)[1] + SLACK_S)
        ranges, repeats = [(a, b) for a, b in ranges if near[a] and near[b - 1]], [run]
    if len(ranges) == len(repeats) == 1:
        return ranges
    disjoint = all(b <= c for (_, b), (c, _) in pairwise(ranges))
    fitted = not any(other.validation.any() for other in repeats)
    return ranges if disjoint and fitted and len(ranges) <= len(repeats) else []


def _matching_ranges(log: Iterations, run: Run) -> list[tuple[int, int]]:
    """Return all ranges of steps between two idle moments that compute the same number of tokens as the run."""
    r = run.measured.records.requests
    if not (r.status[np.isfinite(r.arrival_s)] == Status.FINISHED).all():
        return []
    prompts, decodes = _token_sums(run)
    idle = np.append(np.flatnonzero((log.decode_seqs == 0) & (log.prefill_seqs > 0)), len(log))
    counts = (np.round(tokens).astype(np.int64) for tokens in (log.prefill_tokens, log.decode_seqs))
    computed, decoded = (np.concatenate([[0], np.cumsum(tokens)])[idle] for tokens in counts)
    radix = decoded[-1] + decodes + 1  # both sums in one sortable number
    sums = computed * radix + decoded
    target = sums + prompts * radix + decodes
    at = np.minimum(np.searchsorted(sums, target), len(idle) - 1)
    found = [(int(idle[a]), int(idle[at[a]])) for a in np.flatnonzero(sums[at] == target)]
    if len(found) > 1:  # a long prompt's next chunk without decodes looks like a start, too
        found = [(a, b) for a, b in found if a == 0 or log.decode_seqs[a - 1] > 0]
    return found


def _token_sums(run: Run) -> tuple[int, int]:
    return int(run.workload.prompt_tokens.sum()), int((run.workload.output_tokens - 1).sum())


def _min_decoded_tokens(run: Run, at_s: float) -> int:
    r, tokens = run.measured.records.requests, run.measured.tokens
    if tokens is not None and len(tokens.at_s) and tokens.tokens.min() >= 1:
        return int(tokens.tokens[tokens.at_s <= at_s].sum() - (r.first_token_s <= at_s).sum())
    return int((r.output_tokens[r.finished_s <= at_s] - 1).sum())


def _steps_by_clock(run: Run, runs: Sequence[Run], at_s: Floats) -> Mask:
    """Return for each step ([m]) whether it was logged during the run, while held-out requests surely did not run."""
    own_s = run_clock_s(run, at_s)
    if own_s is None:
        return np.zeros(len(at_s), dtype=np.bool_)
    start_s, end_s = span_s(run)
    found = may_overlap(own_s, start_s, end_s + SLACK_S)
    for other in runs:
        second_s = run_clock_s(other, at_s) if other.validation.any() else None
        if second_s is not None:
            start_s, end_s = span_s(other)
            found &= ~may_overlap(second_s, max(start_s, holdout_start_s(other)) - SLACK_S, end_s + SLACK_S)
    return found
