"""A place becomes a ledger, or an error in words: other files, newer versions, other programs, nothing there."""

from __future__ import annotations

import sqlite3
import sys

import pytest
from ledger_world import drain, tasks_of

from lengthwise.apps.ledger import FILE, Partial, State, open_ledger
from lengthwise.schema.errors import InputError, MissingExtraError, OutputError


def test_a_folder_holds_its_ledger_under_a_name_of_its_own(tmp_path):
    open_ledger(tmp_path).close()
    assert (tmp_path / FILE).exists()
    open_ledger(tmp_path / "made" / "where" / "missing.sqlite").close()
    assert (tmp_path / "made" / "where" / "missing.sqlite").exists()


@pytest.mark.parametrize("content", [b"some words, no database" * 100, b"SQLite format 3\x00" + b"\xff" * 4096])
def test_a_file_that_is_no_ledger_is_named_and_left_alone(content, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for read_only in (False, True):
        with pytest.raises(InputError, match=r"notes\.txt is no ledger, or damaged.*name another file"):
            open_ledger(path, read_only=read_only)
    assert path.read_bytes() == content


def test_the_database_of_another_program_is_named_and_left_alone(tmp_path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE other (x)")
    other.close()
    with pytest.raises(InputError, match="the database of another program: name another file"):
        open_ledger(path)
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("other",)]
    other.close()


def test_a_newer_file_is_not_touched(tmp_path):
    path = tmp_path / "run.sqlite"
    open_ledger(path).close()
    with sqlite3.connect(path) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(InputError, match="format 99, this lengthwise knows up to 1: install a newer"):
        open_ledger(path)


def test_opening_a_ledger_before_it_is_created_suggests_a_retry(tmp_path):
    path = tmp_path / "ledger.sqlite"
    sqlite3.connect(path).close()
    path.touch()
    with pytest.raises(InputError, match="the file is empty: if a run has just started, wait a moment"):
        open_ledger(path, read_only=True)


def test_the_schema_of_another_program_or_of_a_newer_version_is_not_touched(server):
    import psycopg

    places = {name: server.place(name) for name in ("other", "newer")}
    open_ledger(places["newer"]).close()
    with psycopg.connect(places["newer"].partition("&schema")[0]) as other:
        other.execute("CREATE SCHEMA other")
        other.execute("COMMENT ON SCHEMA newer IS 'lengthwise ledger, format 99'")
    with pytest.raises(InputError, match=r"a schema of another program: name another with \?schema=NAME"):
        open_ledger(places["other"])
    with pytest.raises(InputError, match="format 99"):
        open_ledger(places["newer"], read_only=True)


def test_read_only_nothing_is_made_and_nothing_changed(place):
    with pytest.raises(InputError, match=r"there must be a ledger at .*: start a run first"):
        open_ledger(place(), read_only=True)
    tasks = tasks_of(20)
    with open_ledger(place()) as ledger:
        ledger.open("run", tasks)
        drain(ledger, "me", most=5)
        before = ledger.rows(0, 20)
    with open_ledger(place(), read_only=True) as status:
        assert status.rows(0, 20) == before
        assert status.metadata()
        for change in (
            lambda: status.open("run", tasks),
            lambda: status.set_metadata({"a": "b"}),
            lambda: status.expire(now_s=0),
        ):
            with pytest.raises(InputError, match="opened for reading"):
                change()


def test_a_ledger_in_a_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    """By another user, or on a disk that is mounted to be read."""
    path = tmp_path / "run.sqlite"
    with open_ledger(path) as ledger:
        ledger.open("run", tasks_of(20))
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, who may write anywhere
    tmp_path.chmod(0o555)
    with open_ledger(path, read_only=True) as status:
        assert sum(status.counts().values()) == 20
        assert [file.name for file in tmp_path.iterdir()] == ["run.sqlite"]
    tmp_path.chmod(0o755)


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot create a ledger"):
        open_ledger(tmp_path / "file" / "run.sqlite")


@pytest.mark.parametrize("place", ["mysql://me:secret@host/db", "http://x/y"])
def test_other_stores_are_not_known(place):
    with pytest.raises(InputError, match=r"a file, a folder or postgresql://") as error:
        open_ledger(place)
    assert "secret" not in str(error.value)


def test_an_unreachable_server_is_reported_without_the_password(tmp_path):
    with pytest.raises(OutputError, match=r"(?s)postgresql:///x\?schema=s.*check the server") as error:
        open_ledger(f"postgresql:///x?host={tmp_path}&user=me&password=secret&schema=s")
    assert "secret" not in str(error.value)
    with pytest.raises(OutputError) as error:
        open_ledger("postgresql://me:secret@localhost:1/x")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("schema", ["", "A", "a-b", 'a"; DROP', "x" * 64, "1a"])
def test_a_schema_must_be_a_plain_name(schema):
    with pytest.raises(InputError, match="schema must be a name"):
        open_ledger(f"postgresql:///x?schema={schema}")


def test_without_the_driver_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[postgres\]"):
        open_ledger("postgresql:///x")


def test_an_old_sqlite_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 31, 0))
    with pytest.raises(InputError, match=r"needs SQLite 3\.37"):
        open_ledger(tmp_path)


def test_a_changed_run_is_laid_out_again_and_reuses_existing_answers(place):
    before, after = tasks_of(30, seed=1), tasks_of(50, seed=2)
    with open_ledger(place()) as ledger:
        ledger.open("before", before)
        drain(ledger, "me")
        ledger.save([("never asked", Partial("half"))])
        answered = {row.key: row.output for row in ledger.rows(0, 30) if row.output}
        assert not ledger.open("after", after)
        assert ledger.results([*answered, "new"]) == answered
        assert set(ledger.partials(["never asked"])) == {"never asked"}
        assert {state for _, state in ledger.counts()} == {State.READY, State.WAITING}
        assert all(row.attempts == 0 and row.key is None for row in ledger.rows(0, 50))
        with pytest.raises(InputError, match="50 tasks under it, not 30"):
            ledger.open("after", before)
        with pytest.raises(InputError, match="identity"):
            ledger.open("", before)
