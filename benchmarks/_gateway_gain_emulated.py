"""What order gains before emulated engines: the whole gateway, and engines that take no core from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _gateway_gain


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """Rows by name; raises FileNotFoundError where data are absent."""
    return _gateway_gain.figures(shared, fast, is_emulated=True)
