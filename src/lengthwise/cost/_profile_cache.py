"""Tables that were built from profiles, kept by the content of what they were built from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lengthwise.cost._npz import read_npz, write_npz
from lengthwise.cost._profile_report import FitReport, OperatorFit, RegionFit
from lengthwise.cost.tables import from_arrays, to_arrays
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.errors import OutputError, ProfileError

CACHE_VERSION = 7


def cache_path(
    cache: Path | str, files: Iterable[Path], arguments: tuple[Any, ...], kind: str = "vidur"
) -> Path:
    """Where the result for these files and arguments is kept; ``cache`` "user" is platformdirs' folder."""
    digest = hashlib.sha256(repr((CACHE_VERSION, _versions(), arguments)).encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return _cache_folder(cache) / f"{kind}-{digest.hexdigest()[:32]}.npz"


def _cache_folder(cache: Path | str) -> Path:
    if cache != "user":
        return Path(cache)
    from platformdirs import user_cache_path

    return user_cache_path("lengthwise") / "profiles"


def _versions() -> list[str]:
    found = []
    for package in ("lengthwise", "numpy", "scipy", "scikit-learn"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found


def read_cache(path: Path) -> tuple[CostTables, FitReport] | None:
    """What was stored, or None: a file that is missing or damaged is built again."""
    with suppress(ProfileError, KeyError):
        arrays = read_npz(path)
        rows = zip(
            *(arrays[f"report_{key}"].tolist() for key in ("name", "rows", "median", "p95")), strict=True
        )
        told = json.loads(str(arrays["report"]))
        report = FitReport(
            str(arrays["report_estimator"]),
            str(arrays["report_method"]),
            tuple(OperatorFit(*row) for row in rows),
            compared=tuple(RegionFit(*row) for row in told["compared"]),
            picked=tuple((operator, estimator) for operator, estimator in told["picked"]),
            filled=tuple(told["filled"]),
            notes=tuple(told["notes"]),
        )
        return from_arrays(arrays, str(path)), report
    return None


def write_cache(path: Path, tables: CostTables, report: FitReport) -> None:
    """Stores a result; a cache that cannot be written is no reason to fail."""
    names, rows, medians, p95s = ([row[i] for row in map(astuple, report.operators)] for i in range(4))
    told = {
        "compared": [astuple(fit) for fit in report.compared],
        "picked": report.picked,
        "filled": report.filled,
        "notes": report.notes,
    }
    arrays = to_arrays(tables) | {"report_estimator": report.estimator, "report_method": report.method}
    arrays |= {"report_name": names, "report_rows": rows, "report_median": medians, "report_p95": p95s}
    arrays["report"] = json.dumps(told)
    with suppress(OutputError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_npz(path, arrays)
