"""Lengths that a client fixes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def told_tokens(body: bytes, fields: Callable[[], Mapping[str, Any]], max_tokens: int | None) -> int:
    """How long the output must become, by what was asked for; 0: that is for the model to say.

    It is fixed where only one token may come, and where the end of a text does not end it (``ignore_eos``)
    before ``min_tokens`` = ``max_tokens``, and no stop string may either.

    Args:
        body: The request as it came.
        fields: Its fields; asked for only where the body may hold what matters.
        max_tokens: The most that was asked for; None: nothing was.
    """
    if max_tokens is None:
        return 0
    if max_tokens == 1:
        return 1
    if b'"ignore_eos"' not in body:
        return 0
    found = fields()
    fixed = found.get("ignore_eos") is True and found.get("min_tokens") == max_tokens
    ends = found.get("stop") or found.get("stop_token_ids")
    return max_tokens if fixed and not ends else 0
