"""``lengthwise profile show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lengthwise.cli import outputs
from lengthwise.cli.options import HtmlReport, JsonFile

if TYPE_CHECKING:
    from lengthwise.cost.profiles import ProfileView

EXAMPLES = """\b
Examples:
  lengthwise profile show p.parquet --report p.html
  lengthwise profile show cpu.parquet --gpu cpu.toml --model config.json
"""
_MAX_GAPS = 4
_PIPE_WIDTH = 100  # sizes are long, and would make lines that no screen shows complete


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Output of `profile run` or `profile import`.")],
    *,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="GPU of the roofline: a catalog name or a TOML file; default: the profile's."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Model of the operators: a catalog name or a Hugging Face config.json; default: the profile's.",
        ),
    ] = None,
    report: HtmlReport = None,
    json: JsonFile = None,
) -> None:
    """Show a profile's operators: sizes, times, noise, share of the roofline, gaps."""
    from lengthwise import catalog
    from lengthwise.cost.profiles import describe_profile, read_profile
    from lengthwise.report.profile import profile_json, write_profile_html
    from lengthwise.schema.files import write_whole

    outputs.require_answers(json, report, [file])
    view = describe_profile(
        read_profile(file), catalog.gpu(gpu) if gpu else None, catalog.model(model) if model else None
    )
    if json != outputs.STDOUT:
        _show(view)
    written = outputs.write_answers(
        json,
        report,
        lambda path: write_whole(path, profile_json(view).encode()),
        lambda path: write_profile_html(path, view),
    )
    outputs.print_written(written)


def _show(view: ProfileView) -> None:
    from lengthwise.cli.tables import console, print_properties, print_table
    from lengthwise.report.profile import axes_text, share_text, time_text

    metadata = view.profile.metadata
    properties = [
        ("GPU", metadata.gpu),
        ("model", metadata.model or "none: kernels described by their shapes"),
        ("engine", metadata.engine),
        ("source", metadata.source),
        ("measured", metadata.measured),
        ("license", metadata.license),
    ]
    rows, gaps = [], dict[str, list[str]]()
    for operator in view.operators:
        low, high = map(time_text, operator.seconds)
        rows.append(
            [
                operator.operator,
                str(operator.tp or "-"),
                operator.dtype or "-",
                f"{len(operator.rows):,}",
                axes_text(operator),
                low if operator.seconds[0] == operator.seconds[1] else f"{low} to {high}",
                share_text(operator.spread),
                share_text(operator.median.roofline if operator.median else None),
                share_text(operator.best.roofline if operator.best else None),
            ]
        )
        if operator.gaps:
            more = len(operator.gaps) - _MAX_GAPS
            text = "; ".join(map(str, operator.gaps[:_MAX_GAPS])) + (f"; and {more} more" if more > 0 else "")
            gaps.setdefault(text, []).append(operator.operator)
    notes = list(metadata.notes)
    if not any(operator.best for operator in view.operators):
        if view.work is None:
            notes.append(f"no roofline: the catalog has no GPU {metadata.gpu!r}; give it (--gpu NAME or FILE.toml)")
        elif metadata.model:
            notes.append(
                f"no roofline: the catalog has no model {metadata.model!r}; give it (--model NAME or config.json)"
            )
    print_properties(metadata.name, properties, piped=_PIPE_WIDTH)
    heads = ("operator", "TP", "dtype", "points", "sizes", "time", "spread", "of roofline", "best")
    print_table(heads, rows, wraps=("sizes",), drops=("spread", "best", "dtype"), piped=_PIPE_WIDTH)
    out = console(_PIPE_WIDTH)
    for text, operators in gaps.items():
        out.print(f"no points at {text}: {', '.join(dict.fromkeys(operators))}")
    for note in notes:
        out.print(f"note: {note}")
