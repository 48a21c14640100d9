"""ServeGen: measured rates, burstiness and length histograms of each client, turned into requests.

Two layouts are read: the folder of ServeGen itself (``chunk-N-trace.csv`` and ``chunk-N-dataset.json``, a
pair a client) and one pair of files for all clients (``X_rates.csv`` and ``X_length_pmfs.jsonl``).
Source: Xiang et al., ServeGen, arXiv:2505.09999.
"""

from __future__ import annotations

import ast
import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, TraceError
from lengthwise.workload._source import Source
from lengthwise.workload._trace import Trace
from lengthwise.workload.tables import Empirical

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


def _histograms(
    source: Source, number: int | None
) -> Iterator[tuple[int, float, tuple[Empirical, Empirical]]]:
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


def _length_rows(
    source: Source, number: int | None
) -> Iterator[tuple[int | None, int, float, dict[str, object]]]:
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
