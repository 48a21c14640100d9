"""Reads results of other load generators (vllm bench serve, GuideLLM, AIPerf) and an engine's log as measured runs."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.measure.client_records import records_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import RunResult, Status, TokenTimes
from lengthwise.schema.workload import Workload

UNKNOWN = math.nan
SENT_ARRIVALS = "requests count from when they were sent: how late the client was is unknown"


@dataclass(slots=True)
class Request:
    """One request of another load generator. Times are in seconds on one clock, and NaN if unknown."""

    arrival_s: float  # when it was due, or sent where only that is known
    prompt_tokens: int
    output_tokens: int
    first_token_s: float = UNKNOWN
    last_token_s: float = UNKNOWN
    scheduled_s: float = UNKNOWN
    queued_s: float = UNKNOWN  # when it entered the engine's queue
    gap_s: Sequence[float] = ()  # between its chunks
    requested_tokens: int = 0  # of the output; 0: unknown
    failure: str = ""  # empty if there was none
    cut_off: bool = False  # cancelled by the end of the run, or by the user

    @property
    def status(self) -> Status:
        """Status of the request in records."""
        if self.cut_off or self.failure:
            return Status.REJECTED if self.failure.startswith("http ") else Status.UNFINISHED
        return Status.FINISHED


@dataclass
class Results:
    """The requests and metadata of a results file."""

    source: str
    rows: list[Request]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    concurrency: int | None = None


def run_result(results: Results, name: str) -> RunResult:
    """Convert results to a run of requests in order of arrival, from time 0. Raises InputError without requests."""
    if not results.rows:
        raise InputError("results must hold at least one request; these hold none")
    rows = sorted(results.rows, key=lambda row: row.arrival_s)
    zero_s = rows[0].arrival_s if math.isfinite(rows[0].arrival_s) else 0.0

    def times(attribute: str) -> Any:
        return np.array([getattr(row, attribute) for row in rows], float) - zero_s

    arrival_s, first_s, last_s, queued_s = map(times, ("arrival_s", "first_token_s", "last_token_s", "queued_s"))
    status = np.array([row.status for row in rows])
    finished = [row for row in rows if row.status == Status.FINISHED]
    tokens = _token_times(rows, zero_s)
    records = records_of(
        arrival_s=arrival_s,
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        output_tokens=np.array([row.output_tokens for row in rows]),
        status=status,
        first_token_s=first_s,
        finished_s=np.where(status == Status.FINISHED, last_s, np.nan),
        scheduled_s=times("scheduled_s"),
        end_s=float(np.nanmax(np.concatenate([last_s, first_s, arrival_s]))),
        tokens=tokens,
        gap_s=np.array([gap for row in rows for gap in row.gap_s], float),
        name=name,
    )
    workload = Workload(
        arrival_s=np.zeros(len(rows)) if results.concurrency is not None else arrival_s,
        prompt_tokens=np.array([max(1, row.prompt_tokens) for row in rows]),
        output_tokens=np.array([max(1, row.requested_tokens or row.output_tokens) for row in rows]),
        extra={} if np.isnan(queued_s).all() else {"queued_s": queued_s},
        concurrency=results.concurrency,
        name=name,
    )
    warnings = list(results.warnings)
    chunked = sum(len(row.gap_s) > 0 and len(row.gap_s) + 1 != row.output_tokens for row in finished)
    if chunked:
        answers = f"in {chunked:,} of {len(finished):,} answers"
        warnings.append(f"{answers} chunks are not tokens: times between tokens (TBT) are times between chunks there")
    if not any(len(row.gap_s) for row in finished):
        warnings.append("times between tokens are missing; TBT is unknown")
    if len(finished) < len(rows):
        warnings.append(
            f"{len(rows) - len(finished):,} of {len(rows):,} requests did not finish; latencies are of the rest"
        )
    errors = dict(Counter(row.failure for row in rows if row.failure))
    return RunResult(records, workload, results.source, dict(results.metadata), tuple(warnings), errors, tokens)


def _token_times(rows: Sequence[Request], zero_s: float) -> TokenTimes | None:
    if not any(len(row.gap_s) for row in rows):
        return None
    at_s: list[Any] = [
        row.first_token_s - zero_s + np.cumsum([0.0, *row.gap_s]) if math.isfinite(row.first_token_s) else []
        for row in rows
    ]
    tokens = [np.full(len(at), int(len(at) == row.output_tokens)) for at, row in zip(at_s, rows, strict=True)]
    start = np.concatenate([[0], np.cumsum([len(part) for part in at_s])]).astype(np.int64)
    return TokenTimes(start, np.concatenate(at_s).astype(float), np.concatenate(tokens).astype(np.int64))


_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def read_aiperf(lines: Sequence[Mapping[str, Any]]) -> Results:
    """Read AIPerf's profiled requests. They are due when the rate limiter releases them or, if unknown, when sent."""
    profiled = [line for line in lines if line["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    released = all(line["metadata"].get("credit_issued_ns") for line in profiled)
    due = "credit_issued_ns" if released else "request_start_ns"
    warnings = [] if released else [SENT_ARRIVALS]
    warnings.append("whether the loop was open or closed is unknown; arrivals are assumed to be given")
    # Times count from the first request, because nanoseconds since 1970 lose digits in a float.
    zero_ns = min((int(line["metadata"][due]) for line in profiled), default=0)
    rows = []
    for line in profiled:
        metrics, meta, error = line.get("metrics") or {}, line["metadata"], line.get("error") or {}
        arrival_s, sent_s = ((int(meta[name]) - zero_ns) * 1e-9 for name in (due, "request_start_ns"))
        prompt = int(_value(metrics, "input_sequence_length", "error_isl") or 0)
        if line.get("error") or meta.get("was_cancelled"):
            code, cut_off = error.get("code"), bool(meta.get("was_cancelled"))
            http = isinstance(code, int) and 400 <= code < 600 and code != 499
            reason = f"http {code}" if http else str(error.get("type") or "cancelled")
            rows.append(Request(arrival_s, prompt, 0, failure="" if cut_off else reason, cut_off=cut_off))
            continue
        gaps = _value(metrics, "inter_chunk_latency")
        output = _value(metrics, "output_sequence_length", "output_token_count")
        first_s, last_s = (sent_s + _seconds(metrics, name) for name in ("time_to_first_token", "request_latency"))
        gap_s = []
        if isinstance(gaps, list):
            gap_s = [_UNITS[metrics["inter_chunk_latency"].get("unit", "ms")] * float(gap) for gap in gaps]
        rows.append(Request(arrival_s, prompt, int(output or 0), first_s, last_s, gap_s=gap_s))
    return Results("aiperf", rows, {}, warnings)


def _value(metrics: Mapping[str, Any], *names: str) -> Any:
    found = (metrics[name] for name in names if name in metrics)
    return next((one.get("value") if isinstance(one, dict) else one for one in found), None)


def _seconds(metrics: Mapping[str, Any], name: str) -> float:
    value = _value(metrics, name)
    return UNKNOWN if value is None else float(value) * _UNITS[metrics[name].get("unit", "ms")]


_NEEDED = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


def read_engine_log(lines: Sequence[Mapping[str, Any]]) -> Results:
    """Read an engine's log of requests. Times are on the engine's clock. Raises InputError if a value is missing."""
    for at, line in enumerate(lines):
        missing = [name for name in _NEEDED if line.get(name) is None]
        if missing:
            raise InputError(f"request {at} must have {', '.join(_NEEDED)}; it lacks {', '.join(missing)}")
    # The offset of the clocks is unknown: the shortest time from an arrival to the queue is taken as 0.
    shift_s = min((line["queued_ts"] - line["arrival_time"] for line in lines), default=0.0)
    waits_s = sorted(line["queued_ts"] - line["arrival_time"] - shift_s for line in lines)
    rows = []
    for line in lines:
        prompt, output = int(line["input_toks"]), int(line["output_toks"])
        first_s, last_s, queued_s = (float(line[name]) for name in ("first_token_ts", "last_token_ts", "queued_ts"))
        scheduled_s = float(line.get("scheduled_ts") or "nan")
        rows.append(Request(line["arrival_time"] + shift_s, prompt, output, first_s, last_s, scheduled_s, queued_s))
    warnings = ["arrivals, of another clock than the engine's times, were aligned to the request that queued fastest"]
    if waits_s and waits_s[-1] > 0.05:
        warnings.append(
            f"requests took up to {waits_s[-1]:.2f} s from arrival to the engine's queue (half of them "
            f"{waits_s[len(waits_s) // 2]:.3f} s): the front end was busy; workload.extra['queued_s'] has those times"
        )
    return Results("llmservingsim", rows, {"clock": "the engine's monotonic one", "shift_s": shift_s}, warnings)


_OLD_TIMINGS = {"request_start": "start_time", "request_end": "end_time"}
_OLD_TIMINGS |= {"first_token_iteration": "first_token_time", "last_token_iteration": "last_token_time"}


def read_guidellm(body: Mapping[str, Any], index: int | None) -> Results:
    """Read one benchmark of a GuideLLM report.

    The ``index`` may be None if the report has only one benchmark. Raises InputError if there is no such benchmark.
    """
    benchmarks = body["benchmarks"]
    if not benchmarks:
        raise InputError(
            "a GuideLLM report must hold a benchmark; this one holds none. Take the report of a run that finished"
        )
    if index is None and len(benchmarks) != 1:
        entries = ", ".join(f"{i}: {_strategy(one).get('type_', '?')}" for i, one in enumerate(benchmarks))
        raise InputError(f"a GuideLLM report holds {len(benchmarks)} benchmarks; name one ({entries})")
    try:
        benchmark = benchmarks[index or 0]
    except IndexError:
        raise InputError(f"there is no benchmark {index}; the report holds {len(benchmarks)}") from None
    requests = benchmark.get("requests") or {}
    rows = []
    for outcome in ("successful", "incomplete", "errored"):
        for request in requests.get(outcome) or []:
            at = _timings(request)
            arrival_s = at.get("targeted_start") or at.get("request_start") or at.get("resolve_start")
            if arrival_s is None:  # it never started
                continue
            first, last = at.get("first_token_iteration"), at.get("last_token_iteration")
            last = last if last is not None else at.get("request_end")
            failure = str(request.get("error") or (request.get("info") or {}).get("error") or "failed")
            prompt = _tokens(request, "prompt_tokens", "input_metrics")
            output = _tokens(request, "output_tokens", "output_metrics")
            first_s, last_s = (UNKNOWN if at_s is None else float(at_s) for at_s in (first, last))
            reason = failure.partition(":")[0][:60] if outcome == "errored" else ""
            cut_off = outcome == "incomplete"
            rows.append(Request(float(arrival_s), prompt, output, first_s, last_s, failure=reason, cut_off=cut_off))
    strategy = _strategy(benchmark)
    due = any(_timings(request).get("targeted_start") for request in requests.get("successful") or [])
    closed = str(strategy.get("type_")) in {"concurrent", "synchronous"}
    metadata = {"strategy": dict(strategy), "args": body.get("args"), "metadata": body.get("metadata")}
    streams = int(strategy.get("streams") or 1) if closed else None
    return Results("guidellm", rows, metadata, [] if due else [SENT_ARRIVALS], streams)


def _strategy(benchmark: Mapping[str, Any]) -> Mapping[str, Any]:
    places = [place for name in ("config", "args", "scheduler") if isinstance(place := benchmark.get(name), dict)]
    return next((place["strategy"] for place in places if isinstance(place.get("strategy"), dict)), {})


def _timings(request: Mapping[str, Any]) -> Mapping[str, Any]:
    info = request.get("info") or request.get("scheduler_info") or {}
    timings = info.get("timings") or info.get("request_timings")
    return timings if isinstance(timings, dict) else {name: request.get(old) for name, old in _OLD_TIMINGS.items()}


def _tokens(request: Mapping[str, Any], name: str, metrics: str) -> int:
    count = request.get(name)
    if count is None:
        nested = request.get(metrics) or {}
        count = nested.get("total_tokens") or nested.get("text_tokens")
    return int(count or 0)


_METADATA = ("backend", "model_id", "tokenizer_id", "date", "request_rate", "burstiness", "max_concurrency", "duration")
_LISTS = ("input_lens", "output_lens", "ttfts", "itls")


def read_vllm(body: Mapping[str, Any]) -> Results:
    """Read a result of ``vllm bench serve``. Requests arrive when sent. Raises InputError if it has no requests."""
    missing = [name for name in _LISTS if name not in body]
    if missing:
        problem = f"{', '.join(missing)} are missing: run it with --save-result --save-detailed"
        raise InputError(f"a result of vllm bench serve must hold its requests; {problem}")
    n = len(body["ttfts"])
    starts_s = body.get("start_times") or []
    errors = body.get("errors") or [""] * n
    lists = [body[name] for name in _LISTS] + [errors] + ([starts_s] if starts_s else [])
    if any(len(one) != n for one in lists):
        counts = [len(one) for one in lists]
        raise InputError(f"lists of a result must have a value a request ({n}); they have {counts}")
    rows = []
    each = zip(starts_s or [0.0] * n, *(body[name] for name in _LISTS), errors, strict=True)
    for start_s, prompt, output, ttft_s, gaps, error in each:
        if error or int(output) == 0:
            last = error.strip().splitlines()[-1] if error.strip() else "empty answer"
            reason = last.partition(":")[0][:60].rpartition(".")[2] or "failed"
            rows.append(Request(start_s, int(prompt), int(output), failure=reason))
        else:
            first_s = start_s + float(ttft_s) if ttft_s else UNKNOWN
            rows.append(Request(start_s, int(prompt), int(output), first_s, first_s + sum(gaps), gap_s=gaps))
    no_starts = "arrivals are missing (start_times): every request counts from 0, loads over time are unknown"
    metadata = {name: body[name] for name in _METADATA if name in body}
    limit = body.get("max_concurrency")
    concurrency = int(limit) if limit and body.get("request_rate") in {"inf", math.inf, None} else None
    return Results("vllm bench serve", rows, metadata, [SENT_ARRIVALS if starts_s else no_starts], concurrency)


FORMATS = {  # formats that ``read_external_results`` reads
    "vllm": "vllm bench serve --save-result --save-detailed, one JSON object",
    "guidellm": "GuideLLM's benchmarks.json",
    "aiperf": "AIPerf's profile_export.jsonl",
    "llmservingsim": "JSON lines of queued_ts, scheduled_ts, first_token_ts, last_token_ts",
}


def read_external_results(path: Path | str, *, benchmark: int | None = None) -> RunResult:
    """Read a file with another load generator's results, in one of the FORMATS.

    ``benchmark`` is an index in a GuideLLM report. Raises InputError if the file cannot be read or used.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no file of results {path}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be a complete text file, packed with gzip or not; {error}") from error
    try:
        return run_result(_results(text, benchmark), path.name.removesuffix(".gz").rpartition(".")[0] or path.name)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: a request lacks a value, or has one that cannot be used: {error!r}") from error


def _results(text: str, benchmark: int | None) -> Results:
    try:
        lines = [json.loads(text)]
    except ValueError:
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                lines += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise InputError(f"line {number} must be JSON; it is cut off or something else: {error}") from error
    first: Any = lines[0] if lines else None
    match first:
        case {"total_input_tokens": _, "request_throughput": _}:
            if len(lines) > 1:
                raise InputError(
                    f"it holds {len(lines)} results of vllm bench serve (--append-result); give a file each"
                )
            return read_vllm(first)
        case {"benchmarks": list()} if len(lines) == 1:
            return read_guidellm(first, benchmark)
        case {"metrics": _, "metadata": {"request_start_ns": _}}:
            return read_aiperf(lines)
        case {"input_toks": _, "queued_ts": _, "last_token_ts": _}:
            return read_engine_log(lines)
    known = "; ".join(f"{name}: {words}" for name, words in FORMATS.items())
    raise InputError(f"results must be of a known format; these are not. Known are {known}")
