"""Whether the code that made a row was as it is before the row's runs were measured: git is asked, nobody claims it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CODE = tuple(f"src/lengthwise/{room}" for room in ("measure/calibrate", "engine", "cost"))
"""What decides over the error of a calibrated simulation."""
KEPT = {"fidelity.live": "vllm", "fidelity.live_transformers": "transformers"}
"""By circle: the folder of results/live in which its runs are kept."""


def now() -> str:
    """This moment, as rows keep it."""
    return _minutes(datetime.now(UTC))


def measured_at(folder: Path) -> str | None:
    """When a campaign's first run was measured, as its folder keeps it."""
    path = folder / "device.json"
    told = json.loads(path.read_text("utf-8")).get("measured_at") if path.exists() else None
    return None if told is None else str(told)


def facts(code: str, measured: str | None) -> dict[str, Any]:
    """When the runs were measured, when the code (of this commit) was last changed, and whether that was before.

    What is not known, of a checkout that holds more than its commit as well, is no proof: not frozen.
    """
    changed = _changed_at(code)
    known = measured is not None and changed is not None
    before = known and datetime.fromisoformat(str(changed)) <= datetime.fromisoformat(str(measured))
    return {"measured_at": measured, "code_changed_at": changed, "frozen": bool(before)}


def restated(row: Mapping[str, Any]) -> dict[str, Any]:
    """The details of a kept row with these facts, where it is of a circle whose runs are kept."""
    details = dict(row.get("details") or {})
    circle = row["name"].rpartition(".")[0]
    if circle not in KEPT or "code" not in details:
        return details
    details.pop("fresh", None)  # what somebody said before it was asked of git
    measured = details.get("measured_at") or measured_at(
        ROOT / "benchmarks" / "results" / "live" / KEPT[circle]
    )
    return details | facts(details["code"], measured)


def _changed_at(code: str) -> str | None:
    """When the last commit was made that this one contains and that touched the code; None where nobody knows."""
    asked = ["git", "log", "-1", "--format=%cI", code, "--", *CODE]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    told = done.stdout.strip()
    return _minutes(datetime.fromisoformat(told)) if done.returncode == 0 and told else None


def _minutes(of: datetime) -> str:
    return of.astimezone(UTC).isoformat(timespec="minutes")
