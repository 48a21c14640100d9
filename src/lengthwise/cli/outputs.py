"""Output files, which are checked before the work starts and written after it."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from lengthwise.schema.errors import MissingExtraError, OutputError
from lengthwise.schema.files import path_fault, write_atomic

STDOUT = Path("-")


def require_writable(paths: Iterable[Path], inputs: Iterable[Path] = ()) -> None:
    """Raise OutputError if a file cannot be written, is named twice, or is one of ``inputs``."""
    read = {path.resolve() for path in inputs}
    seen = set()
    for path in paths:
        target = path.resolve()
        if reason := "only --json goes to standard output" if path == STDOUT else _file_obstacle(target):
            raise OutputError(f"cannot write {path}: {reason}")
        if target in read:
            raise OutputError(f"cannot write {path}: it is also an input; choose another name")
        if target in seen:
            raise OutputError(f"cannot write two outputs to {path}; give each its own file")
        seen.add(target)


def require_outputs(
    json: Path | None, report: Path | None, inputs: Iterable[Path] = (), more: Iterable[Path] = ()
) -> None:
    """Raise InputError if ``--json``, ``--report`` or a file of ``more`` cannot be written, or jinja2 is missing."""
    given = [json if json != STDOUT else None, report]
    require_writable([*(path for path in given if path is not None), *more], inputs)
    if report is not None:
        require_report_extra()


def require_folder(folder: Path) -> None:
    """Raise OutputError if a folder cannot be created or written, or is a file."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"cannot write into {folder}: it is a file; name a folder")
    if reason := _folder_obstacle(next(path for path in (folder, *folder.resolve().parents) if path.exists())):
        raise OutputError(f"cannot create {folder}: {reason}")


def require_report_extra() -> None:
    """Raise MissingExtraError if jinja2, which renders HTML reports, is not installed."""
    if find_spec("jinja2") is None:
        raise MissingExtraError("the HTML report", "report")


def write_outputs(
    json: Path | None,
    html: Path | None,
    answer: Any,
    as_json: Callable[[Path, Any], object],
    as_html: Callable[[Path, Any], object] = lambda *_: None,
    *,
    quiet: bool = False,
) -> None:
    """Write the requested files and, unless ``quiet``, print their paths. If ``json`` is ``-``, print the JSON text."""
    if json == STDOUT:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "answers.json"
            as_json(path, answer)
            typer.echo(path.read_text("utf-8"), nl=False)
    elif json is not None:
        as_json(json, answer)
    if html is not None:
        as_html(html, answer)
    print_written(path for path in (json, html) if path is not None and path != STDOUT and not quiet)


def write_text(path: Path, text: str, *, quiet: bool = False) -> None:
    """Write a text file as ``write_outputs`` does, or print the text if the path is ``-``."""
    write_outputs(path, None, text.encode(), write_atomic, quiet=quiet)


def print_written(paths: Iterable[Path]) -> None:
    """Print on standard error that these files were written."""
    for path in paths:
        typer.echo(f"wrote {path}", err=True)


def variant_path(path: Path, name: str) -> Path:
    """Return the output file of a variant: out.json becomes out-two-too.json for the variant "Two, too"."""
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "variant"
    return path.with_name(f"{path.stem}-{slug}{path.suffix}")


def _file_obstacle(target: Path) -> str:
    if reason := path_fault(target):
        return reason
    if target.exists() and not os.access(target, os.W_OK):
        return "no permission to write to it; choose another name"
    if target.exists() and not target.is_file():
        return ""  # a device or a pipe is written in place
    return _folder_obstacle(target.parent)


def _folder_obstacle(folder: Path) -> str:
    # Permissions alone do not reveal a read-only or virtual file system, so create a file.
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".lengthwise-"):
            return ""
    except PermissionError:
        return f"no permission to write in {folder}; choose another place"
    except OSError as error:
        return f"no file can be created in {folder} ({error.strerror}); choose another place"
