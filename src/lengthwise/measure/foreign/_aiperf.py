"""AIPerf's ``profile_export.jsonl``: a record a request, with its metrics and their units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.measure.foreign._rows import NONE, Story, Told

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def fits(row: Any) -> bool:
    """Whether a line is such a record."""
    return isinstance(row, dict) and "metrics" in row and "request_start_ns" in (row.get("metadata") or {})


def story_of(lines: Sequence[Mapping[str, Any]]) -> Story:
    """The profiled requests; they are due when the rate limiter let them go, where that was told."""
    kept = [line for line in lines if line["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    issued = all(line["metadata"].get("credit_issued_ns") for line in kept)
    doubts = [] if issued else ["requests arrive when they were sent: how late the client was is not told"]
    doubts.append("whether it was an open or a closed loop is not told; arrivals are taken for given")
    zero_ns = min((_begun(line, issued=issued) for line in kept), default=0)
    return Story("aiperf", [_row(line, zero_ns, issued=issued) for line in kept], {}, doubts)


def _begun(line: Mapping[str, Any], *, issued: bool) -> int:
    return int(line["metadata"]["credit_issued_ns" if issued else "request_start_ns"])


def _row(line: Mapping[str, Any], zero_ns: int, *, issued: bool) -> Told:
    """Times from the first request on: nanoseconds since 1970 lose digits in a float."""
    metrics, meta = line.get("metrics") or {}, line["metadata"]
    arrival_s = (_begun(line, issued=issued) - zero_ns) * 1e-9
    sent_s = (int(meta["request_start_ns"]) - zero_ns) * 1e-9
    error = line.get("error")
    prompt = int(_value(metrics, "input_sequence_length", "error_isl") or 0)
    if error or meta.get("was_cancelled"):
        code = (error or {}).get("code")
        known = isinstance(code, int) and 400 <= code < 600 and code != 499
        reason = f"http {code}" if known else str((error or {}).get("type") or "cancelled")
        cut_off = bool(meta.get("was_cancelled"))
        return Told(arrival_s, prompt, 0, failure="" if cut_off else reason, cut_off=cut_off)
    ttft_s = _seconds(metrics, "time_to_first_token")
    last_s = sent_s + _seconds(metrics, "request_latency")
    gaps = _seconds_of(metrics, "inter_chunk_latency")
    output = int(_value(metrics, "output_sequence_length", "output_token_count") or 0)
    return Told(arrival_s, prompt, output, sent_s + ttft_s, last_s, gap_s=gaps)


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
