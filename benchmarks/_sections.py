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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _harness import Row, show, strict_json

SHARED = Path(os.environ.get("LENGTHWISE_SHARED", Path(__file__).parents[2] / "shared"))
RESULTS = Path(__file__).parent / "results"


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
    """

    name: str
    about: str
    modules: Mapping[str, str]
    targets: Mapping[str, tuple[float, str, str]]
    own: Callable[[Path, bool], Mapping[str, Callable[[], list[Row]]]] = field(default=lambda *_: {})

    @property
    def results(self) -> Path:
        """Where rows are kept."""
        return RESULTS / f"{self.name}.json"

    def rows(self, section: str, shared: Path, *, quick: bool) -> list[Row]:
        """The rows of a section that is a file; one that says why where its data are absent."""
        try:
            figures = importlib.import_module(self.modules[section]).figures
            return [self.row(name, value) for name, value in figures(shared, quick).items()]
        except (ModuleNotFoundError, FileNotFoundError) as error:  # a package or recorded data not here
            return [
                Row(f"{section}.skipped", math.nan, "", math.nan, "higher", details={"skipped": str(error)})
            ]

    def row(self, name: str, value: Any) -> Row:
        """A figure as a row, with its target."""
        if isinstance(value, Row):
            return value
        target, better, unit = self.targets.get(name, (math.nan, "higher", ""))
        given = dict(value) if isinstance(value, Mapping) else {"value": value}
        number = given.pop("value", math.nan)
        number = float(number) if isinstance(number, int | float) else math.nan
        unit, target, better, ci = (
            given.pop(key, usual)
            for key, usual in (("unit", unit), ("target", target), ("better", better), ("ci", None))
        )
        ci = None if ci is None else (float(ci[0]), float(ci[1]))
        return Row(name, number, unit, target, better, ci, details=given.pop("details", given))

    def save(self, rows: list[Row]) -> None:
        """Puts the rows into the file of results, in place of earlier ones of their names."""
        kept = {}
        if self.results.exists():
            lines = self.results.read_text("utf-8").splitlines()
            kept = {row["name"]: row for row in map(json.loads, lines)}
        kept |= {row.name: asdict(row) for row in rows}
        self.results.write_text("".join(strict_json(kept[name]) + "\n" for name in sorted(kept)), "utf-8")

    def main(self) -> None:
        """Parses the command line, runs the chosen sections, shows and perhaps keeps their rows."""
        parser = argparse.ArgumentParser(description=self.about)
        parser.add_argument("--json", action="store_true", help="print JSON lines")
        parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
        parser.add_argument("--only", default="", help="sections or figures' first words, with commas")
        parser.add_argument("--shared", type=Path, default=SHARED, help="the folder of recorded data")
        parser.add_argument("--save", action="store_true", help=f"keep the rows in results/{self.name}.json")
        given = parser.parse_args()
        own = self.own(given.shared, given.quick)
        known = [*own, *self.modules]
        wanted = [name for name in given.only.split(",") if name] or known
        chosen = [name for name in known if any(name == w or name.startswith(f"{w}.") for w in wanted)]
        if not chosen:
            parser.error(f"--only knows {', '.join(known)}")
        rows: list[Row] = []
        for name in chosen:
            start = time.perf_counter()
            rows += own[name]() if name in own else self.rows(name, given.shared, quick=given.quick)
            print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        for row in rows:
            if "skipped" in row.details:
                print(f"{row.name}: {row.details['skipped']}", file=sys.stderr)
        rows = [row for row in rows if "skipped" not in row.details]
        if given.save:
            self.save(rows)
        show(rows, as_json=given.json)
