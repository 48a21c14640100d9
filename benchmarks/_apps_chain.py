"""Documents summarized chunk by chunk, then evaluated (SamuLLM, section 5.3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _apps_study import Case, studied
from _apps_worlds import chain

PAPER = {"max": (1.0, 1.3), "min": (1.0, 1.4)}
DEFAULT = (100, 900, 1)


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Gains over documents, limits and evaluations, one of them changed at a time."""
    settings = [
        *((documents, 900, 1) for documents in (100, 200, 300, 400, 500)),
        *((100, limit, 1) for limit in (100, 300, 500, 700)),
        *((100, 900, evaluations) for evaluations in (2, 4)),
        *((300, 900, evaluations) for evaluations in (2, 4)),
    ]
    cases = [
        Case(f"{documents} documents, limit {limit}, {times} evaluations", chain(documents, limit, times))
        for documents, limit, times in (settings[:1] if fast else settings)
    ]
    return studied("chain", cases, PAPER)
