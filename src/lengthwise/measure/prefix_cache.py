"""Prompt tokens that a server found in its prefix cache instead of computing them, by the server's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.schema.records import RunResult

KEY = "prefix_cache"
MAX_CACHED_SHARE = 0.03  # share of cached prompt tokens above which TTFT is that of clearly shorter prompts
LOOKED_UP = ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total")
FOUND = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total", "sglang:cached_tokens_total")
"""Counters of vLLM 0.32 (``vllm/v1/metrics/loggers.py``; recomputed prompts of preempted requests do not count) and of
SGLang by its documentation (it omits cached_tokens_total while this is 0)."""


def cache_counts(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, dict[str, float]]:
    """Return a run's metadata on the server's prefix cache from scrapes before and after, or {} without counts."""
    counted = None if before is None or after is None else cached_between(before, after)
    return {} if counted is None else {KEY: counted}


def cached_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """Return how many prompt tokens the server looked up and found between two scrapes, or None without counts."""
    if not any(name in after for name in LOOKED_UP):
        return None
    looked_up, found = (
        sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names) for names in (LOOKED_UP, FOUND)
    )
    return None if looked_up < 0 or found < 0 else {"looked_up_tokens": looked_up, "found_tokens": found}


def cached_tokens(metadata: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Return how many prompt tokens the server looked up and found during a run, or None without counts."""
    counted, metrics = metadata.get(KEY), metadata.get("metrics")
    if isinstance(counted, Mapping):
        return counted
    if not isinstance(metrics, Mapping):
        return None
    columns = {name: column for name in (*LOOKED_UP, *FOUND) if isinstance(column := metrics.get(name), Sequence)}
    known = {
        name: values for name, column in columns.items() if (values := [float(v) for v in column if v is not None])
    }
    first, last = ({name: values[end] for name, values in known.items() if values} for end in (0, -1))
    return cached_between(first, last)


def cache_warning(metadata: Mapping[str, Any]) -> str | None:
    """Return a warning if the server found cached prompt tokens although no shared prefix was requested."""
    cached = cached_tokens(metadata)
    if cached is None or _shared_prefix(metadata) > 0 or _found_share(cached) <= MAX_CACHED_SHARE:
        return None
    hint = "" if metadata.get("prompts") == "texts" else "send prompts that are new to it (another salt), or "
    reason = f"TTFT is that of shorter prompts; {hint}start it without that cache (vLLM: --no-enable-prefix-caching)"
    return f"the server had {_words(cached)} in its prefix cache, though no shared prefix was requested: {reason}"


def prefix_warnings(measured: RunResult) -> list[str]:
    """Return warnings that cached prefixes make the run unlike a simulation, unless the run already has them.

    There are none if the workload states which prompts share prefixes, because a simulation then caches them, too.
    """
    metadata = measured.metadata
    if measured.workload.prefixes is not None:
        return []
    shared, cached, warning = _shared_prefix(metadata), cached_tokens(metadata), cache_warning(metadata)
    if shared > 0:
        found = "" if cached is None else f" (the server had {_words(cached)} in its prefix cache)"
        own = f"its prompts have {100 * shared:.0f} % of their tokens in common (shared prefix){found}"
        return [f"{own}, and a simulation computes all: what the server's cache saved would pass for speed"]
    return [] if warning is None or warning in measured.warnings else [warning]


def _shared_prefix(metadata: Mapping[str, Any]) -> float:
    arguments = metadata.get("arguments")
    shared = arguments.get("shared_prefix") if isinstance(arguments, Mapping) else None
    return float(shared) if isinstance(shared, int | float) else 0.0


def _found_share(cached: Mapping[str, float]) -> float:
    return cached["found_tokens"] / max(cached["looked_up_tokens"], 1.0)


def _words(cached: Mapping[str, float]) -> str:
    found, of = cached["found_tokens"], cached["looked_up_tokens"]
    return f"{found:,.0f} of {of:,.0f} prompt tokens ({100 * _found_share(cached):.1f} %)"
