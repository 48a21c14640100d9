"""Reads workloads from trace files of several formats."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.errors import InputError, TraceError, UnknownNameError
from lengthwise.schema.workload import SharedPrefixes, Workload
from lengthwise.workload.distributions import Empirical
from lengthwise.workload.session_rows import (
    JOURNAL,
    columns_of,
    is_agentic,
    is_otel,
    read_agentic,
    read_conversations,
    read_journal,
    read_otel,
)
from lengthwise.workload.trace_rows import (
    FORMATS,
    HASHED_TOKENS,
    RowFormat,
    Source,
    Trace,
    hash_fault,
    line_of,
    read_rows,
    with_columns,
)
from lengthwise.workload.writers import may_be_workload, read_parquet

READABLE = (*FORMATS, "journal", "otel", "parquet", "servegen", "sharegpt", "sharegpt_turns")
"""Names that ``read(format=)`` accepts."""
_DETECTION_BYTES = 1 << 16
_OUTPUT_KEY = re.compile(rb'"(?:output|response|completion|output_tokens|completion_tokens|choices)"\s*:')
"""A JSON list with such a key near its start has requests with outputs, not conversations."""

WINDOW_S = 600.0  # length of the windows for which ServeGen gives a rate
_RATE_COLUMNS = ["client", "timestamp", "rate", "cv", "pattern", "arg1", "arg2"]


def _likeness(required: list[str], columns: list[str]) -> float:
    """Return how much the columns of a file resemble the required ones, from 0 to 1."""
    ratios = ([SequenceMatcher(None, a.lower(), b.lower()).ratio() for b in columns] for a in required)
    return sum(max(row, default=0.0) for row in ratios) / len(required)


def read(  # noqa: C901, PLR0912 - one branch for each kind of format
    path: Path | str,
    format: str | Mapping[str, str] | None = None,  # noqa: A002 - the word users look for
    *,
    time_scale: float = 1.0,
    max_requests: int | None = None,
    sort: bool = False,
    count_tokens: Callable[[str], int] | None = None,
    window_s: tuple[float, float] = (0.0, 3600.0),
    seed: int = 0,
) -> Workload:
    """Return the workload of a trace file, gzipped or not; the format is detected from the content by default.

    =============  ==================================================================================
    azure          csv TIMESTAMP (dates or 100-ns ticks), ContextTokens, GeneratedTokens
    burstgpt       csv Timestamp (s), Model, Request tokens, Response tokens; failures (0 tokens) are left out
    vidur          csv num_prefill_tokens, num_decode_tokens; optional: arrived_at (s), or arrival_ms, ...;
                   tenant, priority, max_tokens, ignore_eos, session, turn
    splitwise      csv arrival_timestamp (s), prompt_size, token_size
    mooncake       jsonl timestamp (ms), input_length, output_length, hash_ids (of blocks of 512 tokens, or block_size),
                   session_id, priority, tenant, max_tokens, ignore_eos; also with delay (ms), request_id, wait_for,
                   tool_wait_ms (agentic)
    aibrix         jsonl timestamp_ms, prompt_length, output_length; rows of 0 tokens are left out
    llmservingsim  jsonl arrival_time_ns, input_toks, output_toks
    sharegpt       json (or jsonl) of conversations, as of ShareGPT and LMSYS: one request for each answer,
                   all at time 0; as "sharegpt_turns", an answer waits for the answer before it
    journal        jsonl of `lengthwise serve --journal`: one file, with sessions and shared prefixes
    otel           JSON of OpenTelemetry spans (OTLP, or of console exporters) with gen_ai.usage.input_tokens and
                   output_tokens, and optionally gen_ai.request.max_tokens
    servegen       rates and length histograms of clients, from which requests are drawn for ``window_s``
    parquet        a file of ``write``, read back unchanged, with its own times
    =============  ==================================================================================

    The first request arrives at time 0, except in Parquet. ``extra`` has the format's "session" and "class", and the
    texts of the columns prompt, output (or response) and model. ``Workload.prefixes`` has the ``hash_ids``, and
    ``Workload.after`` the requests that wait for others. A later request of a session (agentic, journal, otel,
    sharegpt_turns) continues the one before it if its prompt is longer than that one's prompt and output. Raises
    TraceError, with file and line, if the file is unreadable, has no known format or an invalid row, UnknownNameError
    for an unknown ``format``, and InputError for another invalid argument.

    Args:
        path: The file; for ServeGen its folder, or one of its two files.
        format: Name of the format, or for a CSV file of another one its columns by our names: prompt_tokens,
            output_tokens, arrival_s (or _ms, _us, _ns, _date), tenant, priority, max_tokens, ignore_eos, session,
            turn.
        time_scale: Factor on the arrivals; 0.5 doubles the rate. Delays after other requests do not change.
        sort: Whether to sort unordered requests by arrival (stable) instead of raising an error.
        count_tokens: For ShareGPT: counts the tokens of a text; None: ``schema.workload.estimated_tokens``.
        window_s: For ServeGen: start and end of the time span for which requests are drawn, in seconds, with ``seed``.
    """
    path = Path(path)
    if not (isfinite(time_scale) and time_scale > 0):
        raise InputError(f"time_scale must be a finite number above 0; it is {time_scale}")
    if max_requests is not None and max_requests < 1:
        raise InputError(f"max_requests must be at least 1; it is {max_requests}")
    if isinstance(format, str) and format not in READABLE:
        raise UnknownNameError("trace format", format, READABLE)
    if path.is_dir() or format == "servegen":
        return _to_workload(path, read_servegen(path, window_s, seed), time_scale, max_requests)
    source = Source.load(path)
    if isinstance(format, Mapping):
        source, form = with_columns(source, format)
        return _to_workload(path, _in_order(source, form, read_rows(source, form), sort=sort), time_scale, max_requests)
    # A damaged Parquet file is undetected, but its reader reports the fault.
    detected = format or _detect(source) or ("parquet" if _is_parquet(source) else None)
    if detected is None:
        columns = source.header if source.first_object is None else list(source.first_object)
        form = max(FORMATS.values(), key=lambda one: _likeness(one.required, columns))
        shown = ", ".join(columns[:12])[:200]
        nearest = f"the nearest, {form.name}, has {', '.join(form.required)}"
        raise source.fault(1, f"of no known format, with {shown!r} in the first line; {nearest}")
    if detected == "parquet":
        return _scaled(read_parquet(source), time_scale, max_requests)
    workload = None
    if detected in ("sharegpt", "sharegpt_turns"):
        multi_turn = detected == "sharegpt_turns"
        workload = read_conversations(source, _json_entries(source), count_tokens, multi_turn=multi_turn)
    elif detected in ("otel", "journal"):
        workload = read_otel(source) if detected == "otel" else read_journal(source)
    elif detected == "mooncake" and is_agentic(source):
        workload = read_agentic(source, sort=sort)
    if workload is not None:
        return _scaled(workload, time_scale, max_requests)
    if detected == "servegen":
        trace = read_servegen(path, window_s, seed)
    else:
        trace = read_rows(source, FORMATS[detected])
        _check_block_ids(source, detected, trace)
        trace = _in_order(source, FORMATS[detected], trace, sort=sort)
    return _to_workload(path, trace, time_scale, max_requests)


def _in_order(source: Source, form: RowFormat, trace: Trace, *, sort: bool) -> Trace:
    """Return the trace in order of arrival. Raises TraceError if it is not and must not be sorted."""
    descents = np.flatnonzero(np.diff(trace.arrival_s) < 0)
    if len(descents) and not sort:
        line = line_of(source, form, int(descents[0]) + 1)
        raise source.fault(line, "arrives before the row above it; order the rows, or pass sort=True")
    return trace.take(np.argsort(trace.arrival_s, kind="stable")) if len(descents) else trace


def detect(path: Path | str) -> str | None:
    """Return the format of a trace file by its content, None if unknown. Raises TraceError if it is unreadable."""
    path = Path(path)
    return "servegen" if path.is_dir() else _detect(Source.load(path))


def _detect(source: Source) -> str | None:
    if _is_parquet(source):
        return "parquet" if may_be_workload(source) else None
    first = source.first_object
    columns = set(source.header if first is None else first)
    if ({"client", "timestamp", "rate", "pattern"} if first is None else {"client", "window"}) <= columns:
        return "servegen"
    if {"conversations", "conversation"} & columns:
        return "sharegpt"
    is_journal = first is not None and first.get("format") == JOURNAL
    if is_journal or is_otel(first or source.first_item):
        return "journal" if is_journal else "otel"
    if source.data.lstrip()[:1] == b"[":
        return None if _OUTPUT_KEY.search(source.data, 0, _DETECTION_BYTES) else "sharegpt"
    kind = "csv" if first is None else "jsonl"
    named = (f.name for f in FORMATS.values() if f.kind == kind and columns.issuperset(f.required))
    # hash_ids without lengths are a Mooncake trace with a fault, which its reader names.
    return next(named, "mooncake" if first is not None and "hash_ids" in first else None)


def _is_parquet(source: Source) -> bool:
    return source.data[:4] == b"PAR1" or source.path.suffix == ".parquet"


def _to_workload(path: Path, trace: Trace, time_scale: float, max_requests: int | None) -> Workload:
    has_tokens = (trace.prompt_tokens > 0) & (trace.output_tokens > 0)
    name = trace.name
    if not has_tokens.all():
        trace = trace.take(np.flatnonzero(has_tokens))
        name += f" (without {np.count_nonzero(~has_tokens)} empty)"
    if len(trace.arrival_s) == 0:
        raise TraceError(f"{path}: holds no request; a trace must hold at least one")
    trace = trace.take(slice(max_requests))
    extra = dict(trace.extra)
    ids, size = extra.pop("block_ids", None), extra.pop("block_tokens", None)
    prefixes = None
    if ids is not None:
        start = np.cumsum([0, *map(len, ids)])
        prefixes = SharedPrefixes(HASHED_TOKENS if size is None else int(size[0]), start, np.concatenate(ids))
    return Workload(
        arrival_s=(trace.arrival_s - trace.arrival_s[0]) * time_scale,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        **columns_of(extra),
        name=name,
        prefixes=prefixes,
    )


def _check_block_ids(source: Source, form: str, trace: Trace) -> None:
    """Raise TraceError, with the line, for hash_ids that do not fit their prompt."""
    ids = trace.extra.get("block_ids")
    if ids is None:
        return
    sizes = trace.extra.get("block_tokens", np.full(len(ids), HASHED_TOKENS))
    if (sizes != sizes[0]).any():
        raise source.fault(
            line_of(source, FORMATS[form], int(np.argmax(sizes != sizes[0]))), "block_size must not vary"
        )
    for row, (numbers, prompt_tokens) in enumerate(zip(ids, trace.prompt_tokens.tolist(), strict=True)):
        if fault := hash_fault(numbers.tolist(), prompt_tokens, int(sizes[0])):
            raise source.fault(line_of(source, FORMATS[form], row), fault)


def _scaled(workload: Workload, time_scale: float, max_requests: int | None) -> Workload:
    if time_scale == 1 and max_requests is None:
        return workload
    rows = np.arange(len(workload))[:max_requests]
    return workload.take(rows, workload.arrival_s[rows] * time_scale)


def _json_entries(source: Source) -> Iterable[tuple[int | None, dict[str, Any]]]:
    if source.data.lstrip()[:1] == b"{":
        yield from source.json_rows()
        return
    try:
        entries = json.loads(source.data)
    except json.JSONDecodeError as error:
        raise source.fault(error.lineno, f"not JSON, or cut off: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise source.fault(None, f"not UTF-8 text: {error}") from error
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise source.fault(None, f"entry {number} must be an object; it is {json.dumps(entry)[:60]}")
        yield None, entry


@dataclass(frozen=True)
class _Window:
    start_s: float
    requests: int
    pattern: str
    shape: float


_Lengths = dict[float, tuple[Empirical, Empirical]]  # histograms by the start of their window, s


def read_servegen(path: Path, window_s: tuple[float, float], seed: int) -> Trace:
    """Return requests of all clients, drawn for a span of the measured time; each client is a session.

    In every window of 600 s, a client has the measured number of requests. Gaps are drawn from its fitted Gamma or
    Weibull distribution and scaled to fill the window; lengths are drawn from its histograms, without correlation.
    Clients without histograms are left out, and the trace's name then states the share of the requests that remain.
    """
    start_s, end_s = window_s
    if not 0 <= start_s < end_s:
        raise InputError(f"window_s must be a start and a later end in seconds from 0; it is {window_s}")
    rate_files, length_files, name = _servegen_files(path)
    windows: dict[int, list[_Window]] = defaultdict(list)
    lengths: dict[int, _Lengths] = defaultdict(dict)
    for file, number in rate_files:
        for client, window in _rate_windows(Source.load(file), number):
            if window.requests and start_s - WINDOW_S < window.start_s < end_s:
                windows[client].append(window)
    for file, number in length_files:
        for client, at_s, histograms in _length_histograms(Source.load(file), number):
            lengths[client][at_s] = histograms
    parts, measured = [], 0
    for number, own in sorted(windows.items()):
        rng = np.random.default_rng([seed, number])
        measured += sum(window.requests for window in own)
        if number in lengths:
            parts += [_draw_window(number, lengths[number], window, rng) for window in own]
    if not any(len(part.arrival_s) for part in parts):
        raise TraceError(f"{path}: no request between {start_s:g} and {end_s:g} s; choose another window_s")
    arrival_s = np.concatenate([part.arrival_s for part in parts])
    share = f" ({len(arrival_s) / measured:.0%} of the requests: clients with lengths)"
    drawn = Trace(
        arrival_s,
        np.concatenate([part.prompt_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
        {"session": np.concatenate([part.extra["session"] for part in parts])},
        f"servegen {name}{share if len(arrival_s) < measured else ''}",
    )
    rows = np.argsort(arrival_s, kind="stable")
    return drawn.take(rows[(arrival_s[rows] >= start_s) & (arrival_s[rows] < end_s)])


def _draw_window(number: int, lengths: _Lengths, window: _Window, rng: np.random.Generator) -> Trace:
    n = window.requests
    earlier = [at_s for at_s in lengths if at_s <= window.start_s]
    histograms = lengths[max(earlier) if earlier else min(lengths)]
    prompt, output = (np.maximum(h.quantile(rng.random(n)), 1).astype(np.int64) for h in histograms)
    gaps = (rng.standard_gamma if window.pattern == "Gamma" else rng.weibull)(window.shape, n + 1)
    total = gaps.sum()
    if not 0 < total < np.inf:
        # Shapes near 0 underflow: only the count remains known.
        gaps, total = np.ones(n + 1), n + 1.0
    arrival_s = window.start_s + WINDOW_S * (np.cumsum(gaps[:n]) / total)
    return Trace(arrival_s, prompt, output, {"session": np.full(n, number)})


_NumberedFiles = list[tuple[Path, int | None]]


def _servegen_files(path: Path) -> tuple[_NumberedFiles, _NumberedFiles, str]:
    """Return the files of rates and of lengths, each with its client's number (None: each row names it), and a name."""
    if path.is_dir():

        def numbered(pattern: str) -> _NumberedFiles:
            return [(file, int(file.name.split("-")[1])) for file in sorted(path.glob(pattern))]

        rates, lengths = numbered("chunk-*-trace.csv*"), numbered("chunk-*-dataset.json*")
        if not rates:
            message = f"{path} is a folder; give a file, or a ServeGen folder, which must hold files chunk-N-trace.csv"
            raise TraceError(message)
        return rates, lengths, path.name
    endings = "_rates.csv", "_length_pmfs.jsonl"
    if not any(ending in path.name for ending in endings):
        raise TraceError(f"{path}: ServeGen's files come as a pair, X{endings[0]} and X{endings[1]}; name them so")
    stem = path.name.split(endings[0])[0].split(endings[1])[0]
    pair = []
    for ending in endings:
        candidates = [path.with_name(stem + ending + gz) for gz in ("", ".gz")]
        pair.append(next((file for file in candidates if file.exists()), candidates[0]))
    return [(pair[0], None)], [(pair[1], None)], stem


