"""Benchmarks of several sections: chosen by name, skipped where their data are absent, saved in one file of results."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _earlier import replaced
from _harness import Row, show, strict_json

UNITS = {
    "_error": "relative",
    "_coverage": "share",
    "_mape": "relative",
    "_ape": "relative",
    "_per_s": "1/s",
    "_s": "s",
}
"""Unit by the end of a figure's name, where neither target nor value names one; the first that fits."""
SHARED = Path(os.environ.get("LENGTHWISE_SHARED", Path(__file__).parents[2] / "shared"))
RESULTS = Path(__file__).parent / "results"
VERSION = 1
"""Version of the rows in results; within a version keys are only added."""


@dataclass(frozen=True)
class Sections:
    """The parts of a benchmark.

    Attributes:
        name: Rows are saved in results/NAME.json.
        description: First line of the help.
        modules: Section to "module" or "module:function"; the function (default ``figures``) takes (shared, quick)
            and returns {name: value}, where a value is a number, a Row, or a mapping with "value" and details.
        targets: Figure to (target, better, unit).
        own: Sections given as functions: ``own(shared, quick) -> {section: () -> rows}``.
        campaigns: Prefixes of figures whose earlier rows are archived when new runs replace them.
        interval: The 95 % interval of a saved row without one, from its details.
        restated: The details of a saved row, completed from what they contain.
        made: Details that every new row gets about the code that made it.
    """

    name: str
    description: str
    modules: Mapping[str, str]
    targets: Mapping[str, tuple[float, str, str]]
    own: Callable[[Path, bool], Mapping[str, Callable[[], list[Row]]]] = field(default=lambda *_: {})
    campaigns: tuple[str, ...] = ()
    interval: Callable[[Mapping[str, Any]], tuple[float, float] | None] = field(default=lambda _: None)
    restated: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda row: dict(row["details"]))
    made: Callable[[], Mapping[str, Any]] = field(default=dict)

    @property
    def results(self) -> Path:
        """The file of saved rows."""
        return RESULTS / f"{self.name}.json"

    def rows(self, section: str, shared: Path, *, quick: bool) -> list[Row]:
        """Measure a section of ``modules``; return one row with the reason where packages or data are missing."""
        module, _, function = self.modules[section].partition(":")
        try:
            figures = getattr(importlib.import_module(module), function or "figures")
            return [self.row(name, value) for name, value in figures(shared, quick).items()]
        except (ModuleNotFoundError, FileNotFoundError) as error:
            return [self.row(f"{section}.skipped", {"skipped": str(error)})]

    def row(self, name: str, value: Any) -> Row:
        """Return a figure as a row with its target."""
        if isinstance(value, Row):
            return value
        rest = dict(value) if isinstance(value, Mapping) else {"value": value}
        number = rest.pop("value", math.nan)
        target, better, unit = self.stated(name, rest.pop("unit", ""))
        target, better, ci = rest.pop("target", target), rest.pop("better", better), rest.pop("ci", None)
        number = float(number) if isinstance(number, int | float) else math.nan
        ci = None if ci is None else (float(ci[0]), float(ci[1]))
        return Row(name, number, unit, target, better, ci, details=rest.pop("details", rest))

    def stated(self, name: str, unit: str = "") -> tuple[float, str, str]:
        """Return (target, better, unit) of a figure: from ``targets``, else from its unit and the end of its name."""
        if name in self.targets:
            return self.targets[name]
        unit = unit or next((of for end, of in UNITS.items() if name.endswith(end)), "")
        return math.nan, "lower" if unit in ("relative", "s") else "higher", unit

    def relabel(self) -> None:
        """Restate units, targets, intervals and details of saved rows; measured values stay."""
        rows = _read(self.results)
        for row in rows:
            target, row["better"], row["unit"] = self.stated(row["name"], row["unit"])
            row["target"] = row["target"] if math.isnan(target) else target
            if row.get("ci") is None and (ends := self.interval(row)) is not None:
                row["ci"] = ends
            if row.get("details"):
                row["details"] = self.restated(row)
        self.results.write_text("".join(strict_json(row) + "\n" for row in rows), "utf-8")

    def save(self, rows: list[Row]) -> None:
        """Replace the saved rows of the same names; archive those of a campaign that new runs replace."""
        now = datetime.now(UTC).isoformat(timespec="minutes")
        saved = {row["name"]: row for row in _read(self.results)} if self.results.exists() else {}
        new = {row.name: asdict(row) | {"version": VERSION, "saved_at": now} for row in rows}
        if gone := replaced(saved, new, self.campaigns):
            with (RESULTS / f"{self.name}-earlier.json").open("a", encoding="utf-8") as file:
                file.writelines(strict_json(row) + "\n" for row in gone)
        saved |= new
        self.results.write_text("".join(strict_json(saved[name]) + "\n" for name in sorted(saved)), "utf-8")

    def take(self, path: Path) -> list[Row]:
        """Read the rows of a campaign that was measured apart (rows.json of its folder)."""
        known = ({key: part for key, part in row.items() if part is not None} for row in _read(path))
        return [self.row(row.pop("name"), row) for row in known]

    def main(self) -> None:
        """Parse the command line, measure the chosen sections, print and optionally save their rows."""
        parser = argparse.ArgumentParser(description=self.description)
        parser.add_argument("--json", action="store_true", help="print JSON lines")
        parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
        parser.add_argument("--only", default="", help="sections or the first words of their names, with commas")
        parser.add_argument("--shared", type=Path, default=SHARED, help="the folder of recorded data")
        parser.add_argument("--save", action="store_true", help=f"save the rows in results/{self.name}.json")
        parser.add_argument("--relabel", action="store_true", help="measure nothing: restate units and targets")
        parser.add_argument("--take", type=Path, help="measure nothing: take the rows.json of a campaign")
        args = parser.parse_args()
        if args.relabel:
            self.relabel()
            return
        if args.take:
            taken = self.take(args.take)
            if args.save:
                self.save(taken)
            show(taken, as_json=args.json)
            return
        own = self.own(args.shared, args.quick)
        names = [*own, *self.modules]
        wanted = [name for name in args.only.split(",") if name] or names
        chosen = [name for name in names if any(name == w or name.startswith(f"{w}.") for w in wanted)]
        if not chosen:
            parser.error(f"--only must name sections of {', '.join(names)}; got {args.only}")
        rows, made = [], self.made()
        for name in chosen:
            start = time.perf_counter()
            found = own[name]() if name in own else self.rows(name, args.shared, quick=args.quick)
            print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
            for row in found:
                if "skipped" in row.details:
                    print(f"{row.name}: {row.details['skipped']}", file=sys.stderr)
            found = [replace(row, details={**made, **row.details}) for row in found if "skipped" not in row.details]
            if args.save:
                self.save(found)  # after each section: an error in the next one must not lose these rows
            rows += found
        show(rows, as_json=args.json)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
