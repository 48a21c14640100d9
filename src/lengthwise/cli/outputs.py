"""What a command shall write is known to be possible before it starts to work, and is then written."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import typer

from lengthwise.schema.errors import MissingExtraError, OutputError

STDOUT = Path("-")


def require_writable(paths: Iterable[Path], inputs: Iterable[Path] = ()) -> None:
    """Raises OutputError if one of the files cannot be written, is meant twice, or is one of ``inputs``."""
    read = {path.resolve() for path in inputs}
    seen = set()
    for path in paths:
        target = path.resolve()
        reason = "only --json goes to standard output" if str(path) == "-" else _why_not(target)
        if reason:
            raise OutputError(f"cannot write {path}: {reason}")
        if target in read:
            raise OutputError(f"cannot write {path}: the scenario is read from it; choose another name")
        if target in seen:
            raise OutputError(f"cannot write two things to {path}; give each a file of its own")
        seen.add(target)


def require_answers(
    json: Path | None, report: Path | None, inputs: Iterable[Path] = (), more: Iterable[Path] = ()
) -> None:
    """Raises InputError where ``--json``, ``--report`` or one ``more`` file could not be written, or no page made."""
    given = [json if json != STDOUT else None, report]
    require_writable([*(path for path in given if path is not None), *more], inputs)
    if report is not None:
        require_plotly()


def write_answers(
    json: Path | None, html: Path | None, as_json: Callable[[Path], object], as_html: Callable[[Path], object]
) -> list[Path]:
    """Writes the files that were asked for, each whole or not at all, and returns them; "-" prints the JSON."""
    if json == STDOUT:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "answers.json"
            as_json(path)
            typer.echo(path.read_text("utf-8"), nl=False)
    elif json is not None:
        as_json(json)
    if html is not None:
        as_html(html)
    return [path for path in (json, html) if path is not None and path != STDOUT]


def beside(path: Path, name: str) -> Path:
    """The file of a variant: out.json of "Two, too" is out-two-too.json."""
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "variant"
    return path.with_name(f"{path.stem}-{slug}{path.suffix}")


def tell(written: Iterable[Path]) -> None:
    """Says where the files are."""
    for path in written:
        typer.echo(f"wrote {path}", err=True)


def require_folder(folder: Path) -> None:
    """Raises OutputError if a folder could not be made, or is a file."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"cannot write into {folder}: it is a file; name a folder")
    nearest = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    reason = _why_no_file_in(nearest)
    if reason:
        raise OutputError(f"cannot make {folder}: {reason}")


def require_plotly() -> None:
    """Raises MissingExtraError where no HTML report could be made."""
    if find_spec("jinja2") is None:
        raise MissingExtraError("the HTML report", "report")


def _why_not(target: Path) -> str:
    folder = target.parent
    if target.is_dir():
        return "it is a folder; give the name of a file"
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file, not a folder; choose another place"
    if not folder.is_dir():
        return f"its folder {folder} does not exist; create it first"
    if target.exists() and not os.access(target, os.W_OK):
        return "no permission to write to it; choose another name"
    if target.exists() and not target.is_file():
        return ""  # a device or a pipe is written in place
    return _why_no_file_in(folder)


def _why_no_file_in(folder: Path) -> str:
    """Tries it: rights alone do not tell of a read-only or a virtual file system."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".lengthwise-"):
            return ""
    except PermissionError:
        return f"no permission to write in {folder}; choose another place"
    except OSError as error:
        return f"no file can be made in {folder} ({error.strerror}); choose another place"
