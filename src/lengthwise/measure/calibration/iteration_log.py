"""Steps of a real engine, from its log of iterations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibration.measured_runs import Run, until_s
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import BENCH, Status

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LINE = re.compile(
    r"(?:(?P<at>\d\d-\d\d \d\d:\d\d:\d\d)[^\n]*?)?"
    r"Iteration\((?P<index>\d+)\): (?P<prompts>\d+) context requests?, (?P<prompt_tokens>\d+) context tokens?, "
    r"(?P<decodes>\d+) generation requests?, (?P<decode_tokens>\d+) generation tokens?, "
    r"iteration elapsed time: (?P<ms>[0-9.]+) ms(?P<dummy> \(dummy\))?"
    r"(?:,.*?KV cache usage: (?P<kv>[0-9.]+)%)?"
)
"""What vLLM (0.14 and later, checked on 0.32) logs a step with ``--enable-logging-iteration-details``."""
LEAST_STEPS = 20
YEAR_S = 366 * 86400.0
"""Of a leap year: a log tells month and day alone."""
_TOKEN_CELLS, _KV_CELLS = 8, 4


@dataclass(frozen=True)
class Iterations:
    """[m] steps, or cells of like steps with the median of their seconds.

    ``kv_share`` is the share of the KV cache in use (NaN where it is not told), ``steps`` how many steps a row
    stands for. Time is what the engine measured around the model's run: less of the host than a step has.
    ``at_s`` is when the engine logged the step, in seconds of a leap year by its own clock, to the second (NaN where a
    line does not tell); None: no line does.
    """

    prefill_seqs: Floats
    prefill_tokens: Floats
    decode_seqs: Floats
    kv_share: Floats
    seconds: Floats
    steps: Ints
    at_s: Floats | None = None

    def __len__(self) -> int:
        return len(self.seconds)

    def taken(self, rows: npt.NDArray[np.bool_]) -> Iterations:
        """Those of its rows."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        taken: dict[str, Any] = {name: None if c is None else c[rows] for name, c in columns.items()}
        return Iterations(**taken)


def read_iterations(path: Path | str) -> Iterations:
    """The steps in a log of vLLM that was started with ``--enable-logging-iteration-details``.

    Other lines are passed over, and so are steps without tokens and those of no request ("dummy").

    Raises:
        InputError: There is no such file, or it holds fewer than 20 steps.
    """
    try:
        text = Path(path).read_text("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"there must be a log to read at {path}: {error.strerror}") from error
    rows = [_row(found) for found in LINE.finditer(text) if not found["dummy"]]
    rows = [row for row in rows if row[1] + row[2] > 0 and row[4] > 0]
    if len(rows) < LEAST_STEPS:
        raise InputError(
            f"{path} must hold {LEAST_STEPS} steps or more; it holds {len(rows)}. Start vLLM with "
            "--enable-logging-iteration-details, and give what it writes to standard output and error"
        )
    prompts, tokens, decodes, kv, seconds, at_s = np.array(rows, dtype=np.float64).T
    told = at_s if np.isfinite(at_s).any() else None
    return Iterations(prompts, tokens, decodes, kv, seconds, np.ones(len(rows), dtype=np.int64), told)


def _row(found: re.Match[str]) -> tuple[float, ...]:
    kv = float(found["kv"]) / 100 if found["kv"] else np.nan
    counts = (float(found[name]) for name in ("prompts", "prompt_tokens", "decodes"))
    return (*counts, kv, float(found["ms"]) / 1e3, _at_s(found["at"]))


def _at_s(report: str | None) -> float:
    """Seconds of a leap year at "MONTH-DAY HOUR:MINUTE:SECOND"; NaN where that is no date."""
    if report is None:
        return float("nan")
    try:
        return of_year_s(datetime.fromisoformat(f"2000-{report}"))
    except ValueError:
        return float("nan")


def of_year_s(at: datetime) -> float:
    """Seconds since its year began, were it a leap year; its zone is not looked at."""
    return (at.replace(year=2000, tzinfo=None) - datetime(2000, 1, 1)).total_seconds()  # noqa: DTZ001


def in_cells(log: Iterations) -> Iterations:
    """Medians over like steps: equal prompts, tokens and sequences within 9 %, KV cache within 19 %.

    A step that another process held up does not move a median.
    """
    keys = np.column_stack(
        [
            log.prefill_seqs,
            _octaves(log.prefill_tokens, _TOKEN_CELLS),
            _octaves(log.decode_seqs, _TOKEN_CELLS),
            _octaves(np.nan_to_num(log.kv_share) * 1e4, _KV_CELLS),
        ]
    )
    _, cell = np.unique(keys, axis=0, return_inverse=True)
    cell = cell.reshape(-1)
    order = np.argsort(cell, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(cell[order])) + 1)
    columns: dict[str, Any] = {
        name: np.array([getattr(log, name)[rows].mean() for rows in parts])
        for name in ("prefill_seqs", "prefill_tokens", "decode_seqs", "kv_share")
    }
    columns["seconds"] = np.array([np.median(log.seconds[rows]) for rows in parts])
    return Iterations(**columns, steps=np.array([len(rows) for rows in parts], dtype=np.int64))


