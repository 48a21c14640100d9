"""What became of the requests, and what a server said where they failed: each message once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lengthwise.measure.load._row import Row

LONGEST = 200
MOST = 8
_OWN = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{20,}|\b(?:0x)?[0-9a-f]{12,}\b|\d+")
"""What makes a message of one request its own: ids and numbers."""


def failures_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Reason, message (its first characters) and count of what failed, the most frequent first.

    Messages that differ in numbers and ids alone are one, told as it came first; beyond ``MOST`` of one reason
    the rest is counted without a message.
    """
    count: Counter[tuple[str, str]] = Counter()
    shown: dict[tuple[str, str], str] = {}
    kinds: Counter[str] = Counter()
    for row in rows:
        if not row.reason:
            continue
        said = "" if row.failure is None else " ".join(row.failure.detail.split())[:LONGEST]
        key = row.reason, _OWN.sub("#", said)
        if key not in shown:
            kinds[row.reason] += 1
            key = key if kinds[row.reason] <= MOST else (row.reason, "")
        shown.setdefault(key, said if key[1] else "")
        count[key] += 1
    return [{"reason": key[0], "message": shown[key], "count": n} for key, n in count.most_common()]
