"""Results of other programs, in the records of a simulation."""

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
from lengthwise.schema.records import Measured, Records, Status, TokenTimes
from lengthwise.schema.workload import Workload

NONE = math.nan


@dataclass(slots=True)
class Report:
    """One request, in seconds on one clock for all; NaN for what was not told.

    Attributes:
        arrival_s: When it was due, or sent where only that is known.
        prompt_tokens: As counted there.
        output_tokens: Produced.
        first_s: First token.
        last_s: Last token.
        scheduled_s: First put into a step.
        queued_s: Came to the engine's queue.
        gap_s: Times between pieces of the answer, after the first.
        wanted_tokens: Asked for, where it was told; 0: as many as came.
        failure: Of what it failed; "" where it did not.
        cut_off: Whether the end of the run, or the user, cut it off.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float = NONE
    last_s: float = NONE
    scheduled_s: float = NONE
    queued_s: float = NONE
    gap_s: Sequence[float] = ()
    wanted_tokens: int = 0
    failure: str = ""
    cut_off: bool = False

    @property
    def status(self) -> Status:
        """The bucket."""
        if self.cut_off or self.failure:
            return Status.REJECTED if self.failure.startswith("http ") else Status.UNFINISHED
        return Status.FINISHED


@dataclass
class Story:
    """All that a file tells.

    Attributes:
        source: The program.
        rows: Its requests.
        metadata: JSON-able.
        warnings: What the format does not tell.
        concurrency: Of a closed loop.
    """

    source: str
    rows: list[Report]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    concurrency: int | None = None


def measured_of(story: Story, name: str) -> Measured:
    """The story in order of arrival, its first request at 0.

    Raises:
        InputError: It has no requests, or one of them has lengths that cannot be.
    """
    if not story.rows:
        raise InputError("results must hold at least one request; these hold none")
    rows = sorted(story.rows, key=lambda row: row.arrival_s)
    zero_s = rows[0].arrival_s if math.isfinite(rows[0].arrival_s) else 0.0
    times = _times(rows, zero_s)
    done = [row.status == Status.FINISHED for row in rows]
    records = _records(rows, times, done, name)
    arrival_s = records.requests.arrival_s
    closed = story.concurrency is not None
    extra = {} if np.isnan(times["queued_s"]).all() else {"queued_s": times["queued_s"]}
    workload = Workload(
        arrival_s=np.zeros(len(rows)) if closed else arrival_s,
        prompt_tokens=np.array([max(1, row.prompt_tokens) for row in rows]),
        output_tokens=np.array([max(1, row.wanted_tokens or row.output_tokens) for row in rows]),
        extra=extra,
        concurrency=story.concurrency,
        name=name,
    )
    errors = Counter(row.failure for row in rows if row.failure)
    tokens = _pieces(rows, zero_s)
    return Measured(
        records, workload, story.source, dict(story.metadata), tuple(_warnings(story, rows)), dict(errors), tokens
    )


def _times(rows: Sequence[Report], zero_s: float) -> dict[str, Any]:
    names = ("arrival_s", "first_s", "last_s", "scheduled_s", "queued_s")
    return {name: np.array([getattr(row, name) for row in rows], float) - zero_s for name in names}


def _records(rows: Sequence[Report], times: Mapping[str, Any], done: Sequence[bool], name: str) -> Records:
    ends = np.concatenate([times["last_s"], times["first_s"], times["arrival_s"]])
    tokens = _pieces(rows, rows[0].arrival_s)
    gaps = np.array([gap for row in rows for gap in row.gap_s], float)
    return records_of(
        arrival_s=times["arrival_s"],
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        output_tokens=np.array([row.output_tokens for row in rows]),
        status=[row.status for row in rows],
        first_token_s=times["first_s"],
        finished_s=np.where(done, times["last_s"], np.nan),
        end_s=float(np.nanmax(ends)),
        scheduled_s=times["scheduled_s"],
        tokens=tokens,
        gap_s=gaps,
        name=name,
    )


def _pieces(rows: Sequence[Report], zero_s: float) -> TokenTimes | None:
    """Times of pieces, where gaps were told; a piece is one token where they are as many."""
    if not any(len(row.gap_s) for row in rows):
        return None
    at_s: list[Any] = []
    tokens: list[Any] = []
    for row in rows:
        known = math.isfinite(row.first_s)
        pieces = len(row.gap_s) + 1 if known else 0
        at_s.append(row.first_s - zero_s + np.concatenate([[0.0], np.cumsum(row.gap_s)]) if known else [])
        tokens.append(np.full(pieces, int(pieces == row.output_tokens)))
    start = np.concatenate([[0], np.cumsum([len(part) for part in at_s])]).astype(np.int64)
    return TokenTimes(start, np.concatenate(at_s).astype(float), np.concatenate(tokens).astype(np.int64))


def _warnings(story: Story, rows: Sequence[Report]) -> list[str]:
    made = list(story.warnings)
    finished = [row for row in rows if row.status == Status.FINISHED]
    vague = sum(len(row.gap_s) > 0 and len(row.gap_s) + 1 != row.output_tokens for row in finished)
    if vague:
        made.append(
            f"in {vague:,} of {len(finished):,} answers pieces are not tokens: times between tokens (TBT) are "
            "times between pieces there"
        )
    if not any(len(row.gap_s) for row in finished):
        made.append("times between tokens are not told; nothing is known of TBT")
    if len(finished) < len(rows):
        made.append(
            f"{len(rows) - len(finished):,} of {len(rows):,} requests did not finish; latencies are of the rest"
        )
    return made


_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def is_aiperf_record(row: Any) -> bool:
    """Whether a line is such a record."""
    return isinstance(row, dict) and "metrics" in row and "request_start_ns" in (row.get("metadata") or {})


def read_aiperf(lines: Sequence[Mapping[str, Any]]) -> Story:
    """The profiled requests; they are due when the rate limiter let them go, where that was told."""
    kept = [line for line in lines if line["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    issued = all(line["metadata"].get("credit_issued_ns") for line in kept)
    warnings = [] if issued else ["requests arrive when they were sent: how late the client was is not told"]
    warnings.append("whether it was an open or a closed loop is not told; arrivals are taken for given")
    zero_ns = min((_started(line, issued=issued) for line in kept), default=0)
    return Story("aiperf", [_aiperf_request(line, zero_ns, issued=issued) for line in kept], {}, warnings)


def _started(line: Mapping[str, Any], *, issued: bool) -> int:
    return int(line["metadata"]["credit_issued_ns" if issued else "request_start_ns"])


def _aiperf_request(line: Mapping[str, Any], zero_ns: int, *, issued: bool) -> Report:
    """Times from the first request on: nanoseconds since 1970 lose digits in a float."""
    metrics, meta = line.get("metrics") or {}, line["metadata"]
    arrival_s = (_started(line, issued=issued) - zero_ns) * 1e-9
    sent_s = (int(meta["request_start_ns"]) - zero_ns) * 1e-9
    error = line.get("error")
    prompt = int(_value(metrics, "input_sequence_length", "error_isl") or 0)
    if error or meta.get("was_cancelled"):
        code = (error or {}).get("code")
        known = isinstance(code, int) and 400 <= code < 600 and code != 499
        reason = f"http {code}" if known else str((error or {}).get("type") or "cancelled")
        cut_off = bool(meta.get("was_cancelled"))
        return Report(arrival_s, prompt, 0, failure="" if cut_off else reason, cut_off=cut_off)
    ttft_s = _seconds(metrics, "time_to_first_token")
    last_s = sent_s + _seconds(metrics, "request_latency")
    gaps = _seconds_of(metrics, "inter_chunk_latency")
    output = int(_value(metrics, "output_sequence_length", "output_token_count") or 0)
    return Report(arrival_s, prompt, output, sent_s + ttft_s, last_s, gap_s=gaps)


def _value(metrics: Mapping[str, Any], *names: str) -> Any:
    found = (metrics[name] for name in names if name in metrics)
    return next((one.get("value") if isinstance(one, dict) else one for one in found), None)


def _seconds(metrics: Mapping[str, Any], name: str) -> float:
    value = _value(metrics, name)
    return NONE if value is None else float(value) * _UNITS[metrics[name].get("unit", "ms")]


def _seconds_of(metrics: Mapping[str, Any], name: str) -> list[float]:
    values = _value(metrics, name)
    if not isinstance(values, list):
        return []
    unit = _UNITS[metrics[name].get("unit", "ms")]
    return [float(value) * unit for value in values]


_NEEDED = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


def is_engine_log_record(row: Any) -> bool:
    """Whether a line is such a request."""
    return isinstance(row, dict) and {"input_toks", "queued_ts", "last_token_ts"} <= set(row)


def read_engine_log(lines: Sequence[Mapping[str, Any]]) -> Story:
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
    rows = [_engine_log_request(line, shift_s) for line in lines]
    aligned = (
        "arrivals are of another clock than the engine's times; they were aligned so that the fastest request "
        "took no time from arrival to queue"
    )
    warnings = [aligned]
    if waits and waits[-1] > 0.05:
        warnings.append(
            f"requests took up to {waits[-1]:.2f} s from arrival to the engine's queue (half of them "
            f"{waits[len(waits) // 2]:.3f} s): the front end was busy; workload.extra['queued_s'] has those times"
        )
    metadata = {"clock": "the engine's monotonic one", "shift_s": shift_s}
    return Story("llmservingsim", rows, metadata, warnings)


def _engine_log_request(line: Mapping[str, Any], shift_s: float) -> Report:
    return Report(
        line["arrival_time"] + shift_s,
        int(line["input_toks"]),
        int(line["output_toks"]),
        float(line["first_token_ts"]),
        float(line["last_token_ts"]),
        scheduled_s=float(line.get("scheduled_ts") or "nan"),
        queued_s=float(line["queued_ts"]),
    )


_OLD = {"request_start": "start_time", "first_token_iteration": "first_token_time",
        "last_token_iteration": "last_token_time", "request_end": "end_time"}  # fmt: skip
_CLOSED = frozenset({"concurrent", "synchronous"})


def is_guidellm_report(body: Any) -> bool:
    """Whether it is such a report."""
    return isinstance(body, dict) and isinstance(body.get("benchmarks"), list)


def read_guidellm(body: Mapping[str, Any], which: int | None) -> Story:
    """The requests of one of its benchmarks.

    Args:
        body: The report.
        which: Its place, from 0; None: the only one.

    Raises:
        InputError: There are several and none was named, or it kept no requests.
    """
    benchmarks = body["benchmarks"]
    if not benchmarks:
        raise InputError(
            "a GuideLLM report must hold a benchmark; this one holds none. Take the report of a run that finished"
        )
    if which is None and len(benchmarks) != 1:
        entries = ", ".join(f"{i}: {_strategy(one).get('type_', '?')}" for i, one in enumerate(benchmarks))
        raise InputError(f"a GuideLLM report holds {len(benchmarks)} benchmarks; name one ({entries})")
    try:
        one = benchmarks[which or 0]
    except IndexError:
        raise InputError(f"there is no benchmark {which}; the report holds {len(benchmarks)}") from None
    requests = one.get("requests") or {}
    rows = [
        _guidellm_request(request, bucket)
        for bucket in ("successful", "incomplete", "errored")
        for request in requests.get(bucket) or []
    ]
    rows = [row for row in rows if row is not None]
    strategy = _strategy(one)
    due = any(_timings(r).get("targeted_start") for r in requests.get("successful") or [])
    closed = str(strategy.get("type_")) in _CLOSED
    warnings = [] if due else ["requests arrive when they were sent: how late the client was is not told"]
    metadata = {"strategy": dict(strategy), "args": body.get("args"), "metadata": body.get("metadata")}
    streams = int(strategy.get("streams") or 1) if closed else None
    return Story("guidellm", [row for row in rows if row], metadata, warnings, streams)


def _strategy(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the versions keep how requests were timed."""
    for place in ("config", "args"):
        found = (one.get(place) or {}).get("strategy")
        if isinstance(found, dict):
            return found
    scheduler = one.get("scheduler")
    found = scheduler.get("strategy") if isinstance(scheduler, dict) else None
    return found if isinstance(found, dict) else {}


