"""A chain summary of 100 to 500 documents beside an ensembling of 5,000 requests (SamuLLM, section 5.4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _apps_study import Case, studied
from _apps_worlds import mixed

PAPER = {"max": (1.2, 1.4), "min": (1.2, 1.4)}


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Gains over documents."""
    requests = 500 if fast else 5000
    cases = [
        Case(f"{documents} documents, {requests} requests", mixed(documents, requests, 256))
        for documents in ((100,) if fast else (100, 200, 300, 400, 500))
    ]
    return studied("mixed", cases, PAPER)
