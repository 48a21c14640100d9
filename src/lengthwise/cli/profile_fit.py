"""``lengthwise profile fit``: from measured operators to cost tables, and how good they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lengthwise.cost import FitReport
from lengthwise.schema.cost_tables import CostTables

EXAMPLES = """\b
Examples:
  lengthwise profile fit pro6000.parquet --model llama-3.1-8b --gpu RTX-PRO-6000
  lengthwise profile fit h200.parquet --model llama-3.1-70b --gpu H200 --tp 4 --out h200-tp4.npz
  lengthwise simulate chat.toml --cost tables:h200-tp4.npz
"""


def run(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile (.parquet).")],
    *,
    model: Annotated[str, typer.Option(help="A catalog name or a Hugging Face config.json.")],
    gpu: Annotated[str, typer.Option(help="A catalog name or a TOML file of one GPU.")],
    node: Annotated[str | None, typer.Option(help="What joins the GPUs; default: a usual machine.")] = None,
    tp: Annotated[list[int] | None, typer.Option(min=1, help="Tensor-parallel degree; repeatable. Default 1.")] = None,
    estimator: Annotated[
        str, typer.Option(help="auto, all (the forest, too), physics, linear, monotone, tables or forest.")
    ] = "auto",
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Whose kernels, of several measured: a name or a part of it.")
    ] = "",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences of the largest step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the largest step.")] = 2048,
    max_model_len: Annotated[int, typer.Option(min=2, help="Tokens of the longest request.")] = 8192,
    weight_dtype: Annotated[str | None, typer.Option(help="Of the layers; default: the model's.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the tables to this .npz (several degrees: NAME-tpN.npz), for tables:FILE."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Fit cost tables to a profile: errors on unseen points by estimator, operator and region."""
    from lengthwise import catalog, cost
    from lengthwise.cli import outputs
    from lengthwise.cost.estimators import fit_profile
    from lengthwise.cost.profiles import read_profile
    from lengthwise.schema.deployment import EngineLimits, Parallelism

    degrees = tp or [1]
    files = {degree: _file(out, degree, several=len(degrees) > 1) for degree in degrees}
    outputs.require_writable([file for file in files.values() if file], inputs=[profile])
    rows, spec, device = read_profile(profile), catalog.model(model), catalog.gpu(gpu)
    limits = EngineLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, weight_dtype=weight_dtype
    )
    fitted = {}
    for degree in degrees:
        joined = catalog.node(node) if node else catalog.default_node(device, degree)
        asked = (spec, device, joined, Parallelism(degree), limits, max_model_len)
        fitted[degree] = fit_profile(rows, *asked, estimator=estimator, backend=backend)
        path = files[degree]
        if path:
            cost.save(fitted[degree][0], path, cost.MadeFor.of(*asked[:-1]))
    show(fitted, files, as_json=json)


def _file(out: Path | None, degree: int, *, several: bool) -> Path | None:
    if out is None or not several:
        return out
    return out.with_name(f"{out.stem}-tp{degree}{out.suffix}")


_REGIONS = ("inside", "small", "medium", "large", "out_of_range")
_HELD_OUT = "errors on held-out points, median (95th percentile)"
_WHERE = ", of where they were measured"
_COARSE = 0.02
"""Percentages from here on are told without a digit after the point."""

FitResult = Mapping[int, tuple[CostTables, FitReport]]


def show(fit_result: FitResult, files: Mapping[int, Path | None], *, as_json: bool) -> None:
    """Prints each degree's report, as tables or as one JSON object."""
    if as_json:
        told = [_report(degree, *pair, files[degree]) for degree, pair in fit_result.items()]
        typer.echo(json.dumps({"fits": told}, indent=2, allow_nan=False))
        return
    for degree, (tables, report) in fit_result.items():
        _show_one(degree, tables, report)
        path = files[degree]
        if path is not None:
            typer.echo(f'wrote {path}; use it as cost = "tables:{path}"')


def _show_one(degree: int, tables: CostTables, report: FitReport) -> None:
    if report.compared:
        _print_compared(f"TP {degree}: {_HELD_OUT}{'' if tables.fit else _WHERE}", report)
    else:
        typer.echo(f"TP {degree}: too few points to hold any out")
    for line in _lines(tables, report):
        typer.echo(line)


def _print_compared(title: str, report: FitReport) -> None:
    from rich.console import Console
    from rich.table import Table

    picked = dict(report.picked)
    table = Table(title=title, title_justify="left")
    for column in ("operator", "estimator", "points", *_REGIONS):
        table.add_column(column, justify="left" if column in ("operator", "estimator") else "right", no_wrap=True)
    last = ""
    for (operator, estimator), regions in _rows(report).items():
        mark = "*" if picked.get(operator) == estimator else " "
        points = max((fit.rows for fit in regions.values()), default=0)
        cells = [_cell(regions.get(region)) for region in _REGIONS]
        table.add_row("" if operator == last else operator, f"{mark} {estimator}", f"{points:,}", *cells)
        last = operator
    Console(width=120).print(table)
    typer.echo("* taken: the smallest root-mean-square error inside; with that beyond where steps go there")
    typer.echo("inside: between the outermost points of every axis; the edges themselves never count")


def _lines(tables: CostTables, report: FitReport) -> list[str]:
    lines = [f"learnt from the profile: {', '.join(f'{name} ({by})' for name, by in report.picked)}"]
    lines += [f"from the roofline: {filled}" for filled in report.filled]
    lines += [f"note: {note}" for note in report.notes]
    errors = ", ".join(f"{error.part} {error.log_sd:.1%}" for error in tables.errors)
    lines.append(f"one standard deviation of each part as a whole: {errors}")
    known = {name: largest for name, largest in asdict(tables.reach).items() if largest is not None}
    lines.append(f"measured up to: {', '.join(f'{most:,} {name}' for name, most in known.items()) or 'unknown'}")
    return lines


def _rows(report: FitReport) -> dict[tuple[str, str], dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for fit in report.compared:
        rows.setdefault((fit.operator, fit.estimator), {})[fit.region] = fit
    return rows


def _cell(fit: Any) -> str:
    if fit is None:
        return "-"
    digits = 0 if fit.p95_error >= _COARSE else 1
    return f"{fit.median_error:.1%} ({fit.p95_error:.{digits}%})"


def _report(degree: int, tables: CostTables, report: FitReport, path: Path | None) -> dict[str, Any]:
    return {
        "tp": degree,
        "file": str(path) if path else None,
        "source": tables.source,
        "estimator": report.estimator,
        "method": report.method,
        "picked": dict(report.picked),
        "compared": [asdict(fit) for fit in report.compared],
        "filled": list(report.filled),
        "notes": list(report.notes),
        "errors": {error.part: error.log_sd for error in tables.errors},
        "reach": asdict(tables.reach),
    }