def _timings(request: Mapping[str, Any]) -> Mapping[str, Any]:
    info = request.get("info") or request.get("scheduler_info") or {}
    timings = info.get("timings") or info.get("request_timings")
    return timings if isinstance(timings, dict) else {n: request.get(o) for n, o in _OLD.items()}


def _guidellm_request(request: Mapping[str, Any], bucket: str) -> Report | None:
    """A request; None where it never started."""
    at = _timings(request)
    begun = at.get("targeted_start") or at.get("request_start") or at.get("resolve_start")
    if begun is None:
        return None
    first, last = at.get("first_token_iteration"), at.get("last_token_iteration")
    last = last if last is not None else at.get("request_end")
    failure = str(request.get("error") or (request.get("info") or {}).get("error") or "failed")
    return Report(
        float(begun),
        _tokens(request, "prompt_tokens", "input_metrics"),
        _tokens(request, "output_tokens", "output_metrics"),
        NONE if first is None else float(first),
        NONE if last is None else float(last),
        failure=failure.partition(":")[0][:60] if bucket == "errored" else "",
        cut_off=bucket == "incomplete",
    )


def _tokens(request: Mapping[str, Any], name: str, metrics: str) -> int:
    told = request.get(name)
    if told is None:
        inner = request.get(metrics) or {}
        told = inner.get("total_tokens") or inner.get("text_tokens")
    return int(told or 0)


