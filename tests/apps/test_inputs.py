"""Rows of files: the same whatever the format, and errors that name the place of a fault in a file."""

from __future__ import annotations

import json

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.apps.inputs import read_rows
from lengthwise.schema.errors import InputError

_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=20)


def test_jsonl_rows_keep_the_content_of_their_lines(tmp_path):
    rows = [{"id": "a", "chunks": ["x", "y"]}, {"id": "b", "other": {"deep": None}}, {"id": "c"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    found = read_rows(path, "id")
    assert list(found.rows) == rows
    assert list(found.ids) == ["a", "b", "c"]
    assert found.rows[-1] == {"id": "c"}
    assert found.rows[:2] == rows[:2]


def test_rows_without_an_id_are_numbered(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": 1}\n{"q": 2}\n')
    found = read_rows(path)
    assert list(found.ids) == ["0", "1"]
    assert found.ids[0:2] == ["0", "1"]


@given(st.lists(st.tuples(_TEXTS, st.integers(-(2**50), 2**50)), min_size=1, max_size=8))
def test_jsonl_and_parquet_are_equivalent(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"text": text, "number": number} for text, number in values]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pl.DataFrame(rows).write_parquet(folder / "a.parquet")
    both = [list(read_rows(folder / name).rows) for name in ("a.jsonl", "a.parquet")]
    assert both[0] == both[1] == rows


def test_csv_keeps_texts_unchanged(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffid,zip,tokens,score\n1,007,12,1.50\n2,"1\n2",7,\n', encoding="utf-8")
    found = read_rows(path, "id")
    assert list(found.rows) == [
        {"id": 1, "zip": "007", "tokens": 12, "score": "1.50"},
        {"id": 2, "zip": "1\n2", "tokens": 7, "score": None},
    ]
    assert list(found.ids) == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"id": 1}\n{"id": 1}\n', "line 2: every id must be unique; '1' is also in line 1"),
        ("a.jsonl", '{"id": 1}\n[1]\n', "line 2: must be a JSON object"),
        ("a.jsonl", '{"id": 1}\n{"id": \n', "line 2: must be a JSON object; Expecting value"),
        ("a.jsonl", '{"idd": 1}\n', "line 1: there is no field for the id named 'id'. Did you mean: idd?"),
        ("a.jsonl", '{"id": 1.5}\n', "line 1: an id must be a text or a whole number; id is 1.5"),
        ("a.jsonl", "\n\n", "must have at least one row"),
        ("a.csv", "id,b\n1,2\n3\n", "line 3: must have 2 values as the header does; it has 1"),
        ("a.csv", "id,id\n1,2\n", "line 1: must be a header that names every column once"),
        ("a.csv", 'id,b\n1,"x\n', "must be CSV"),
        ("a.parquet", "no parquet", "must be Parquet"),
        ("a.txt", "x", "must be a file that ends in .jsonl, .csv, .parquet"),
    ],
)
def test_a_problem_is_reported_with_its_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_rows(path, "id")
    assert message in str(error.value)
    assert name in str(error.value)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(InputError, match="there is no file of inputs"):
        read_rows(tmp_path / "none.jsonl")


def test_bytes_that_are_no_text_are_reported(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": "\xff"}\n')
    (tmp_path / "a.csv").write_bytes(b"id\n\xff\n")
    for name in ("a.jsonl", "a.csv"):
        with pytest.raises(InputError, match="UTF-8"):
            read_rows(tmp_path / name)


def test_a_file_changed_while_it_is_read_is_reported(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "one"}\n{"q": "two"}\n')
    found = read_rows(path)
    path.write_text("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")
    with pytest.raises(InputError, match="must not change"):
        found.rows[1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_the_first_rows_are_a_file_of_their_own(tmp_path, name):
    frame = pl.DataFrame({"key": ["x", "y", "z"], "n": [1, 2, 3]})
    write = {"a.jsonl": frame.write_ndjson, "a.csv": frame.write_csv, "a.parquet": frame.write_parquet}
    write[name](tmp_path / name)
    complete = read_rows(tmp_path / name, "key")
    some = complete.first(2)
    assert list(some.ids) == ["x", "y"]
    assert [row["n"] for row in some.rows] == [1, 2] == [row["n"] for row in some.rows[:]]
    assert some.rows[-1]["n"] == 2
    assert len(some) == 2
    with pytest.raises(IndexError):
        some.rows[2]
    assert len({complete.sha256, some.sha256, complete.first(1).sha256}) == 3
    assert complete.first(3) is complete
