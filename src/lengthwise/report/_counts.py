"""Requests by bucket, in words."""

from __future__ import annotations

from lengthwise.metrics import Counts


def buckets(counts: Counts, noun: str = "") -> list[str]:
    """How many finished of how many, then the other buckets; those that are empty go without saying."""
    others = {"rejected": counts.rejected, "timed out": counts.timed_out, "unfinished": counts.unfinished}
    parts = [f"{counts.finished:,} of {counts.arrived:,} {noun}".rstrip() + " finished"]
    return parts + [f"{count:,} {name}" for name, count in others.items() if count]
