"""Workloads from trace files: one call, any of the formats in use."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, TraceError, UnknownNameError
from lengthwise.schema.workload import Workload, estimated_tokens
from lengthwise.workload.distributions import Empirical
from lengthwise.workload.trace_rows import FORMATS, Source, Trace, line_of, read_rows
from lengthwise.workload.writers import is_workload, read_parquet

Floats = npt.NDArray[np.float64]

WINDOW_S = 600.0
"""Length of the windows in which ServeGen gives a rate."""
_RATE_COLUMNS = ["client", "timestamp", "rate", "cv", "pattern", "arg1", "arg2"]


@dataclass(frozen=True)
class _Window:
    start_s: float
    requests: int
    pattern: str
    shape: float


@dataclass(frozen=True)
class _Client:
    windows: list[_Window] = field(default_factory=list)
    lengths: dict[float, tuple[Empirical, Empirical]] = field(default_factory=dict)


def read_servegen(path: Path, window_s: tuple[float, float], seed: int) -> Trace:
    """Requests of all clients in a span of the measured time, each client a session.

    Every 600-s window of a client holds as many requests as were measured; their gaps are drawn from
    the Gamma or Weibull that was fitted to it and stretched to fill the window. Prompt and output lengths
    are drawn from the client's histograms, without correlation: ServeGen gives none. A client without
    histograms is left out, and the name tells the share of the requests that is left.

    Args:
        path: The folder, or either file of the pair.
        window_s: Start and end of the span, seconds on the clock of the files.
        seed: For the draws.

    Raises:
        TraceError: A file is missing, a row cannot be used, or the span holds no request.
    """
    start, end = window_s
    if not 0 <= start < end:
        raise InputError(f"window_s must be a start and a later end in seconds from 0; it is {window_s}")
    clients, name = _load(path, start, end)
    parts, measured = [], 0
    for number, client in sorted(clients.items()):
        rng = np.random.default_rng([seed, number])
        measured += sum(window.requests for window in client.windows)
        if client.lengths:
            parts += [_draw(number, client, window, rng) for window in client.windows]
    drawn = _concatenate(parts)
    if drawn is None:
        raise TraceError(f"{path}: no request between {start:g} and {end:g} s; choose another window_s")
    if len(drawn.arrival_s) < measured:
        name += f" ({len(drawn.arrival_s) / measured:.0%} of the requests: clients with lengths)"
    rows = np.argsort(drawn.arrival_s, kind="stable")
    rows = rows[(drawn.arrival_s[rows] >= start) & (drawn.arrival_s[rows] < end)]
    kept = drawn.take(rows)
    return Trace(kept.arrival_s, kept.prompt_tokens, kept.output_tokens, kept.extra, name)


def _draw(number: int, client: _Client, window: _Window, rng: np.random.Generator) -> Trace:
    n = window.requests
    earlier = [at for at in client.lengths if at <= window.start_s]
    histograms = client.lengths[max(earlier) if earlier else min(client.lengths)]
    prompt, output = (np.maximum(h.quantile(rng.random(n)), 1).astype(np.int64) for h in histograms)
    return Trace(_times(window, rng), prompt, output, {"session": np.full(n, number)})


def _times(window: _Window, rng: np.random.Generator) -> Floats:
    """Arrivals within the window: n + 1 gaps of the fitted shape, stretched to its length."""
    n = window.requests
    draw = rng.standard_gamma if window.pattern == "Gamma" else rng.weibull
    gaps = draw(window.shape, n + 1)
    total = gaps.sum()
    if not 0 < total < np.inf:  # shapes near 0 underflow: nothing is known but the count
        gaps, total = np.ones(n + 1), n + 1.0
    times: Floats = window.start_s + WINDOW_S * (np.cumsum(gaps[:n]) / total)
    return times


def _concatenate(parts: list[Trace]) -> Trace | None:
    if not any(len(part.arrival_s) for part in parts):
        return None
    return Trace(
        np.concatenate([part.arrival_s for part in parts]),
        np.concatenate([part.prompt_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
        {"session": np.concatenate([part.extra["session"] for part in parts])},
    )


def _load(path: Path, start: float, end: float) -> tuple[dict[int, _Client], str]:
    clients: dict[int, _Client] = defaultdict(_Client)
    for source, number in _rate_files(path):
        for client, window in _windows(source, number):
            if window.requests and start - WINDOW_S < window.start_s < end:
                clients[client].windows.append(window)
    for source, number in _length_files(path):
        for client, at, lengths in _histograms(source, number):
            clients[client].lengths[at] = lengths
    name = path.name if path.is_dir() else _pair(path)[0].name.split("_rates")[0]
    return clients, f"servegen {name}"


def _rate_files(path: Path) -> Iterator[tuple[Source, int | None]]:
    if not path.is_dir():
        yield Source.load(_pair(path)[0]), None
        return
    files = sorted(path.glob("chunk-*-trace.csv*"))
    if not files:
        raise TraceError(f"{path}: a folder of ServeGen holds chunk-N-trace.csv files; here are none")
    for file in files:
        yield Source.load(file), _number(file)


def _length_files(path: Path) -> Iterator[tuple[Source, int | None]]:
    if not path.is_dir():
        yield Source.load(_pair(path)[1]), None
        return
    for file in sorted(path.glob("chunk-*-dataset.json*")):
        yield Source.load(file), _number(file)


def _number(file: Path) -> int:
    return int(file.name.split("-")[1])


def _pair(path: Path) -> tuple[Path, Path]:
    """The file of rates and that of lengths, given either."""
    rates, lengths = "_rates.csv", "_length_pmfs.jsonl"
    if rates not in path.name and lengths not in path.name:
        raise TraceError(f"{path}: ServeGen's files come as a pair, X{rates} and X{lengths}; name them so")
    stem = path.name.split(rates)[0].split(lengths)[0]
    found = []
    for ending in (rates, lengths):
        candidates = [path.with_name(stem + ending + gz) for gz in ("", ".gz")]
        found += [next((file for file in candidates if file.exists()), candidates[0])]
    return found[0], found[1]


def _windows(source: Source, number: int | None) -> Iterator[tuple[int, _Window]]:
    """Client and window of each row; the files of one client have no header and no client column."""
    reader = csv.reader(io.StringIO(source.data.decode("utf-8", "replace"), newline=""))
    for cells in reader:
        if cells == _RATE_COLUMNS or not cells:
            continue
        row = cells if number is None else [str(number), *cells]
        yield _window(source, reader.line_num, row)


def _window(source: Source, line: int, row: list[str]) -> tuple[int, _Window]:
    try:
        client, start, rate = int(row[0]), float(row[1]), float(row[2] or 0)
        if not (start >= 0 and 0 <= rate < np.inf):
            raise ValueError  # noqa: TRY301 - one message for all that can be wrong with a row
        if rate == 0:
            return client, _Window(start, 0, "", 0.0)
        pattern, shape = row[4], float(row[5])
        if pattern not in ("Gamma", "Weibull") or not 0 < shape < np.inf:
            raise ValueError  # noqa: TRY301
    except (ValueError, IndexError) as error:
        raise source.fault(
            line,
            "needs client, start in s, rate from 0 up, cv, Gamma or Weibull, shape above 0 and scale; "
            f"it is {','.join(row)[:80]!r}",
        ) from error
    return client, _Window(start, round(rate * WINDOW_S), pattern, shape)


def _histograms(source: Source, number: int | None) -> Iterator[tuple[int, float, tuple[Empirical, Empirical]]]:
    """Client, start of the window and the two histograms, of each window that has both."""
    for line, client, at, entry in _length_rows(source, number):
        if "text_tokens" in entry:
            raise source.fault(line, "multimodal lengths (text_tokens) cannot be used; input_tokens can")
        try:
            prompt, output = (_empirical(entry[key]) for key in ("input_tokens", "output_tokens"))
        except (KeyError, ValueError, TypeError, SyntaxError, InputError) as error:
            message = f"must hold histograms named input_tokens and output_tokens ({error!r:.80})"
            raise source.fault(line, message) from error
        if prompt is not None and output is not None:
            yield client, at, (prompt, output)


def _length_rows(source: Source, number: int | None) -> Iterator[tuple[int | None, int, float, dict[str, object]]]:
    """Line, client, start of the window, and what there is to it."""
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


def _empirical(histogram: object) -> Empirical | None:
    """From [values, weights], or from the text of a dictionary; None where it is empty."""
    if isinstance(histogram, str):
        counts = ast.literal_eval(histogram)
        values, weights = list(counts), list(counts.values())
    elif isinstance(histogram, list) and len(histogram) == 2:
        values, weights = histogram
    else:
        raise ValueError(f"{histogram!r:.40} is no histogram")
    return Empirical(values, weights) if values else None


_USERS = {"human", "user"}
_MODELS = {"gpt", "assistant", "chatgpt", "bard", "bing", "model"}


def read_sharegpt(source: Source, count_tokens: Callable[[str], int] | None) -> Trace:
    """A request for each answer; its prompt is everything said before it in the conversation.

    All requests come at 0: ShareGPT has no times. ``extra`` holds "session", the number of the
    conversation, "prompt", all that was said before, "output", the answer, and where entries name it "model".

    Raises:
        TraceError: The file is not JSON, or holds no answered message.
    """
    count = count_tokens or _estimated
    rows = [
        (session, model, *request)
        for session, (model, turns) in enumerate(_conversations(source))
        for request in _requests(turns, count)
    ]
    if not rows:
        raise source.fault(None, "no conversation in it has an answered message")
    session, model, prompt, output, asked, answered = zip(*rows, strict=True)
    texts = {"prompt": asked, "output": answered} | ({"model": model} if any(model) else {})
    extra = {"session": np.array(session)} | {k: np.array(v, object) for k, v in texts.items()}
    name = source.name if count_tokens else f"{source.name} (tokens estimated)"
    return Trace(np.zeros(len(rows)), np.array(prompt), np.array(output), extra, name)


def _estimated(text: str) -> int:
    return estimated_tokens(text) if text else 0


def _conversations(source: Source) -> Iterator[tuple[str, list[Any]]]:
    """The model that answers, where it is named, and the turns."""
    for line, entry in _entries(source):
        turns = entry.get("conversations", entry.get("conversation", entry.get("messages")))
        if not isinstance(turns, list):
            raise source.fault(line, "each entry must hold a list named conversations")
        yield str(entry.get("model") or ""), turns


def _entries(source: Source) -> Iterable[tuple[int | None, dict[str, Any]]]:
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


def _requests(turns: list[Any], count: Callable[[str], int]) -> Iterator[tuple[int, int, str, str]]:
    """Prompt tokens, output tokens, all that was said before, and the answer, for each answer to a user."""
    history, said, asked = 0, "", False
    for turn in turns:
        if not isinstance(turn, dict):
            continue
        speaker = str(turn.get("from", turn.get("role", ""))).lower()
        text = str(turn.get("value", turn.get("content")) or "")
        tokens = count(text)
        if speaker in _MODELS and asked and tokens > 0:
            yield history, tokens, said, text
        asked = speaker in _USERS and bool(text)
        history += tokens
        said = f"{said}\n\n{text}" if said else text


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
