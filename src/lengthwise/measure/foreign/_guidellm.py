"""GuideLLM's ``benchmarks.json``: of the old form (flat requests) and the new (``info.timings``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthwise.measure.foreign._rows import NONE, Story, Told
from lengthwise.schema.errors import InputError

_OLD = {"request_start": "start_time", "first_token_iteration": "first_token_time",
        "last_token_iteration": "last_token_time", "request_end": "end_time"}  # fmt: skip
_CLOSED = frozenset({"concurrent", "synchronous"})


def fits(body: Any) -> bool:
    """Whether it is such a report."""
    return isinstance(body, dict) and isinstance(body.get("benchmarks"), list)


def story_of(body: Mapping[str, Any], which: int | None) -> Story:
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
        listed = ", ".join(f"{i}: {_strategy(one).get('type_', '?')}" for i, one in enumerate(benchmarks))
        raise InputError(f"a GuideLLM report holds {len(benchmarks)} benchmarks; name one ({listed})")
    try:
        one = benchmarks[which or 0]
    except IndexError:
        raise InputError(f"there is no benchmark {which}; the report holds {len(benchmarks)}") from None
    requests = one.get("requests") or {}
    rows = [
        _row(request, bucket)
        for bucket in ("successful", "incomplete", "errored")
        for request in requests.get(bucket) or []
    ]
    rows = [row for row in rows if row is not None]
    strategy = _strategy(one)
    due = any(_timings(r).get("targeted_start") for r in requests.get("successful") or [])
    closed = str(strategy.get("type_")) in _CLOSED
    doubts = [] if due else ["requests arrive when they were sent: how late the client was is not told"]
    facts = {"strategy": dict(strategy), "args": body.get("args"), "metadata": body.get("metadata")}
    streams = int(strategy.get("streams") or 1) if closed else None
    return Story("guidellm", [row for row in rows if row], facts, doubts, streams)


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


def _row(request: Mapping[str, Any], bucket: str) -> Told | None:
    """A request; None where it never started."""
    at = _timings(request)
    begun = at.get("targeted_start") or at.get("request_start") or at.get("resolve_start")
    if begun is None:
        return None
    first, last = at.get("first_token_iteration"), at.get("last_token_iteration")
    last = last if last is not None else at.get("request_end")
    failure = str(request.get("error") or (request.get("info") or {}).get("error") or "failed")
    return Told(
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