_METADATA = ("backend", "model_id", "tokenizer_id", "date", "request_rate", "burstiness", "max_concurrency", "duration")
_LISTS = ("input_lens", "output_lens", "ttfts", "itls")


def is_vllm_result(body: Any) -> bool:
    """Whether it is such a result, detailed or not."""
    return isinstance(body, dict) and "total_input_tokens" in body and "request_throughput" in body


def read_vllm(body: Mapping[str, Any]) -> Story:
    """Its requests; arrivals are when they were sent.

    Raises:
        InputError: It was saved without ``--save-detailed``, or its lists differ in length.
    """
    missing = [name for name in _LISTS if name not in body]
    if missing:
        raise InputError(
            f"a result of vllm bench serve must hold its requests; {', '.join(missing)} are missing: "
            "run it with --save-result --save-detailed"
        )
    n = len(body["ttfts"])
    starts = body.get("start_times") or []
    errors = body.get("errors") or [""] * n
    lists = [body[name] for name in _LISTS] + [errors] + ([starts] if starts else [])
    if any(len(one) != n for one in lists):
        raise InputError(
            f"lists of a result must have a value a request ({n}); they have {[len(one) for one in lists]}"
        )
    warnings = ["requests arrive when they were sent: how late the client was is not told"]
    if not starts:
        warnings = ["arrivals are not told (start_times): every request counts from 0, loads over time are unknown"]
    rows = [_vllm_request(body, i, starts[i] if starts else 0.0, errors[i]) for i in range(n)]
    metadata = {name: body[name] for name in _METADATA if name in body}
    limit = body.get("max_concurrency")
    if limit and body.get("request_rate") in {"inf", math.inf, None}:
        return Story("vllm bench serve", rows, metadata, warnings, int(limit))
    return Story("vllm bench serve", rows, metadata, warnings)


