"""Whether the code that made a row is that of the moment at which its runs were measured: told by its content.

A commit's name dies with the history that is rewritten when work lands. What lasts is a hash of the files that
decide over an error: a campaign keeps it when it measures, a row when it is made, and equal ones are the same code.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ROOMS = ("engine", "policy", "cost", "metrics", "workload", "measure", "catalog")
_SCHEMA = ["cost_tables", "deployment", "profile", "records", "specs", "workload"]
_CLIENT = ("openai", "openai_protocol", "process", "launch", "vllm")
_CAMPAIGN = ("_circle*", "_live", "_continuous", "_vllm", "_turns", "_device", "_clusters", "_intervals", "_widths")
CODE = (
    *(f"src/lengthwise/{room}" for room in _ROOMS),
    *(f"src/lengthwise/schema/{name}.py" for name in _SCHEMA),
    *(f"src/lengthwise/backend/{name}.py" for name in _CLIENT),
    "src/lengthwise/_jit.py",
    *(f"benchmarks/{name}.py" for name in _CAMPAIGN),
    "benchmarks/engines",
)
"""What decides over the error of a calibrated simulation, from a profile and a client to the row: folders with
all in them, and files of a pattern. A test holds it against what a campaign imports."""
RETAINED = {"fidelity.live": "vllm", "fidelity.live_transformers": "transformers"}
"""By circle: the folder of results/live in which its runs are kept."""
MEASURED = ("measured_at", "measured_code_sha256")


def now() -> str:
    """This moment, as rows keep it."""
    return _minutes(datetime.now(UTC))


def code_sha256() -> str:
    """The hash of the code as it lies here: of sorted paths and their bytes, whatever commit it is of."""
    told = hashlib.sha256()
    for path in sorted(set(_files()), key=lambda path: path.relative_to(ROOT).as_posix()):
        of = hashlib.sha256(path.read_bytes()).hexdigest()
        told.update(f"{path.relative_to(ROOT).as_posix()} {of}\n".encode())
    return told.hexdigest()


def of_measuring() -> dict[str, Any]:
    """What a campaign keeps as it begins to measure: when that is, and by what code."""
    return {"measured_at": now(), "measured_code_sha256": code_sha256()}


def measured_by(folder: Path) -> dict[str, Any]:
    """What the folder of a campaign keeps of that; None where it does not tell."""
    path = folder / "device.json"
    told = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return {key: told.get(key) for key in MEASURED}


def making() -> dict[str, Any]:
    """What a row keeps of the code that makes it now, where no engine was measured for it."""
    return {"code_sha256": code_sha256(), "code_changed_at": _changed_at()}


def metadata(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row that is made now of runs measured as told: by what code each was, and whether that was the same.

    Where nobody kept by what code the runs were measured, the code must be older than they are. What is not known
    is no proof: not frozen.
    """
    told = {key: measured.get(key) for key in MEASURED} | making()
    return told | {"frozen": _is_frozen(told)}


def restated(row: Mapping[str, Any]) -> dict[str, Any]:
    """The details of a kept row with what these facts tell anew, where it is of a circle whose runs are kept.

    What a row knows of its code it keeps: the code that made it may be nowhere else any more.
    """
    details = dict(row.get("details") or {})
    circle = row["name"].rpartition(".")[0]
    if circle not in RETAINED or not details.keys() & {"code", "code_sha256"}:
        return details
    details.pop("fresh", None)  # what somebody said before it was looked at
    folder = measured_by(ROOT / "benchmarks" / "results" / "live" / RETAINED[circle])
    if details.get("measured_at") in (None, folder["measured_at"]):  # no other campaign's
        details |= {key: value for key, value in folder.items() if value is not None}
    told = {key: details.get(key) for key in (*MEASURED, "code_sha256", "code_changed_at")}
    return details | told | {"frozen": _is_frozen(told)}


def _is_frozen(report: Mapping[str, Any]) -> bool:
    """Whether runs were measured by the code that made the row, by both hashes or, without one, by both times."""
    hashes = report["measured_code_sha256"], report["code_sha256"]
    if all(hashes):
        return bool(hashes[0] == hashes[1])
    times = report["code_changed_at"], report["measured_at"]
    return all(times) and datetime.fromisoformat(str(times[0])) <= datetime.fromisoformat(str(times[1]))


def _files() -> Iterator[Path]:
    for named in (path for of in CODE for path in ROOT.glob(of)):
        every = named.rglob("*") if named.is_dir() else (named,)
        yield from (path for path in every if path.is_file() and "__pycache__" not in path.parts)


def _changed_at() -> str | None:
    """When the code was last changed: by its last commit, at the latest now where there is more; None without any."""
    specs = [f":(glob){of}" if "*" in of else of for of in CODE]
    if _git("status", "--porcelain", "--", *specs):
        return now()
    told = _git("log", "-1", "--format=%cI", "--", *specs)
    return _minutes(datetime.fromisoformat(told)) if told else None


def _git(*words: str) -> str | None:
    """What git says, without its ends; None where it does not."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git: a folder copied to another machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _minutes(of: datetime) -> str:
    return of.astimezone(UTC).isoformat(timespec="minutes")
