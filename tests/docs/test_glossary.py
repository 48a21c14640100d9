"""Every term of the report pages is in docs/glossary.md."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_glossary_has_every_term_of_the_reports():
    rows = [line.split("|")[1] for line in (ROOT / "docs/glossary.md").read_text("utf-8").splitlines() if "|" in line]
    entries = {row.strip(" `").casefold() for row in rows}
    names = entries | {name.strip(" `") for entry in entries for name in entry.split(",")}
    terms = tomllib.loads((ROOT / "src/lengthwise/report/_assets/terms.toml").read_text("utf-8"))
    assert terms
    assert [t for t in terms if not {name.strip() for name in t.casefold().split(",")} <= names] == []


def test_no_table_of_the_glossary_has_a_term_twice():
    tables = (ROOT / "docs/glossary.md").read_text("utf-8").split("\n## ")
    for table in tables[1:]:
        rows = [line.split("|")[1].strip().casefold() for line in table.splitlines() if line.startswith("| ")]
        assert len(rows) == len(set(rows)), table.splitlines()[0]
