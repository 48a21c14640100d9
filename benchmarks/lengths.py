"""Lengths: Multi-Bin Batching's theory and gains, predictors, schedulers that go by predictions.

Sections that need recorded data look for it in the folder ``shared`` beside the checkout (or in
LENGTHWISE_SHARED, or --shared) and say where it is absent. --save keeps the rows of the chosen sections in
results/lengths.json, beside those of others.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _multibin
from _harness import Row, show, strict_json

RESULTS = Path(__file__).parent / "results" / "lengths.json"
SHARED = Path(os.environ.get("LENGTHWISE_SHARED", Path(__file__).parents[2] / "shared"))
OTHERS = {"predict": "_predict", "encoder": "_encoder", "elis": "_elis", "rerank": "_rerank"}
"""Sections that are files of their own: each has ``figures(shared, quick) -> {name: value}``."""

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, which way is better, unit
    "elis.gap_closed": (0.7, "higher", "of the gap"),
    "elis.p99_over_oracle": (1.05, "lower", "of the oracle's"),
    "elis.gap_closed_at_p99_115": (0.4, "higher", "of the gap"),
    "predict.tau": (0.56, "higher", "Kendall tau"),
    "predict.r2_by_window": (0.852, "higher", "R2"),
    "predict.coverage90": (0.88, "higher", "share"),
    "predict.lexical_ms": (0.1, "lower", "ms"),
    "predict.encoder_ms": (5.0, "lower", "ms"),
    "lengths.rerank_relative_speed": (1 / 3, "higher", "of FCFS"),
}


def rows_of(section: str, shared: Path, *, quick: bool) -> list[Row]:
    """The rows of a section that is a file of its own; one that says why where it is absent."""
    try:
        figures: Callable[..., Mapping[str, Any]] = importlib.import_module(OTHERS[section]).figures
        return [_row(name, value) for name, value in figures(shared, quick).items()]
    except (ModuleNotFoundError, FileNotFoundError) as error:  # a file or recorded data that is not here
        return [Row(f"{section}.skipped", math.nan, "", math.nan, "higher", details={"skipped": str(error)})]


def _row(name: str, value: Any) -> Row:
    target, better, unit = TARGETS.get(name, (math.nan, "higher", ""))
    if isinstance(value, Row):
        return value
    given = dict(value) if isinstance(value, Mapping) else {"value": value}
    number = given.pop("value", math.nan)
    number = float(number) if isinstance(number, int | float) else math.nan
    unit, target, better = (
        given.pop(key, old) for key, old in (("unit", unit), ("target", target), ("better", better))
    )
    return Row(name, number, unit, target, better, details=given.pop("details", given))


def save(rows: list[Row]) -> None:
    """Puts the rows into the file of results, in place of earlier ones of their names."""
    kept = {}
    if RESULTS.exists():
        kept = {row["name"]: row for row in map(json.loads, RESULTS.read_text("utf-8").splitlines())}
    kept |= {row.name: asdict(row) for row in rows}
    RESULTS.write_text("".join(strict_json(kept[name]) + "\n" for name in sorted(kept)), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    parser.add_argument(
        "--only", default="", help=f"sections: multibin, multibin.theory, {', '.join(OTHERS)}"
    )
    parser.add_argument("--shared", type=Path, default=SHARED, help="the folder of recorded data")
    parser.add_argument("--save", action="store_true", help="keep the rows in results/lengths.json")
    given = parser.parse_args()
    ours = {f"multibin.{n}": s for n, s in _multibin.sections(given.shared, quick=given.quick).items()}
    known = [*ours, *OTHERS]
    wanted = [name for name in given.only.split(",") if name] or known
    chosen = [name for name in known if any(name == w or name.startswith(f"{w}.") for w in wanted)]
    if not chosen:
        parser.error(f"--only knows {', '.join(['multibin', *known])}")
    rows: list[Row] = []
    for name in chosen:
        start = time.perf_counter()
        rows += ours[name]() if name in ours else rows_of(name, given.shared, quick=given.quick)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    for row in rows:
        if "skipped" in row.details:
            print(f"{row.name}: skipped, {row.details['skipped']}", file=sys.stderr)
    rows = [row for row in rows if "skipped" not in row.details]
    if given.save:
        save(rows)
    show(rows, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
