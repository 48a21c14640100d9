"""Latencies of requests as columns, and data frames of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, MissingExtraError, UnknownNameError
from lengthwise.schema.records import Records, RequestRecords
from lengthwise.statistics import Floats

Array = npt.NDArray[Any]
Kind = Literal["polars", "pandas", "arrow"]
Table = Literal["requests", "steps"]


def _divide(seconds: Floats, tokens: Array) -> Floats:
    return np.asarray(np.divide(seconds, tokens, out=np.full(len(tokens), np.nan), where=tokens > 0))


_DERIVED: dict[str, Callable[[RequestRecords], Floats]] = {
    "queueing_delay_s": lambda r: r.scheduled_s - r.arrival_s,
    "ttft_s": lambda r: r.first_token_s - r.arrival_s,
    "tpot_s": lambda r: _divide(r.finished_s - r.first_token_s, r.output_tokens - 1),
    "jct_s": lambda r: r.finished_s - r.arrival_s,
    "normalized_latency_s": lambda r: _divide(r.finished_s - r.arrival_s, r.output_tokens),
}
_COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "status", "replica", *_DERIVED, "preemptions", "queued_for_s"
)  # fmt: skip


def request_column(requests: RequestRecords, name: str) -> Array:
    """Return the column ``name`` [n] of :func:`request_columns`. Raises UnknownNameError if there is no such column."""
    if name in _DERIVED:
        return _DERIVED[name](requests)
    if name not in _COLUMNS:
        raise UnknownNameError("request column", name, _COLUMNS)
    return np.asarray(getattr(requests, name))


def request_columns(records: Records) -> dict[str, Array]:
    """Return recorded and derived columns [n] of the requests, in the order of the workload.

    Recorded columns are the records' arrays. NaN marks events that never happened. Derived columns are new arrays:

    * ``queueing_delay_s``: from the arrival to the first step of the request.
    * ``ttft_s``: from the arrival to the first token.
    * ``tpot_s``: from the first to the last token, over (output tokens - 1); NaN for a single token.
    * ``jct_s``: from the arrival to the last token (end-to-end latency).
    * ``normalized_latency_s``: ``jct_s`` per output token, as in Orca and vLLM.
    """
    return {name: request_column(records.requests, name) for name in _COLUMNS}


def frame(records: Records, kind: Kind = "polars", table: Table = "requests") -> Any:
    """Return a data frame of the requests (:func:`request_columns`) or of the steps (StepRecords).

    The frame shares the records' memory: do not write to it. ``kind`` is "polars" (DataFrame), "pandas" (DataFrame) or
    "arrow" (pyarrow.Table).

    Raises:
        InputError: A frame of steps is requested, but the run recorded none.
        MissingExtraError: The library of ``kind`` is not installed.
        UnknownNameError: There is no such ``kind`` or ``table``.
    """
    if kind not in _FRAMES:
        raise UnknownNameError("kind of frame", kind, _FRAMES)
    if table == "requests":
        return _FRAMES[kind](request_columns(records))
    if table != "steps":
        raise UnknownNameError("table", table, ["requests", "steps"])
    if records.steps is None:
        raise InputError("a frame of steps needs recorded steps; this run has none: simulate fewer requests")
    return _FRAMES[kind]({f.name: getattr(records.steps, f.name) for f in dataclasses.fields(records.steps)})


def _extra(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"a frame of {module}", extra) from error


_FRAMES: dict[str, Callable[[dict[str, Array]], Any]] = {
    "polars": lambda columns: import_module("polars").DataFrame(columns),
    "pandas": lambda columns: _extra("pandas", "pandas").DataFrame(columns, copy=False),
    "arrow": lambda columns: _extra("pyarrow", "arrow").table(columns),
}


END_SLACK_S = 1.0  # a request that finishes this long after the end of the run is no sign of a wrong clock


def clock_warning(r: RequestRecords, end_s: float) -> str:
    """Return a warning if times are impossible (a clock was set, or two clocks disagree), or an empty string."""
    with np.errstate(invalid="ignore"):
        wrong = (
            (r.first_token_s < r.arrival_s) | (r.finished_s < r.first_token_s) | (r.finished_s > end_s + END_SLACK_S)
        )
    if not wrong.any():
        return ""
    return (
        f"clocks disagree: {int(wrong.sum()):,} requests have a first token before they arrived, or end before it "
        "or after the run"
    )