def _octaves(values: Floats, cells: int) -> Floats:
    """0 for 0, and so many cells an octave above it; each whole number below 8 is a cell of its own."""
    return np.where(values < 8, np.floor(values), 8 + np.round(cells * np.log2(np.maximum(values, 8) / 8)))


Mask = npt.NDArray[np.bool_]
ZONES_S = 900.0 * np.array(sorted(range(-56, 57), key=abs))
"""By which a clock may be ahead of UTC, the nearest first."""
SECOND_S = 1.0
"""What a line does not tell: a step is of some moment of the second that is written there."""
SLACK_S = 1.0
"""By which two machines' clocks may differ, or a line may be late."""
AGREE = 0.05
"""Share of a run's tokens by which those of the log may differ in its time."""


def utc_s(log: Iterations, runs: Sequence[Run]) -> Floats | None:
    """[m] when steps were logged: seconds of a leap year in UTC; None where no line tells or none agrees with a run."""
    if log.at_s is None:
        return None
    told = np.isfinite(log.at_s)
    at_s, second = np.unique(log.at_s[told], return_inverse=True)
    decodes: Floats = np.bincount(second.reshape(-1), weights=log.decode_seqs[told]).astype(np.float64)
    agreeing = [sum(_agrees(run, at_s - zone_s, decodes) for run in runs) for zone_s in ZONES_S]
    best = int(np.argmax(agreeing))
    return log.at_s - ZONES_S[best] if agreeing[best] else None


def since_s(run: Run, at_s: Floats) -> Floats | None:
    """[m] seconds of a year (UTC) by the clock of a run's records; None where the run does not tell when it began."""
    start = run.measured.metadata.get("start")
    if run.measured.source != BENCH or not isinstance(start, str):
        return None
    try:
        started = datetime.fromisoformat(start)
    except ValueError:
        return None
    if started.tzinfo is None:
        return None
    ago_s = at_s - of_year_s(started.astimezone(UTC))
    return np.asarray((ago_s + YEAR_S / 2) % YEAR_S - YEAR_S / 2)


def span_s(run: Run) -> tuple[float, float]:
    """When the first request of a run was due, and when all was over."""
    return float(np.nanmin(run.measured.records.requests.arrival_s)), run.measured.records.end_s


def within(second_s: Floats, begin_s: float, end_s: float) -> Mask:
    """[m] whether steps that were logged in these seconds may have been logged between the two moments."""
    return np.asarray((second_s + SECOND_S > begin_s) & (second_s < end_s))


def _agrees(run: Run, at_s: Floats, decodes: Floats) -> bool:
    """Whether about as many tokens were logged in the run's time as the run has, most of them surely in it."""
    second_s = since_s(run, at_s)
    if second_s is None:
        return False
    begin_s, end_s = span_s(run)
    own = float((run.workload.output_tokens - 1).sum())
    surely = decodes[(second_s >= begin_s) & (second_s + SECOND_S <= end_s)].sum()
    perhaps = decodes[within(second_s, begin_s - SLACK_S, end_s + SLACK_S)].sum()
    return bool(own > 0 and own / 2 <= surely <= own * (1 + AGREE) and perhaps >= own * (1 - AGREE))


MIN_SEEN = 0.2
"""Share of the time between a request's tokens that its steps' seconds must make: the rest is host, which it lacks.
Of a model of 4 layers on a CPU, with much host beside it, they make a half."""


def not_of_steps(log: Iterations, runs: Sequence[Run]) -> str:
    """In words why they are not; empty where they may be, as far as the fitted requests' tokens tell."""
    logged_s, between_s = _step_s(log), _between_tokens_s(runs)
    if not logged_s < MIN_SEEN * between_s:
        return ""
    return (
        f"by its seconds a step that decodes takes {1e3 * logged_s:.3g} ms, where the requests' tokens came "
        f"{1e3 * between_s:.3g} ms apart. vLLM's clock starts when a step was handed over: where the model runs in the "
        "scheduler's own process it is computed by then. Start vLLM with --distributed-executor-backend mp for such "
        "runs, or keep its counters (`lengthwise bench --scrape`)"
    )


def _step_s(log: Iterations) -> float:
    """Mean seconds of a step, each counted by the tokens that it decodes; infinite where none does."""
    decodes = log.decode_seqs * log.steps
    return float((decodes * log.seconds).sum() / decodes.sum()) if decodes.sum() > 0 else np.inf


