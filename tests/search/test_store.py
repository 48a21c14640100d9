"""The store of evaluations: durable, shared, and never another's."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lengthwise
from lengthwise.schema.errors import InputError, OutputError
from lengthwise.search.store import DECIDING, FILE, Store, code_version, content_key

PACKAGE = Path(lengthwise.__file__).parent

WRITER = """
import sys
from lengthwise.search.store import Store
with Store.open(sys.argv[1]) as store:
    for at in range(int(sys.argv[3])):
        store.put(f"{sys.argv[2]}{at}", {"at": at, "filler": "x" * 500})
        print(at, flush=True)
"""
FULL_DISK = """
import resource, signal, sys
from lengthwise.schema.errors import OutputError
from lengthwise.search.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Store.open(sys.argv[1]) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        for at in range(1_000):
            store.put(str(at), {"filler": "x" * 500})
    except OutputError as error:
        print(at, error)
"""


def start(folder, name="k", puts=100_000):
    command = [sys.executable, "-c", WRITER, str(folder), name, str(puts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_what_is_put_comes_back_to_the_bit(tmp_path):
    value = {"a": 0.1 + 0.2, "b": [1, None, "ü"], "c": {"inf": math.inf}, "nan": math.nan}
    with Store.open(tmp_path / "new" / "folder") as store:
        store.put("k", value)
    with Store.open(tmp_path / "new" / "folder") as store:
        back = store.get("k")
        assert math.isnan(back.pop("nan"))
        assert back == {key: value[key] for key in back}
        assert store.get("other") is None


def test_the_first_value_of_a_key_stays(tmp_path):
    with Store.open(tmp_path) as store:
        store.put("k", {"a": 1})
        store.put("k", {"a": 2})
        assert store.get("k") == {"a": 1}
        assert len(store) == 1


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_was_confirmed_as_stored(tmp_path):
    chance = random.Random(5)
    before = 0
    for life in range(4):
        reported = killed_after(start(tmp_path, name=f"life{life}-"), chance.randrange(1, 600), chance.random() / 500)
        with Store.open(tmp_path) as store:
            assert {f"life{life}-{at}" for at in range(reported)} <= set(stored_keys(store))
            assert len(store) - before - reported in {0, 1}  # the kill may fall between the put and its telling
            assert store.get(f"life{life}-{reported - 1}") == {"at": reported - 1, "filler": "x" * 500}
            before = len(store)


def stored_keys(store):
    with closing(sqlite3.connect(store.path)) as connection:
        return [key for (key,) in connection.execute("SELECT key FROM evaluations ORDER BY id")]


def killed_after(writer, puts, delay_s):
    """How many puts a writer acknowledged that was killed at some moment after ``puts`` of them."""
    lines = [writer.stdout.readline() for _ in range(puts)]
    time.sleep(delay_s)
    writer.kill()
    lines += writer.stdout.readlines()
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    assert [int(line) for line in lines] == list(range(len(lines)))
    return len(lines)


@pytest.mark.slow
def test_several_processes_open_and_append_at_once(tmp_path):
    writers = [start(tmp_path, name, puts=200) for name in "abcd"]
    assert [len(w.communicate(timeout=60)[0].splitlines()) for w in writers] == [200] * 4
    with Store.open(tmp_path) as store:
        assert len(store) == 800


def test_a_full_disk_is_reported_and_earlier_entries_survive(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    failed_at, message = done.stdout.split(maxsplit=1)
    assert message.startswith(f"cannot store evaluations in {tmp_path / FILE}")
    with Store.open(tmp_path) as store:
        assert stored_keys(store) == [str(at) for at in range(int(failed_at))]
        assert len(store) > 0


@pytest.fixture
def read_only():
    """A folder with a store that an unprivileged user can read and not write, as that user."""
    folder = Path(tempfile.mkdtemp())
    with Store.open(folder) as store:
        store.put("k", {})
    (folder / FILE).chmod(0o444)
    folder.chmod(0o555)
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    yield folder
    os.seteuid(user)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_reported(read_only):
    with pytest.raises(OutputError, match="cannot store evaluations in"):
        Store.open(read_only)
    with pytest.raises(OutputError, match="cannot store evaluations in"):
        Store.open(read_only / "new")


def test_a_file_in_place_of_the_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot store evaluations in"):
        Store.open(tmp_path / "file")


def test_a_lasting_lock_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.search.store.TIMEOUT_S", 0.1)
    with Store.open(tmp_path) as store:
        blocker = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutputError, match="locked"):
            store.put("k", {})
        blocker.close()
        store.put("k", {})


def test_a_newer_format_is_not_touched(tmp_path):
    with Store.open(tmp_path) as store:
        store.connection.execute("PRAGMA user_version = 99")
    with pytest.raises(InputError, match="has format 99, this lengthwise knows up to 1"):
        Store.open(tmp_path)


def test_a_file_that_is_no_database_is_reported_and_unchanged(tmp_path):
    (tmp_path / FILE).write_text("these are not evaluations\n" * 99)
    with pytest.raises(InputError, match="is no store of evaluations"):
        Store.open(tmp_path)
    assert (tmp_path / FILE).read_text().startswith("these are not")


def test_the_database_of_another_program_is_reported_and_unchanged(tmp_path):
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("CREATE TABLE theirs (a)")
    other.close()
    with pytest.raises(InputError, match="database of another program"):
        Store.open(tmp_path)


def test_a_bug_of_the_caller_is_no_fault_of_the_file(tmp_path):
    store = Store.open(tmp_path)
    store.close()
    with pytest.raises(sqlite3.ProgrammingError):
        store.get("k")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
contents = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def told_again(part):
    """The same content in another make: tuples for lists, mappings filled from behind."""
    if isinstance(part, dict):
        return {key: told_again(part[key]) for key in reversed(part)}
    return tuple(told_again(item) for item in part) if isinstance(part, list) else part


@given(contents)
def test_the_same_content_has_the_same_key(part):
    assert content_key(part) == content_key(told_again(part))
    assert content_key(part) == content_key(json.loads(json.dumps(part)))


@given(contents, contents)
def test_other_content_has_another_key(one, other):
    assert (content_key(one) == content_key(other)) == (repr(told_sorted(one)) == repr(told_sorted(other)))


def told_sorted(part):
    if isinstance(part, dict):
        return {key: told_sorted(part[key]) for key in sorted(part)}
    return [told_sorted(item) for item in part] if isinstance(part, list) else part


@given(st.floats(allow_nan=False))
def test_a_float_counts_to_its_last_bit(number):
    assert content_key(number) != content_key(math.nextafter(number, math.inf if number < 0 else -math.inf))


def test_similar_values_get_different_keys():
    alike = [math.nan, math.inf, -math.inf, "NaN", None, 0, 0.0, -0.0, False, "", [], {}, [[]], "0"]
    assert len({content_key(part) for part in alike}) == len(alike)
    assert content_key(1, 2) != content_key([1, 2])
    assert content_key("ab", "c") != content_key("a", "bc")


def test_a_key_outlives_the_process():
    written = b'["a",1.5,{"b":[null,true],"c":NaN}]'
    assert content_key("a", 1.5, {"c": math.nan, "b": [None, True]}) == hashlib.sha256(written).hexdigest()


@pytest.mark.parametrize("part", [{1: 2}, [{"a": ({None: 1},)}], {1, 2}, b"a", object()])
def test_values_that_json_cannot_represent_are_refused(part):
    with pytest.raises(TypeError):
        content_key(part)


def versions_of(package):
    """What the code of a copied package calls itself, in a process of its own."""
    code = "from lengthwise.search.store import code_version; print(code_version())"
    env = os.environ | {"PYTHONPATH": str(package.parent)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_the_code_version_changes_with_what_decides_and_with_nothing_else(tmp_path):
    package = tmp_path / "lengthwise"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "report" / "summary_table.py").write_text("# another table")
    (package / "engine" / "__pycache__").mkdir()
    assert versions_of(package) == code_version()
    for changed in ("catalog/data/gpus.toml", "engine/_kernel_groups.py"):
        before = versions_of(package)
        with (package / changed).open("a") as file:
            file.write("\n# changed\n")
        assert versions_of(package) != before, changed


def test_every_room_that_search_stands_on_decides():
    """A new room below search has to be added to DECIDING, or be named here with those that only tell."""
    contracts = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    lines = [[name.strip().removeprefix("lengthwise.") for name in line.split("|")] for line in layers]
    at = next(at for at, line in enumerate(lines) if "search" in line)
    below = {name for line in lines[at + 1 :] for name in line} | {"search"}
    assert below - {"backend"} | {"config", "usecases"} == {name.removesuffix(".py") for name in DECIDING}
    assert all((PACKAGE / name).exists() for name in DECIDING)
