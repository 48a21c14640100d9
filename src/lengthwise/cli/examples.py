"""``lengthwise examples``."""

from __future__ import annotations

import re
import shutil
import tempfile
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from lengthwise.cli import outputs
from lengthwise.cli.tables import print_table
from lengthwise.config.files import examples_folder
from lengthwise.schema.errors import OutputError

EXAMPLES = """\b
Examples:
  lengthwise examples
  lengthwise examples --copy examples
"""
COMMANDS = {"schedule": "schedule", "search": "search", "lab": "lab", "calls": "app plan", "engines": "serve --check"}
"""By table of an example: the command that reads it. Examples without these tables are simulated."""


def run(
    copy: Annotated[Path | None, Option("--copy", metavar="DIR", help="Copy the files into this new folder.")] = None,
) -> None:
    """List the examples that come with lengthwise, or copy them into a folder, to run and change them."""
    source = examples_folder()
    if copy is None:
        rows = [(f"lengthwise {command} examples/{name}", about) for name, command, about in listed(source)]
        print_table(("command", "what it answers"), rows, wraps=("what it answers",))
        typer.echo("\nlengthwise examples --copy examples puts the files into the folder examples.", err=True)
        return
    outputs.require_folder(copy)
    if copy.exists() and any(copy.iterdir()):
        raise OutputError(f"cannot copy into {copy}: it has files already; name a new folder")
    with tempfile.TemporaryDirectory(dir=copy.absolute().parent, prefix=".examples-") as made:
        complete = Path(made, "examples")
        shutil.copytree(source, complete, ignore=shutil.ignore_patterns("__pycache__"))
        complete.replace(copy)
    outputs.print_written([copy])


def listed(source: Path) -> list[tuple[str, str, str]]:
    """Return for each scenario, application and gateway file: path in the folder, command, and purpose."""
    found = []
    for path in sorted(source.rglob("*.toml")):
        text = path.read_text("utf-8")
        table = tomllib.loads(text)
        comments = takewhile(lambda line: line.startswith("#"), text.splitlines())
        first = re.match(r".*?[.?!]\)?(?=\s|$)", " ".join(line.lstrip("# ") for line in comments))
        about = table.get("description") or (first[0] if first else "")
        command = next((command for key, command in COMMANDS.items() if key in table), "simulate")
        if command != "simulate" or "deployment" in table:
            found.append((path.relative_to(source).as_posix(), command, about))
    return found
