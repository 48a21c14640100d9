"""``vllm bench serve --save-result --save-detailed``: one JSON object, a list a quantity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.measure.foreign._rows import NONE, Story, Told
from lengthwise.schema.errors import InputError

_FACTS = (
    "backend",
    "model_id",
    "tokenizer_id",
    "date",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
)
_LISTS = ("input_lens", "output_lens", "ttfts", "itls")


def fits(body: Any) -> bool:
    """Whether it is such a result, detailed or not."""
    return isinstance(body, dict) and "total_input_tokens" in body and "request_throughput" in body


def story_of(body: Mapping[str, Any]) -> Story:
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
    doubts = ["requests arrive when they were sent: how late the client was is not told"]
    if not starts:
        doubts = [
            "arrivals are not told (start_times): every request counts from 0, loads over time are unknown"
        ]
    rows = [_row(body, i, starts[i] if starts else 0.0, errors[i]) for i in range(n)]
    facts = {name: body[name] for name in _FACTS if name in body}
    limit = body.get("max_concurrency")
    if limit and body.get("request_rate") in {"inf", math.inf, None}:
        return Story("vllm bench serve", rows, facts, doubts, int(limit))
    return Story("vllm bench serve", rows, facts, doubts)


def _row(body: Mapping[str, Any], at: int, start_s: float, error: str) -> Told:
    prompt, output = int(body["input_lens"][at]), int(body["output_lens"][at])
    if error or output == 0:
        return Told(start_s, prompt, output, failure=_reason(error))
    gaps: Sequence[float] = body["itls"][at]
    first_s = start_s + float(body["ttfts"][at]) if body["ttfts"][at] else NONE
    return Told(start_s, prompt, output, first_s, first_s + sum(gaps), gap_s=gaps)


def _reason(error: str) -> str:
    """The last line of a traceback, without its details."""
    last = error.strip().splitlines()[-1] if error.strip() else "empty answer"
    return last.partition(":")[0][:60].rpartition(".")[2] or "failed"
