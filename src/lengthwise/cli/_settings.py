"""Options that are short for a setting."""

from __future__ import annotations


def overrides(set_: list[str] | None, cost: str | None) -> list[str]:
    """What ``--set`` and ``--cost`` change, in order; the latter wins."""
    return [*(set_ or ()), *([] if cost is None else [f"deployment.cost={cost}"])]
