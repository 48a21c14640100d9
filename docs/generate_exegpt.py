"""Writes docs/exegpt.md from benchmarks/results/exegpt.json: python docs/generate_exegpt.py [--check].

What each figure is and why an aim is missed stands here in words; every number that was measured comes from the file
of results, and what is not in it is called not measured yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _exegpt_estimates
import _exegpt_prose
from _exegpt_gains import cells, gains, overview, systems, winners
from _exegpt_on_engine import live, on_engine
from _exegpt_tables import figure11, real, regret, search, table5, table6, table7
from _exegpt_texts import AIMS, TEXTS
from _exegpt_words import Rows, table

HERE = Path(__file__).parent
PAGE = HERE / "exegpt.md"
RESULTS = HERE.parent / "benchmarks" / "results" / "exegpt.json"
NOT_YET = "not measured yet"
PROSE = {name: getattr(module, name) for module in (_exegpt_prose, _exegpt_estimates) for name in module.__all__} | {
    "live": on_engine
}


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page, of rows as the file of results holds them."""
    named = {row["name"]: row for row in rows if row.get("value") is not None}
    parts = [TEXTS["head"], _machine(named)]
    for name, show in SECTIONS:
        parts.append(TEXTS[name] + "\n" + "\n".join(show(named)).rstrip())
        parts.append("\n".join(PROSE[name](named)) if name in PROSE else "")
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def results() -> list[dict[str, Any]]:
    """The rows that are committed; none where nothing was."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]


def _machine(named: Rows) -> str:
    told = [(row.get("details") or {}).get("machine") for row in named.values()]
    seen = {f"{one['cpu']}, {one['cores']} cores, Python {one['python']}" for one in told if one}
    return f"Times were measured on: {'; '.join(sorted(seen))}." if seen else ""


def _aims(named: Rows) -> Iterator[str]:
    lines = []
    for name, about, shown, why in AIMS:
        row = named.get(name)
        if row is None:
            lines.append([f"`{name}`", about, NOT_YET, "", "", ""])
            continue
        aim, more = row.get("target"), row["better"] == "higher"
        wanted = "none" if aim is None else f"at {'least' if more else 'most'} {shown(aim)}"
        met = aim is None or (row["value"] >= aim if more else row["value"] <= aim)
        decision = "" if aim is None else "met" if met else "**missed**"
        lines.append(
            [f"`{name}`", about, _figure(row, shown), wanted, decision, "" if met and aim is not None else why]
        )
    yield from table(["figure", "what it is", "measured", "aim", "", "cause"], lines)


def _figure(row: Mapping[str, Any], shown: Callable[[float], str]) -> str:
    ends = row.get("ci")
    return shown(row["value"]) + (f" [{shown(ends[0])}, {shown(ends[1])}]" if ends else "")


SECTIONS: tuple[tuple[str, Callable[[Rows], Iterator[str]]], ...] = (
    ("aims", _aims),
    ("gains", gains),
    ("overview", overview),
    ("winners", winners),
    ("systems", systems),
    ("table6", table6),
    ("real", real),
    ("figure11", figure11),
    ("table5", table5),
    ("table7", table7),
    ("search", search),
    ("regret", regret),
    ("engine", lambda _: iter(())),
    ("live", live),
    ("cells", cells),
)


def main() -> int:
    """Writes the page, or with --check only says whether it is as the results are."""
    text = page(results())
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text("utf-8") == text
        if not same:
            print(f"{PAGE.name} is not what the results say: python docs/generate_exegpt.py")
        return 0 if same else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
