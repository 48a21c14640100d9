from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lengthwise.schema.errors import OutputError
from lengthwise.schema.files import write_atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_and_function_leave_one_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.bin", b"one")
    write_atomic(str(tmp_path / "b.csv"), lambda path: path.write_text(path.suffix) and None)
    assert (tmp_path / "a.bin").read_bytes() == b"one"
    assert (tmp_path / "b.csv").read_text() == ".csv"
    assert names(tmp_path) == ["a.bin", "b.csv"]


def test_a_failure_midway_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def half(path: Path) -> None:
        path.write_text("ne")
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        write_atomic(target, half)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_full_disk_is_an_output_error_and_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def full(path: Path) -> None:
        path.write_text("n")
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"a\.txt: No space left"):
        write_atomic(target, full)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_mode_is_preserved_and_links_are_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "a.txt", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_device_is_written_in_place() -> None:
    write_atomic("/dev/null", b"gone")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/such/a.txt", "does not exist; create it"), ("", "is a folder"), ("f/a.txt", "f is a file, not a")],
)
def test_the_error_names_the_problem(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(OutputError, match=message):
        write_atomic(tmp_path / name, b"")
    assert names(tmp_path) == ["f"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="no permission"):
        write_atomic(tmp_path / "a.txt", b"")
