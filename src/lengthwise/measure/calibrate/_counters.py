"""What a vLLM server's counters said whenever it was asked during a run: the scrape that its records keep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.measured import TokenTimes

Floats = npt.NDArray[np.float64]

STEPS, TOKENS = "vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum"
GENERATED, FIRST = "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"
RUNNING = "vllm:num_requests_running"
NEEDED = {
    "at_s": "at_s",
    "steps": STEPS,
    "tokens": TOKENS,
    "generated": GENERATED,
    "first": FIRST,
    "running": RUNNING,
}
TOOK, PREEMPTED, DRAFTED = "took_s", "vllm:num_preemptions_total", "vllm:spec_decode_num_drafts_total"
_BUCKET = re.compile(r'^vllm:iteration_tokens_total_bucket\{le="([^"]+)"\}$')


@dataclass(frozen=True)
class Counters:
    """[n] looks at a server's counters, in order.

    Attributes:
        at_s: When, by the clock of the run's records: half-way between question and answer, or when the last token came
            that was counted (``timed_by``).
        unsure_s: How far from it the moment may lie at which the server counted.
        steps: Steps that gave a token, so far.
        tokens: Tokens that were made, and those of prompts that were computed, counted when their prompt was through.
        generated: Tokens that were made, a prompt's first one included.
        first: Prompts that were through.
        running: Requests that run.
        preempted: Requests that lost their place, so far.
        edges: [b] upper bounds of the buckets below.
        upto: [n, b] steps of at most so many ``tokens``, so far.
    """

    at_s: Floats
    unsure_s: Floats
    steps: Floats
    tokens: Floats
    generated: Floats
    first: Floats
    running: Floats
    preempted: Floats
    edges: Floats
    upto: Floats

    def __len__(self) -> int:
        return len(self.at_s)

    def taken(self, rows: npt.NDArray[np.bool_]) -> Counters:
        """Some of the looks."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "edges"}
        return Counters(**{name: column[rows] for name, column in columns.items()}, edges=self.edges)


def counters_of(metrics: Mapping[str, Any]) -> Counters | str:
    """The looks that tell everything; else in words why these columns cannot be fitted to."""
    missing = [name for name in NEEDED.values() if name not in metrics]
    bounds = sorted((float(found[1]), name) for name in metrics if (found := _BUCKET.match(name)))
    if missing or not bounds:
        return f"they lack {', '.join(missing) or 'the buckets of vllm:iteration_tokens_total'}"
    if _optional(metrics, DRAFTED).max(initial=0.0) > 0:
        return "the engine drafts tokens, so that they do not tell how many requests a step decodes for"
    columns = {field: _floats(metrics[name]) for field, name in NEEDED.items()}
    columns["unsure_s"] = _optional(metrics, TOOK) / 2
    columns["at_s"] = columns["at_s"] + columns["unsure_s"]
    columns["preempted"] = _optional(metrics, PREEMPTED)
    upto = np.column_stack([_floats(metrics[name]) for _, name in bounds])
    told = np.isfinite(np.column_stack([*columns.values(), upto])).all(axis=1)
    kept = {field: column[told] for field, column in columns.items()}
    return Counters(**kept, edges=np.array([bound for bound, _ in bounds]), upto=upto[told])


def timed_by(counters: Counters, tokens: TokenTimes | None) -> Counters:
    """The looks, each at the moment when its client had the last of the tokens that were counted.

    A look falls somewhere within a step, a token comes at the end of one, later than the engine made it by as much at
    every look. Where tokens' times or numbers are not known the looks stay where they were. Before its first token a
    look says nothing, and is left out.
    """
    if tokens is None or not len(counters) or not len(tokens.at_s) or tokens.tokens.min() < 1:
        return counters
    came_s = np.repeat(tokens.at_s, tokens.tokens)
    came_s = np.sort(came_s[np.isfinite(came_s)])
    made = np.round(counters.generated - counters.generated[0]) + (came_s <= counters.at_s[0]).sum()
    known = (made >= 1) & (made <= len(came_s))
    last_s = came_s[np.clip(made, 1, len(came_s)).astype(np.int64) - 1]
    return replace(counters, at_s=last_s, unsure_s=np.zeros(len(counters))).taken(known)


def joined(counters: Counters) -> Counters:
    """Without looks that saw somebody run but no step since the look before: both fell within one step."""
    news = np.diff(counters.steps, prepend=-1.0) != 0
    return counters.taken(news | (counters.running <= 0))


def _floats(column: Any) -> Floats:
    """The column; NaN where it was not told."""
    return np.asarray(column, dtype=np.float64)


def _optional(metrics: Mapping[str, Any], name: str) -> Floats:
    """The column, 0 where it was not told."""
    if name not in metrics:
        return np.zeros(len(metrics["at_s"]))
    return np.nan_to_num(_floats(metrics[name]))
