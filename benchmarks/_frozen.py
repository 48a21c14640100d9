"""Whether the code that made a row is that of the moment at which its runs were measured, by a hash of its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ROOMS = ("engine", "policy", "cost", "metrics", "workload", "measure", "catalog")
_SCHEMA = ("cost_tables", "deployment", "profile", "records", "specs", "workload")
_CLIENT = ("openai", "openai_protocol", "process", "launch", "vllm")
_CAMPAIGN = ("_circle*", "_live", "_continuous", "_vllm", "_turns", "_device", "_intervals")
CODE = (
    *(f"src/lengthwise/{room}" for room in _ROOMS),
    *(f"src/lengthwise/schema/{name}.py" for name in _SCHEMA),
    *(f"src/lengthwise/backend/{name}.py" for name in _CLIENT),
    "src/lengthwise/_jit.py",
    *(f"benchmarks/{name}.py" for name in _CAMPAIGN),
    "benchmarks/engines",
)
"""Files and folders that determine the error of a calibrated simulation; a test compares with a campaign's imports."""


def files() -> Iterator[Path]:
    """Yield the files of CODE."""
    for named in (path for pattern in CODE for path in ROOT.glob(pattern)):
        every = named.rglob("*") if named.is_dir() else (named,)
        yield from (path for path in every if path.is_file() and "__pycache__" not in path.parts)


def code_sha256() -> str:
    """Return the hash of the sorted paths and contents of CODE."""
    digest = hashlib.sha256()
    for path in sorted(set(files()), key=lambda path: path.relative_to(ROOT).as_posix()):
        of = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {of}\n".encode())
    return digest.hexdigest()


def of_measuring() -> dict[str, Any]:
    """Return time and code as a campaign begins to measure."""
    now = datetime.now(UTC).isoformat(timespec="minutes")
    return {"measured_at": now, "measured_code_sha256": code_sha256()}


def measured_by(folder: Path) -> dict[str, Any]:
    """Return time and code from the folder of a campaign; None where they were not recorded."""
    path = folder / "device.json"
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return {key: known.get(key) for key in ("measured_at", "measured_code_sha256")}


def making() -> dict[str, Any]:
    """Return the code that makes a row now."""
    return {"code_sha256": code_sha256()}


def metadata(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details of a row that is made now from runs measured as ``measured`` states.

    Without a recorded hash of the code that measured, the code counts as changed.
    """
    made = making()
    return {**measured, **made, "frozen": measured["measured_code_sha256"] == made["code_sha256"]}
