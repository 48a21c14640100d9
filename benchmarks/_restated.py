"""What rows that are kept tell of themselves, made again from their own details without measuring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import _frozen
import _widths


def of_kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """The details of a row: whether its code was frozen before its runs, and how wide its intervals are."""
    details = _frozen.restated(row)
    if row["name"].endswith("interval_coverage") and details.get("each"):
        details["widths"] = _widths.of_each(details["each"], details["level"])
    return details
