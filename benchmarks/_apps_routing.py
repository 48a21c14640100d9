"""Each of 6,856 requests goes to one of five models (SamuLLM, section 5.2), lengths unknown and known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _apps_study import Case, studied
from _apps_worlds import routing

PAPER = {"max": (1.4, 1.8), "min": (1.0, 1.1)}


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Gains over the heuristics; three sets of requests each."""
    seeds = range(1 if fast else 3)
    cases = [
        Case(f"{'known' if known else 'unknown'} lengths, set {seed}", routing(known=known, seed=seed), known)
        for known in (False, True)
        for seed in seeds
    ]
    return studied("routing", cases, PAPER)
