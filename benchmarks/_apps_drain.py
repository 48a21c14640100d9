"""A million tasks, planned and drained through the simulated launcher: seconds, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _apps_runner import QUICK_TASKS, TASKS, measured


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Seconds in all, and the largest the process was."""
    found = measured(QUICK_TASKS if fast else TASKS, instant=False)
    name = "apps.drain_quick" if fast else "apps.drain_1e6"
    return {
        f"{name}_s": {"value": found["planned_s"] + found["run_s"], "unit": "s", "details": found},
        f"{name}_peak_mib": {"value": found["peak_mib"], "unit": "MiB", "better": "lower", "details": found},
    }