def _between_tokens_s(runs: Sequence[Run]) -> float:
    """Mean seconds between tokens of the fitted requests, each counted by its tokens; 0 where none has two."""
    duration_s = tokens = 0.0
    for run in runs:
        r = run.measured.records.requests
        own = run.fit & (r.status == Status.FINISHED) & (r.output_tokens > 1)
        duration_s += float((r.finished_s - r.first_token_s)[own].sum())
        tokens += float((r.output_tokens - 1)[own].sum())
    return duration_s / tokens if tokens and np.isfinite(duration_s) else 0.0


def fitted_steps(log: Iterations, runs: Sequence[Run]) -> Mask | None:
    """[m] which steps are of requests that are fitted to; None where neither tokens nor times tell any run's.

    Args:
        log: Steps, or cells of them, of which none can be told.
        runs: All that are fitted to or held out.
    """
    if (log.steps != 1).any():
        return None
    at_s = utc_s(log, runs)
    found, told = np.zeros(len(log), dtype=np.bool_), at_s is not None
    for run in runs:
        if not run.fit.any():
            continue
        own = _by_tokens(log, run, runs, at_s)
        told = told or bool(own)
        for first, last in own:
            found[first : first + _before_held(log, run, first, last)] = True
        if not own and at_s is not None:
            found |= _by_clock(run, runs, at_s)
    return found if told else None


def _by_tokens(log: Iterations, run: Run, runs: Sequence[Run], at_s: Floats | None) -> list[tuple[int, int]]:
    """First step and that behind the last, of the run and its repeats; empty where another run may be meant."""
    places, alike = _places(log, run), [other for other in runs if _sums(other) == _sums(run)]
    second_s = None if at_s is None else since_s(run, at_s)
    if second_s is not None:
        near = within(second_s, span_s(run)[0] - SLACK_S, span_s(run)[1] + SLACK_S)
        places, alike = [(a, b) for a, b in places if near[a] and near[b - 1]], [run]
    if len(places) == len(alike) == 1:
        return places
    apart = all(b <= c for (_, b), (c, _) in pairwise(places))
    whole = not any(other.validation.any() for other in alike)
    return places if apart and whole and len(places) <= len(alike) else []


def _places(log: Iterations, run: Run) -> list[tuple[int, int]]:
    """All between two moments at which nothing was under way whose tokens add up to the run's."""
    r = run.measured.records.requests
    if not (r.status[np.isfinite(r.arrival_s)] == Status.FINISHED).all():
        return []
    prompts, decodes = _sums(run)
    free = np.append(np.flatnonzero((log.decode_seqs == 0) & (log.prefill_seqs > 0)), len(log))
    computed, made = _sofar(log.prefill_tokens)[free], _sofar(log.decode_seqs)[free]
    radix = made[-1] + decodes + 1
    sofar = computed * radix + made
    wanted = sofar + prompts * radix + decodes
    at = np.minimum(np.searchsorted(sofar, wanted), len(free) - 1)
    found = [(int(free[a]), int(free[at[a]])) for a in np.flatnonzero(sofar[at] == wanted)]
    if len(found) > 1:  # a long prompt's next step without others looks like a beginning, too
        found = [(a, b) for a, b in found if a == 0 or log.decode_seqs[a - 1] > 0]
    return found


def _sums(run: Run) -> tuple[int, int]:
    """Tokens of a run's prompts, and its decodes: a prompt's last step gives the first token."""
    return int(run.workload.prompt_tokens.sum()), int((run.workload.output_tokens - 1).sum())


def _sofar(each: Floats) -> Ints:
    return np.concatenate([[0], np.cumsum(np.round(each).astype(np.int64))])


def _before_held(log: Iterations, run: Run, first: int, last: int) -> int:
    """How many of a run's steps surely were over when its first held-out request was due."""
    if not run.validation.any():
        return last - first
    made = np.cumsum(log.decode_seqs[first:last])
    return int(np.searchsorted(made, _decodes_by(run, until_s(run)), side="left"))


def _decodes_by(run: Run, at_s: float) -> int:
    """Tokens that clients surely had by then, first ones left out."""
    r, tokens = run.measured.records.requests, run.measured.tokens
    if tokens is not None and len(tokens.at_s) and tokens.tokens.min() >= 1:
        return int(tokens.tokens[tokens.at_s <= at_s].sum() - (r.first_token_s <= at_s).sum())
    return int((r.output_tokens[r.finished_s <= at_s] - 1).sum())


def _by_clock(run: Run, runs: Sequence[Run], at_s: Floats) -> Mask:
    """[m] steps in the run's time that cannot be of held-out requests."""
    own_s = since_s(run, at_s)
    if own_s is None:
        return np.zeros(len(at_s), dtype=np.bool_)
    begin_s, end_s = span_s(run)
    found = within(own_s, begin_s, end_s + SLACK_S)
    for other in runs:
        second_s = since_s(other, at_s) if other.validation.any() else None
        if second_s is not None:
            begin_s, end_s = span_s(other)
            found &= ~within(second_s, max(begin_s, until_s(other)) - SLACK_S, end_s + SLACK_S)
    return found
