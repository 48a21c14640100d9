"""Workloads from trace files: one call, any of the formats in use."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.errors import InputError, TraceError, UnknownNameError
from lengthwise.schema.workload import Workload
from lengthwise.workload._parquet import is_workload, read_parquet
from lengthwise.workload._rows import FORMATS, line_of, read_rows
from lengthwise.workload._servegen import read_servegen
from lengthwise.workload._sharegpt import read_sharegpt
from lengthwise.workload._source import Source
from lengthwise.workload._trace import Trace

READABLE = (*FORMATS, "parquet", "servegen", "sharegpt")
"""What ``read(format=)`` may name."""

_LOOK = 1 << 16
_OUTPUT = re.compile(rb'"(?:output|response|completion|output_tokens|completion_tokens|choices)"\s*:')
"""In the first bytes of a JSON list: rows of outputs, not conversations."""
_COLUMNS = ("prompt_tokens", "output_tokens", "predicted_tokens", "priority", "tenant")


def read(
    path: Path | str,
    format: str | None = None,  # noqa: A002 - the word users look for
    *,
    time_scale: float = 1.0,
    max_requests: int | None = None,
    sort: bool = False,
    count_tokens: Callable[[str], int] | None = None,
    window_s: tuple[float, float] = (0.0, 3600.0),
    seed: int = 0,
) -> Workload:
    """The workload in a trace file; its format is told by its content, packed with gzip or not.

    =============  ==================================================================================
    azure          csv TIMESTAMP (dates or 100-ns ticks), ContextTokens, GeneratedTokens
    burstgpt       csv Timestamp (s), Model, Request tokens, Response tokens; rows of 0 tokens are
                   requests that failed, and are left out
    vidur          csv arrived_at (s), num_prefill_tokens, num_decode_tokens; without arrived_at all
                   requests come at 0 and the name says so; tenant, where there is such a column
    splitwise      csv arrival_timestamp (s), prompt_size, token_size
    mooncake       jsonl timestamp (ms), input_length, output_length, hash_ids, session_id, priority, tenant
    aibrix         jsonl timestamp_ms, prompt_length, output_length; rows of 0 tokens are left out
    llmservingsim  jsonl arrival_time_ns, input_toks, output_toks
    sharegpt       json (or jsonl) of conversations: a request an answer, all at 0
    servegen       rates and length histograms of clients: requests are drawn for ``window_s``
    parquet        what ``write`` wrote; read back as it was, on its own clock
    =============  ==================================================================================

    Args:
        path: The file; for ServeGen its folder or one of its two files.
        format: One of the names above; None finds it out.
        time_scale: Factor on the times; 0.5 doubles the rate.
        max_requests: Keep the first so many.
        sort: Put the requests in order of arrival (those of one time stay in the file's order) where
            the file does not have them so; otherwise that is an error.
        count_tokens: ShareGPT: tokens of a text; None estimates them (``schema.tokens``).
        window_s: ServeGen: start and end of the span to draw, seconds.
        seed: ServeGen: for the draws.

    Returns:
        The workload, its first arrival at 0. ``extra`` holds what the format knows of "session",
        "class" and "block_ids", and the texts of columns prompt, output (or response) and model.

    Raises:
        TraceError: The file is missing, empty, cut off or of no known format, or a row cannot be used;
            the message names the file and the line, 1-based, the header counted.
        UnknownNameError: There is no such format.
    """
    path = Path(path)
    if not (isfinite(time_scale) and time_scale > 0):
        raise InputError(f"time_scale must be a finite number above 0; it is {time_scale}")
    if max_requests is not None and max_requests < 1:
        raise InputError(f"max_requests must be at least 1; it is {max_requests}")
    if format is not None and format not in READABLE:
        raise UnknownNameError("trace format", format, READABLE)
    if path.is_dir() or format == "servegen":
        return _workload(path, read_servegen(path, window_s, seed), time_scale, max_requests)
    source = Source.load(path)
    found = format or _detected(source)
    if found is None and _is_parquet(source):
        found = "parquet"  # its reader says what is missing
    if found is None:
        raise _unknown(source)
    if found == "parquet":
        return _scaled(read_parquet(source), time_scale, max_requests)
    if found == "servegen":
        trace = read_servegen(path, window_s, seed)
    elif found == "sharegpt":
        trace = read_sharegpt(source, count_tokens)
    else:
        trace = read_rows(source, FORMATS[found])
        trace = _in_order(source, found, trace, sort=sort)
    return _workload(path, trace, time_scale, max_requests)


def detect(path: Path | str) -> str | None:
    """The format of a trace file by what it starts with; None where it is none of those that ``read`` knows.

    Raises:
        TraceError: The file is missing, cut off or empty.
    """
    path = Path(path)
    return "servegen" if path.is_dir() else _detected(Source.load(path))


def _detected(source: Source) -> str | None:
    if _is_parquet(source):
        return "parquet" if is_workload(source) else None
    first = source.first_object
    columns = list(first) if first is not None else source.header
    if first is not None and {"client", "window"} <= set(first):
        return "servegen"
    if first is None and {"client", "timestamp", "rate", "pattern"} <= set(columns):
        return "servegen"
    if {"conversations", "conversation"} & set(columns):
        return "sharegpt"
    if source.data.lstrip()[:1] == b"[":
        return None if _OUTPUT.search(source.data, 0, _LOOK) else "sharegpt"
    kind = "csv" if first is None else "jsonl"
    return next((f.name for f in FORMATS.values() if f.kind == kind and f.matches(columns)), None)


def _is_parquet(source: Source) -> bool:
    return source.data[:4] == b"PAR1" or source.path.suffix == ".parquet"


def _unknown(source: Source) -> TraceError:
    columns = source.header if source.first_object is None else list(source.first_object)
    known = "; ".join(f"{form.name}: {', '.join(form.needed)}" for form in FORMATS.values())
    shown = ", ".join(columns[:12])[:200]
    return source.fault(1, f"of no known format, with {shown!r} in the first line. Known are {known}")


def _in_order(source: Source, found: str, trace: Trace, *, sort: bool) -> Trace:
    falls = np.flatnonzero(np.diff(trace.arrival_s) < 0)
    if len(falls) == 0:
        return trace
    if sort:
        return trace.take(np.argsort(trace.arrival_s, kind="stable"))
    line = line_of(source, FORMATS[found], int(falls[0]) + 1)
    raise source.fault(line, "arrives before the row above it; order the rows, or pass sort=True")


def _workload(path: Path, trace: Trace, time_scale: float, max_requests: int | None) -> Workload:
    """The trace without empty requests, its first arrival at 0."""
    whole = (trace.prompt_tokens > 0) & (trace.output_tokens > 0)
    name = trace.name
    if not whole.all():
        trace = trace.take(np.flatnonzero(whole))
        name += f" (without {np.count_nonzero(~whole)} empty)"
    if len(trace.arrival_s) == 0:
        raise TraceError(f"{path}: holds no request; a trace must hold at least one")
    trace = trace.take(slice(max_requests))
    extra = dict(trace.extra)
    return Workload(
        arrival_s=(trace.arrival_s - trace.arrival_s[0]) * time_scale,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        priority=extra.pop("priority", None),
        tenant=extra.pop("tenant", None),
        extra=extra,
        name=name,
    )


def _scaled(workload: Workload, time_scale: float, max_requests: int | None) -> Workload:
    if time_scale == 1 and max_requests is None:
        return workload
    given = {name: getattr(workload, name) for name in _COLUMNS}
    kept: dict[str, Any] = {n: None if v is None else v[:max_requests] for n, v in given.items()}
    kept["arrival_s"] = workload.arrival_s[:max_requests] * time_scale
    made = workload.predictions
    kept["predictions"] = None if made is None else made.take(np.arange(len(made))[:max_requests])
    kept["extra"] = {name: values[:max_requests] for name, values in workload.extra.items()}
    return replace(workload, **kept)
