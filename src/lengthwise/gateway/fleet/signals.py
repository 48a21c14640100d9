"""What an engine's ``/metrics`` say, out of the few lines that matter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lengthwise.gateway.decisions import Signals

MOST_BYTES = 2 << 20
MOST_LINES = 1024
"""Of one metric that are read: an engine tells one for each of its parts."""
_LABELS, _VALUE = re.compile(rb"\{([^\n]*)\}"), re.compile(rb"[ \t]+([^ \t\r\n]+)")
_HELD = re.compile(rb'kv_cache_size_tokens="(\d{1,15})"')
_BLOCKS = re.compile(rb'num_gpu_blocks="(\d{1,12})"')
_BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d{1,9})"')

RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs", b"llamacpp:requests_processing",
           b"tgi_batch_current_size")  # fmt: skip
WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred",
           b"tgi_queue_size")  # fmt: skip
KV_USED = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage",
           b"llamacpp:kv_cache_usage_ratio")  # fmt: skip
PREEMPTIONS = (b"vllm:num_preemptions_total", b"sglang:num_retracted_requests_total",
               b"sglang:num_retracted_reqs_total", b"sglang:num_retracted_reqs")  # fmt: skip
TOKENS = (b"vllm:generation_tokens_total", b"sglang:generation_tokens_total",
          b"llamacpp:tokens_predicted_total")  # fmt: skip
STARTED = b"process_start_time_seconds"
SLEEPING = b"vllm:engine_sleep_state"
CACHE = b"vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at an engine.

    Attributes:
        signals: For the scheduler.
        tokens: Generated since it started; None where it does not tell.
        started: When its process started, on its own clock; None where it does not tell.
        kv_tokens: That its cache holds; None where it does not tell.
        sleeping: Whether it was told to sleep.
    """

    signals: Signals
    tokens: float | None = None
    started: float | None = None
    kv_tokens: int | None = None
    sleeping: bool = False

    def follows(self, before: Reading) -> bool:
        """Whether both can be of one process: the same start, or no count of tokens that fell."""
        if self.started is not None and before.started is not None:
            return self.started == before.started
        return self.tokens is None or before.tokens is None or self.tokens >= before.tokens


def read(body: bytes, at_s: float) -> Reading:
    """What the text says; what cannot be read is left out."""
    text = b"\n" + body
    return Reading(
        Signals(
            running=_sum(text, RUNNING),
            waiting=_sum(text, WAITING),
            kv_used=_share(text),
            preemptions=_sum(text, PREEMPTIONS),
            at_s=at_s,
        ),
        tokens=_sum(text, TOKENS),
        started=_sum(text, (STARTED,)),
        kv_tokens=_kv_tokens(text),
        sleeping=any(value == 0 for labels, value in _lines(text, SLEEPING) if b'"awake"' in labels),
    )


def _lines(text: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Labels and value of a metric's lines. A value of a label has no line end: prefixes suffice."""
    start, left = text.find(b"\n" + name), MOST_LINES
    while start >= 0 and left:
        left -= 1
        at = start + 1 + len(name)
        labels = _LABELS.match(text, at)
        found = _VALUE.match(text, labels.end() if labels else at)
        value = _number(found[1]) if found else None
        if value is not None:
            yield (labels[1] if labels else b""), value
        start = text.find(b"\n" + name, at)


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _sum(text: bytes, names: tuple[bytes, ...]) -> float | None:
    """Over an engine's parts (data parallel ranks tell one line each), by the first name that is there."""
    for name in names:
        values = [value for _, value in _lines(text, name)]
        if values:
            return sum(values)
    return None


def _share(text: bytes) -> float | None:
    """Of the fullest part, as a share."""
    for name in KV_USED:
        values = [value for _, value in _lines(text, name)]
        if values:
            return min(1.0, max(values))
    return None


def _kv_tokens(text: bytes) -> int | None:
    total = 0
    for labels, _ in _lines(text, CACHE):
        held = _HELD.search(labels)
        if held:
            total += int(held[1])
            continue
        blocks, size = _BLOCKS.search(labels), _BLOCK_SIZE.search(b"{" + labels)
        if blocks and size:
            total += int(blocks[1]) * int(size[1])
    return total or None