def _vllm_request(body: Mapping[str, Any], at: int, start_s: float, error: str) -> Report:
    prompt, output = int(body["input_lens"][at]), int(body["output_lens"][at])
    if error or output == 0:
        return Report(start_s, prompt, output, failure=_reason(error))
    gaps: Sequence[float] = body["itls"][at]
    first_s = start_s + float(body["ttfts"][at]) if body["ttfts"][at] else NONE
    return Report(start_s, prompt, output, first_s, first_s + sum(gaps), gap_s=gaps)


def _reason(error: str) -> str:
    """The last line of a traceback, without its details."""
    last = error.strip().splitlines()[-1] if error.strip() else "empty answer"
    return last.partition(":")[0][:60].rpartition(".")[2] or "failed"


FORMATS = {
    "vllm": "vllm bench serve --save-result --save-detailed, one JSON object",
    "guidellm": "GuideLLM's benchmarks.json",
    "aiperf": "AIPerf's profile_export.jsonl",
    "llmservingsim": "JSON lines of queued_ts, scheduled_ts, first_token_ts, last_token_ts",
}
"""What ``read_foreign`` reads."""


def read_foreign(path: Path | str, *, benchmark: int | None = None) -> Measured:
    """What another program measured, in the records of a simulation; packed with gzip or not.

    What its format does not tell (when requests were due, times between single tokens) is among the doubts.

    Args:
        path: The file.
        benchmark: Which of several in a GuideLLM report, from 0.

    Raises:
        InputError: The file is missing, cut off, of no known format, or lacks what is needed.
    """
    path = Path(path)
    text = _text(path)
    try:
        story = _story(text, benchmark)
        name = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
        return measured_of(story, name)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: a request lacks a value, or has one that cannot be used: {error!r}") from error


def _story(text: str, benchmark: int | None) -> Story:
    try:
        body = json.loads(text)
    except ValueError:
        return _of_lines(_lines(text))
    if is_vllm_result(body):
        return read_vllm(body)
    if is_guidellm_report(body):
        return read_guidellm(body, benchmark)
    return _of_lines([body])


def _of_lines(lines: list[Any]) -> Story:
    if lines and is_aiperf_record(lines[0]):
        return read_aiperf(lines)
    if lines and is_engine_log_record(lines[0]):
        return read_engine_log(lines)
    if lines and is_vllm_result(lines[0]):
        raise InputError(f"it holds {len(lines)} results of vllm bench serve (--append-result); give a file each")
    known = "; ".join(f"{name}: {words}" for name, words in FORMATS.items())
    raise InputError(f"results must be of a known format; these are not. Known are {known}")


def _lines(text: str) -> list[Any]:
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                lines.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"line {number} must be JSON; it is cut off or something else: {error}") from error
    return lines


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no file of results {path}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be a whole text file, packed with gzip or not; {error}") from error
