"""``lengthwise profile show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lengthwise.cli import outputs
from lengthwise.cli.options import HtmlReport, JsonFile

if TYPE_CHECKING:
    from lengthwise.cost.profiles import ProfileView

EXAMPLES = """\b
Examples:
  lengthwise profile show p.parquet --report p.html
  lengthwise profile show cpu.parquet --gpu cpu.toml --model config.json
"""


def run(
    file: Annotated[Path, Argument(metavar="FILE", help="Output of `profile run` or `profile import`.")],
    *,
    gpu: Annotated[str | None, Option(metavar="NAME|FILE", help="GPU of the roofline; default: the profile's.")] = None,
    model: Annotated[
        str | None, Option(metavar="NAME|FILE", help="Model, or config.json; default: the profile's.")
    ] = None,
    report: HtmlReport = None,
    json: JsonFile = None,
) -> None:
    """Show a profile's operators: sizes, times, noise, share of the roofline, gaps."""
    from lengthwise import catalog
    from lengthwise.cost.profiles import describe_profile, read_profile
    from lengthwise.report.profile import profile_json, write_profile_html
    from lengthwise.schema.files import write_atomic

    outputs.require_outputs(json, report, [file])
    view = describe_profile(
        read_profile(file), catalog.gpu(gpu) if gpu else None, catalog.model(model) if model else None
    )
    if json != outputs.STDOUT:
        _show(view)
    outputs.write_outputs(
        json, report, view, lambda path, view: write_atomic(path, profile_json(view).encode()), write_profile_html
    )


def _show(view: ProfileView) -> None:
    from lengthwise.cli.tables import console, print_properties, print_table
    from lengthwise.report.profile_table import OPERATOR_HEADS, operator_cells, profile_notes

    metadata = view.profile.metadata
    properties = [
        ("GPU", metadata.gpu),
        ("model", metadata.model or "none: kernels described by their shapes"),
        ("engine", metadata.engine),
        ("source", metadata.source),
        ("measured", metadata.measured),
        ("license", metadata.license),
    ]
    print_properties(metadata.name, properties)
    drops = ("spread", "best", "dtype")
    print_table(OPERATOR_HEADS, operator_cells(view), wraps=("sizes",), drops=drops)
    out = console()
    for note in profile_notes(view):
        out.print(note)
