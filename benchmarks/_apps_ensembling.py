"""Nine models answer the same 1,000 to 10,000 requests (SamuLLM, section 5.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _apps_study import Case, studied
from _apps_worlds import ensembling

PAPER = {"max": (1.1, 2.4), "min": (1.0, 1.6)}


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Gains over the heuristics at limits 256 and 512."""
    counts = (1000,) if fast else (1000, 2000, 3000, 5000, 7000, 10_000)
    cases = [Case(f"{n} requests, limit {limit}", ensembling(n, limit)) for limit in (256, 512) for n in counts]
    return studied("ensembling", cases, PAPER)
