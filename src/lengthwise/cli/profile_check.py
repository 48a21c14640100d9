"""``lengthwise profile check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from lengthwise.cli import outputs
from lengthwise.cli.options import JsonFile

if TYPE_CHECKING:
    from lengthwise.cost.profiles import ProfileCheck

EXAMPLES = """\b
Example:
  lengthwise profile check new.parquet old.parquet
"""


def run(
    new: Annotated[Path, Argument(metavar="NEW", help="The profile measured now.")],
    old: Annotated[Path, Argument(metavar="OLD", help="The profile to compare it with.")],
    *,
    tolerance: Annotated[float, Option(metavar="SHARE", help="Allowed relative change of a time, up or down.")] = 0.05,
    seed: Annotated[int, Option(min=0, help="Seed of the intervals.")] = 0,
    json: JsonFile = None,
) -> None:
    """Compare a new profile with an old one and name the operators that changed.

    A change counts if it exceeds the tolerance and the spread of the points. Exits with 0 if no operator changed,
    with 1 if some did, with 2 if the profiles cannot be compared.
    """
    from lengthwise.cost.profiles import check_profiles, read_profile
    from lengthwise.report.profile import check_json

    outputs.require_outputs(json, None, [new, old])
    found = check_profiles(read_profile(new), read_profile(old), tolerance=tolerance, seed=seed)
    if json is not None:
        outputs.write_text(json, check_json(found), quiet=True)
    if json != outputs.STDOUT:
        _show(found, new, old)
    if found.changed:
        raise typer.Exit(1)


def _show(found: ProfileCheck, new: Path, old: Path) -> None:
    from lengthwise.cli.tables import print_table
    from lengthwise.report.profile_table import CHECK_HEADS, check_cells

    print_table(CHECK_HEADS, check_cells(found), wraps=(), drops=("dtype",))
    share = f"{100 * found.tolerance:g} %"
    if found.changed:
        names = ", ".join(dict.fromkeys(row.operator for row in found.changed))
        typer.echo(f"changed by more than {share}: {names}")
    else:
        typer.echo(f"no operator changed by more than {share}; above are the largest changes")
    points = sum(row.points for row in found.rows)
    typer.echo(f"{points:,} points of {new} compared with {old}; {found.unmatched:,} have no counterpart")
    if found.only_new:
        typer.echo(f"only in the new profile: {', '.join(found.only_new)}")
    if found.only_old:
        typer.echo(f"only in the old profile: {', '.join(found.only_old)}")
    for note in found.notes:
        typer.echo(f"note: {note}")
