"""Requests as a vLLM engine saw them: the runs that LLMServingSim recorded to compare itself with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.measure.foreign._rows import Story, Told
from lengthwise.schema.errors import InputError

_NEEDED = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


def fits(row: Any) -> bool:
    """Whether a line is such a request."""
    return isinstance(row, dict) and {"input_toks", "queued_ts", "last_token_ts"} <= set(row)


def story_of(lines: Sequence[Mapping[str, Any]]) -> Story:
    """Its requests on the engine's clock, with arrivals moved there from the wall clock.

    The two clocks are put on each other where the smallest time between arrival and queue is 0. What that
    time truly was, a constant of all requests, is not told.

    Raises:
        InputError: A line lacks a time.
    """
    for at, line in enumerate(lines):
        missing = [name for name in _NEEDED if line.get(name) is None]
        if missing:
            raise InputError(f"request {at} must have {', '.join(_NEEDED)}; it lacks {', '.join(missing)}")
    shift_s = min((line["queued_ts"] - line["arrival_time"] for line in lines), default=0.0)
    waits = sorted(line["queued_ts"] - line["arrival_time"] - shift_s for line in lines)
    rows = [_row(line, shift_s) for line in lines]
    aligned = (
        "arrivals are of another clock than the engine's times; they were aligned so that the fastest request "
        "took no time from arrival to queue"
    )
    doubts = [aligned]
    if waits and waits[-1] > 0.05:
        doubts.append(
            f"requests took up to {waits[-1]:.2f} s from arrival to the engine's queue (half of them "
            f"{waits[len(waits) // 2]:.3f} s): the front end was busy; workload.extra['queued_s'] has those times"
        )
    facts = {"clock": "the engine's monotonic one", "shift_s": shift_s}
    return Story("llmservingsim", rows, facts, doubts)


def _row(line: Mapping[str, Any], shift_s: float) -> Told:
    return Told(
        line["arrival_time"] + shift_s,
        int(line["input_toks"]),
        int(line["output_toks"]),
        float(line["first_token_ts"]),
        float(line["last_token_ts"]),
        scheduled_s=float(line.get("scheduled_ts") or "nan"),
        queued_s=float(line["queued_ts"]),
    )
