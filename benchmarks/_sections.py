"""A benchmark of several sections: chosen by name, skipped where their data are absent, kept in one file."""

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

ENDS = {"_error": "relative", "_coverage": "share", "_mape": "relative", "_ape": "relative", "_per_s": "1/s", "_s": "s"}
"""The unit of a figure by the end of its name, where nothing else says it; the first that fits."""
LOWER = ("relative", "s")
"""Units of errors and of time: of them less is better."""
SHARED = Path(os.environ.get("LENGTHWISE_SHARED", Path(__file__).parents[2] / "shared"))
RESULTS = Path(__file__).parent / "results"
VERSION = 1
"""Of the rows kept in results; keys are only ever added within a version."""


@dataclass(frozen=True)
class Sections:
    """What a benchmark consists of.

    Attributes:
        name: Results are kept in results/NAME.json.
        about: First line of the help.
        modules: Section to the file that has ``figures(shared, quick) -> {name: value}``; a value is a
            number, a Row, or a mapping with "value" and details.
        targets: Figure to (target, which way is better, unit).
        own: Sections that are given as functions: ``own(shared, quick) -> {section: () -> rows}``.
        campaigns: Words with which figures of campaigns begin, of which earlier ones are kept beside newer ones.
        interval: The 95 % interval of a row that was saved without one, of what it keeps; None: it does not tell.
        restated: The details of a row that was saved, with what can be told of them anew.
        made: What every row keeps of the code that made it, asked for as the benchmark begins.
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
        """Where rows are kept."""
        return RESULTS / f"{self.name}.json"

    @property
    def earlier(self) -> Path:
        """Where rows of campaigns lie that newer ones replaced."""
        return RESULTS / f"{self.name}-earlier.json"

    def rows(self, section: str, shared: Path, *, fast: bool) -> list[Row]:
        """The rows of a section that is a file; one that says why where its data are absent."""
        try:
            figures = importlib.import_module(self.modules[section]).figures
            return [self.row(name, value) for name, value in figures(shared, fast).items()]
        except (ModuleNotFoundError, FileNotFoundError) as error:  # a package or recorded data not here
            return [Row(f"{section}.skipped", math.nan, "", math.nan, "higher", details={"skipped": str(error)})]

    def row(self, name: str, value: Any) -> Row:
        """A figure as a row, with its target."""
        if isinstance(value, Row):
            return value
        given = dict(value) if isinstance(value, Mapping) else {"value": value}
        number = given.pop("value", math.nan)
        number = float(number) if isinstance(number, int | float) else math.nan
        target, better, unit = self.stated(name, given.pop("unit", ""))
        target, better, ci = (
            given.pop(key, usual) for key, usual in (("target", target), ("better", better), ("ci", None))
        )
        ci = None if ci is None else (float(ci[0]), float(ci[1]))
        return Row(name, number, unit, target, better, ci, details=given.pop("details", given))

    def stated(self, name: str, unit: str = "") -> tuple[float, str, str]:
        """Target, which way is better, and unit of a figure: as stated for it, else by its unit and its name's end."""
        if name in self.targets:
            return self.targets[name]
        unit = unit or next((of for end, of in ENDS.items() if name.endswith(end)), "")
        return math.nan, "lower" if unit in LOWER else "higher", unit

    def relabel(self) -> None:
        """Gives saved rows units, ways, targets, intervals and details as told now; what was measured stays."""
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
        """Puts the rows into the file of results, in place of earlier ones of their names.

        Those of a campaign that was measured anew go to the end of the file of earlier ones.
        """
        kept, now = {}, datetime.now(UTC).isoformat(timespec="minutes")
        if self.results.exists():
            kept = {row["name"]: row for row in _read(self.results)}
        new = {row.name: asdict(row) | {"version": VERSION, "retained": now} for row in rows}
        if gone := replaced(kept, new, self.campaigns):
            with self.earlier.open("a", encoding="utf-8") as file:
                file.writelines(strict_json(row) + "\n" for row in gone)
        kept |= new
        self.results.write_text("".join(strict_json(kept[name]) + "\n" for name in sorted(kept)), "utf-8")

    def take(self, path: Path) -> list[Row]:
        """The rows of a campaign that was measured apart (rows.json of its folder)."""
        known = ({key: one for key, one in row.items() if one is not None} for row in _read(path))
        return [self.row(row.pop("name"), row) for row in known]

    def main(self) -> None:
        """Parses the command line, runs the chosen sections, shows and perhaps keeps their rows."""
        parser = argparse.ArgumentParser(description=self.description)
        parser.add_argument("--json", action="store_true", help="print JSON lines")
        parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
        parser.add_argument("--only", default="", help="sections or figures' first words, with commas")
        parser.add_argument("--shared", type=Path, default=SHARED, help="the folder of recorded data")
        parser.add_argument("--save", action="store_true", help=f"keep the rows in results/{self.name}.json")
        parser.add_argument("--relabel", action="store_true", help="measure nothing: restate units and targets")
        parser.add_argument("--take", type=Path, help="measure nothing: take the rows.json of a campaign")
        given = parser.parse_args()
        if given.relabel:
            self.relabel()
            return
        if given.take:
            taken = self.take(given.take)
            if given.save:
                self.save(taken)
            show(taken, as_json=given.json)
            return
        own = self.own(given.shared, given.fast)
        known = [*own, *self.modules]
        wanted = [name for name in given.only.split(",") if name] or known
        chosen = [name for name in known if any(name == w or name.startswith(f"{w}.") for w in wanted)]
        if not chosen:
            parser.error(f"--only knows {', '.join(known)}")
        rows: list[Row] = []
        made = self.made()
        for name in chosen:
            start = time.perf_counter()
            found = own[name]() if name in own else self.rows(name, given.shared, fast=given.fast)
            print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
            for row in found:
                if "skipped" in row.details:
                    print(f"{row.name}: {row.details['skipped']}", file=sys.stderr)
            found = [replace(row, details={**made, **row.details}) for row in found if "skipped" not in row.details]
            if given.save:
                self.save(found)  # what was measured is kept, whatever the next section meets
            rows += found
        show(rows, as_json=given.json)


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results, one a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
