"""Tables fit their width, and break neither words nor numbers."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lengthwise.report.fitted_table import FittedTable, SplitTable, boxed_table

HEADS = ("model", "what it does", "requests/s", "mean time", "source")
ROWS = [
    (f"a-model-with-a-name-{n}", "Shortest job first, by predicted length.", f"1,234.{n}", "12.5 ms", f"file-{n}.csv")
    for n in range(3)
]


def lines_of(shown, width):
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 72, 80, 100, 140])
def test_a_fitted_table_leaves_columns_out_rather_than_break_words(width):
    lines = lines_of(FittedTable(HEADS, ROWS, drops=("source", "mean time")), width)
    assert max(map(len, lines)) <= width
    words = set(" ".join(lines).replace(",", "").split())
    assert {row[0] for row in ROWS} <= words
    assert {"Shortest", "predicted", "length."} <= words
    assert {row[2].replace(",", "") for row in ROWS} <= words
    dropped = lines[-1].partition("also shows: ")[2]
    assert ("file-0.csv" in words) is ("source" not in dropped)
    assert ("12.5" in words) is ("mean time" not in dropped)
    assert not dropped or width < 80


def test_a_table_that_can_drop_nothing_more_is_wider_than_its_pipe_rather_than_cut():
    out = io.StringIO()
    Console(file=out, width=20, soft_wrap=True).print(FittedTable(HEADS, ROWS))
    assert all(cell in out.getvalue() for row in ROWS for cell in (row[0], row[2], row[4]))


@pytest.mark.parametrize("width", [60, 80, 100, 200, 400])
@pytest.mark.parametrize("num_labels", [1, 2])
def test_a_split_table_has_every_number_once_and_its_labels_in_each_part(width, num_labels):
    table = boxed_table()
    for name in ("metric", "unit", *(f"variant {n}" for n in range(9))):
        table.add_column(name)
    for row in range(4):
        table.add_row(f"label-{row}", "ms", *(f"{row}.{n}1 ± 0.25 (0.123-4.567)" for n in range(9)))
    lines = lines_of(SplitTable(table, num_labels), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert all(text.count(f"{row}.{n}1 ") == 1 for row in range(4) for n in range(9))
    assert text.count("(0.123-4.567)") == 36
    parts = sum(line.startswith("╭") for line in lines)
    assert parts == 1 or width < 400
    assert text.count("label-2") == parts
