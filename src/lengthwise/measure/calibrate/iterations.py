"""Steps of a real engine, from its log of iterations."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

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


def _at_s(told: str | None) -> float:
    """Seconds of a leap year at "MONTH-DAY HOUR:MINUTE:SECOND"; NaN where that is no date."""
    if told is None:
        return float("nan")
    try:
        return of_year_s(datetime.fromisoformat(f"2000-{told}"))
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
