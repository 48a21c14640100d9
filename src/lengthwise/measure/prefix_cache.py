"""Prompt tokens that a server did not compute: it had them in its prefix cache, as its counters tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.schema.records import Measured

FACT = "prefix_cache"
MOST_FOUND = 0.03
"""Share of prompt tokens that may come out of the cache: beyond it a run's TTFT is not that of its prompts."""

LOOKED_UP = ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total")
FOUND = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total", "sglang:cached_tokens_total")
"""Names of vLLM 0.32 (``vllm/v1/metrics/loggers.py``; a prompt that is computed again after it lost its place does not
count) and of SGLang's documentation, which tells the last one by source and only once there is something to tell."""


def prefix_facts(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, dict[str, float]]:
    """The fact that a run keeps of its server's prefix cache, of two looks at ``/metrics``; empty where nobody told."""
    told = None if before is None or after is None else cached_between(before, after)
    return {} if told is None else {FACT: told}


def cached_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """Prompt tokens that the server looked up in its prefix cache between two looks, and those that it found there.

    None where it does not tell, or began anew in between; a server whose cache is off looks nothing up.
    """
    if not any(name in after for name in LOOKED_UP):
        return None
    looked_up, found = (
        sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names) for names in (LOOKED_UP, FOUND)
    )
    return None if looked_up < 0 or found < 0 else {"looked_up_tokens": looked_up, "found_tokens": found}


def cached_of(metadata: Mapping[str, Any]) -> Mapping[str, float] | None:
    """What a run's facts tell of it: counted over the whole run, else by the counters that were scraped."""
    told, metrics = metadata.get(FACT), metadata.get("metrics")
    if isinstance(told, Mapping):
        return told
    if not isinstance(metrics, Mapping):
        return None
    columns = {name: _known(metrics.get(name)) for name in (*LOOKED_UP, *FOUND)}
    first, last = ({name: c[end] for name, c in columns.items() if c} for end in (0, -1))
    return cached_between(first, last)


def found_doubt(metadata: Mapping[str, Any]) -> str | None:
    """A sentence where a server found what nobody asked it to share, and so measured shorter prompts than were sent."""
    told = cached_of(metadata)
    if told is None or _shared(metadata) > 0 or _share(told) <= MOST_FOUND:
        return None
    way = "" if metadata.get("prompts") == "texts" else "send prompts that are new to it (another salt), or "
    return (
        f"the server had {_words(told)} in its prefix cache, though no shared prefix was asked for: TTFT is that of "
        f"shorter prompts; {way}start it without that cache (vLLM: --no-enable-prefix-caching)"
    )


def prefix_doubts(measured: Measured) -> list[str]:
    """Why a simulation, which computes every prompt in full, is not of the run; not what the run says itself."""
    metadata = measured.metadata
    shared, told, doubt = _shared(metadata), cached_of(metadata), found_doubt(metadata)
    if shared > 0:
        found = "" if told is None else f" (the server had {_words(told)} in its prefix cache)"
        own = f"its prompts have {100 * shared:.0f} % of their tokens in common (shared prefix){found}"
        return [f"{own}, and a simulation computes all: what the server's cache saved would pass for speed"]
    return [] if doubt is None or doubt in measured.warnings else [doubt]


def _shared(metadata: Mapping[str, Any]) -> float:
    arguments = metadata.get("arguments")
    shared = arguments.get("shared_prefix") if isinstance(arguments, Mapping) else None
    return float(shared) if isinstance(shared, int | float) else 0.0


def _share(report: Mapping[str, float]) -> float:
    return report["found_tokens"] / max(report["looked_up_tokens"], 1.0)


def _words(report: Mapping[str, float]) -> str:
    found, of = report["found_tokens"], report["looked_up_tokens"]
    return f"{found:,.0f} of {of:,.0f} prompt tokens ({100 * _share(report):.1f} %)"


def _known(column: Any) -> list[float]:
    """Of a scraped column what was told."""
    return [float(v) for v in column if v is not None] if isinstance(column, Sequence) else []