def _rate_windows(source: Source, number: int | None) -> Iterator[tuple[int, _Window]]:
    """Yield the client and the window of each row. ``number`` is the client of all rows; None: each row names it."""
    reader = csv.reader(io.StringIO(source.data.decode("utf-8", "replace"), newline=""))
    for cells in reader:
        if cells == _RATE_COLUMNS or not cells:
            continue
        row = cells if number is None else [str(number), *cells]
        try:
            client, start_s, rate = int(row[0]), float(row[1]), float(row[2] or 0)
            pattern, shape = (row[4], float(row[5])) if rate else ("Gamma", 1.0)
            if not (start_s >= 0 and 0 <= rate < np.inf and pattern in ("Gamma", "Weibull") and 0 < shape < np.inf):
                raise ValueError  # noqa: TRY301 - one message for every fault of a row
        except (ValueError, IndexError) as error:
            raise source.fault(
                reader.line_num,
                "needs client, start in s, rate from 0 up, cv, Gamma or Weibull, shape above 0 and scale; "
                f"it is {','.join(row)[:80]!r}",
            ) from error
        yield client, _Window(start_s, round(rate * WINDOW_S), pattern, shape)


def _length_histograms(source: Source, number: int | None) -> Iterator[tuple[int, float, tuple[Empirical, Empirical]]]:
    for line, client, at_s, entry in _length_rows(source, number):
        if "text_tokens" in entry:
            raise source.fault(line, "multimodal lengths (text_tokens) cannot be used; input_tokens can")
        try:
            prompt, output = (_to_empirical(entry[key]) for key in ("input_tokens", "output_tokens"))
        except (KeyError, ValueError, TypeError, SyntaxError, InputError) as error:
            message = f"must hold histograms named input_tokens and output_tokens ({error!r:.80})"
            raise source.fault(line, message) from error
        if prompt is not None and output is not None:
            yield client, at_s, (prompt, output)


def _length_rows(source: Source, number: int | None) -> Iterator[tuple[int | None, int, float, dict[str, object]]]:
    if number is None:
        for line, entry in source.json_rows():
            if not {"client", "window"} <= set(entry):
                raise source.fault(line, f"must name client and window; it has {', '.join(entry)[:80]}")
            yield line, int(entry["client"]), float(entry["window"]), entry
        return
    try:
        windows = json.loads(source.data)
    except ValueError as error:
        raise source.fault(None, f"not JSON, or cut off: {error}") from error
    for at, entry in windows.items():
        if at.replace(".", "").isdigit():
            yield None, number, float(at), entry


def _to_empirical(histogram: object) -> Empirical | None:
    if isinstance(histogram, str):
        counts = ast.literal_eval(histogram)
        values, weights = list(counts), list(counts.values())
    elif isinstance(histogram, list) and len(histogram) == 2:
        values, weights = histogram
    else:
        raise ValueError(f"{histogram!r:.40} is no histogram")
    return Empirical(values, weights) if values else None
