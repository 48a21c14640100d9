"""Options that commands have in common, with one wording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CostSource = Annotated[
    str | None,
    typer.Option(metavar="SOURCE", help="roofline, profile:FILE, tables:FILE, vidur:DIR, vidur_forest:DIR"),
]
HtmlReport = Annotated[Path | None, typer.Option(help="Write a self-contained HTML report to this file.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(help="Write all numbers to this file; -: to standard output, without the table."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no table and no progress.")]
