"""Benchmarks of several sections: chosen by name, skipped where their data are absent, saved in one file of results."""

import argparse
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _harness import Row, json_lines, show, strict_json, toml

UNITS = {"_error": "relative", "_mape": "relative", "_ape": "relative"}
UNITS |= {"_coverage": "share", "_per_s": "1/s", "_s": "s"}
"""Unit by the end of a figure's name, where neither target nor value names one; the first that fits."""
SHARED = Path(os.environ.get("LENGTHWISE_SHARED", Path(__file__).parents[2] / "shared"))
RESULTS = Path(__file__).parent / "results"
MODULES, TARGETS = toml("sections"), toml("targets")
"""By benchmark and section: where its function is; by figure: (target, better, unit)."""
VERSION = 1  # version of the rows in results; within a version keys are only added


@dataclass(frozen=True)
class Sections:
    """The parts of a benchmark in sections.toml, with rows in results/NAME.json.

    The function of a section takes (shared, quick) and the argument, and returns {name: value}, where a value is a
    number, a Row, or a mapping with "value" and details. Rows of ``campaigns`` (prefixes) are archived when new runs
    replace them; ``made`` returns details of every new row about its code.
    """

    name: str
    description: str
    campaigns: tuple[str, ...] = ()
    made: Callable[[], Mapping[str, Any]] = field(default=dict)

    def rows(self, section: str, shared: Path, *, quick: bool) -> list[Row]:
        """Measure a section; return one row with the reason where packages or data are missing."""
        module, _, rest = MODULES[self.name][section].partition(":")
        function, *argument = rest.split(":")
        try:
            figures = getattr(importlib.import_module(module), function or "figures")
            return [self.row(name, value) for name, value in figures(shared, quick, *argument).items()]
        except (ModuleNotFoundError, FileNotFoundError) as error:
            return [self.row(f"{section}.skipped", {"skipped": str(error)})]

    def row(self, name: str, value: Any) -> Row:
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
        """Return (target, better, unit) of a figure: from TARGETS, else from its unit and the end of its name."""
        if name in TARGETS:
            return tuple(TARGETS[name])
        unit = unit or next((of for end, of in UNITS.items() if name.endswith(end)), "")
        return math.nan, "lower" if unit in ("relative", "s") else "higher", unit

    def save(self, rows: list[Row]) -> None:
        """Replace the saved rows of the same names; archive those of a campaign that new runs replace."""
        now, file = datetime.now(UTC).isoformat(timespec="minutes"), RESULTS / f"{self.name}.json"
        saved = {row["name"]: row for row in json_lines(file)} if file.exists() else {}
        new = {row.name: asdict(row) | {"version": VERSION, "saved_at": now} for row in rows}
        if gone := self.replaced(saved, new):
            with (RESULTS / f"{self.name}-earlier.json").open("a", encoding="utf-8") as earlier:
                earlier.writelines(strict_json(row) + "\n" for row in gone)
        saved |= new
        file.write_text("".join(strict_json(saved[name]) + "\n" for name in sorted(saved)), "utf-8")

    def replaced(self, saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the saved rows of campaigns (names up to the last dot) whose measured runs differ from the new."""

        def measured_s(row: Mapping[str, Any]) -> dict[str, Any]:
            runs = (row.get("details") or {}).get("signed_by_run") or {}
            return {run: of.get("measured_s") for run, of in runs.items()}

        gone = {
            name.rpartition(".")[0]
            for name, row in new.items()
            if name.startswith(self.campaigns) and name in saved and measured_s(saved[name]) != measured_s(row)
        }
        return [row for name, row in saved.items() if name.rpartition(".")[0] in gone]

    def main(self) -> None:
        options = argparse.ArgumentParser(description=self.description.splitlines()[0])
        options.add_argument("--json", action="store_true", help="print JSON lines")
        options.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
        options.add_argument("--only", default="", help="sections or the first words of their names, with commas")
        options.add_argument("--shared", type=Path, default=SHARED, help="the folder of recorded data")
        options.add_argument("--save", action="store_true", help=f"save the rows in results/{self.name}.json")
        options.add_argument("--take", type=Path, help="measure nothing: take the rows.json of a campaign")
        args = options.parse_args()
        if args.take:
            known = ({key: part for key, part in row.items() if part is not None} for row in json_lines(args.take))
            rows = [self.row(row.pop("name"), row) for row in known]
            if args.save:
                self.save(rows)
            show(rows, as_json=args.json)
            return
        wanted = [name for name in args.only.split(",") if name] or MODULES[self.name]
        chosen = [name for name in MODULES[self.name] if any(name == w or name.startswith(f"{w}.") for w in wanted)]
        if not chosen:
            options.error(f"--only must name sections of {', '.join(MODULES[self.name])}; got {args.only}")
        rows, made = [], self.made()
        for name in chosen:
            start, found = time.perf_counter(), []
            for row in self.rows(name, args.shared, quick=args.quick):
                if "skipped" in row.details:
                    print(f"{row.name}: {row.details['skipped']}", file=sys.stderr)
                else:
                    found.append(replace(row, details={**made, **row.details}))
            print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
            if args.save:
                self.save(found)  # after each section: an error in the next one must not lose these rows
            rows += found
        show(rows, as_json=args.json)
