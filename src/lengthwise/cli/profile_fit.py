"""``lengthwise profile fit``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from lengthwise.cli import outputs

if TYPE_CHECKING:
    from lengthwise.cost import FitReport
    from lengthwise.schema.cost_tables import CostEvidence

EXAMPLES = """\b
Examples:
  lengthwise profile fit pro6000.parquet --model llama-3.1-8b --gpu RTX-PRO-6000
  lengthwise profile fit h200.parquet --model llama-3.1-70b --gpu H200 --tp 4 --out h200-tp4.npz
  lengthwise simulate chat.toml --cost tables:h200-tp4.npz
"""


def run(
    profile_file: Annotated[Path, Argument(metavar="PROFILE", help="A profile (.parquet).")],
    *,
    model: Annotated[str, Option(help="A catalog name or a Hugging Face config.json.")],
    gpu: Annotated[str, Option(help="A catalog name or a TOML file of one GPU.")],
    node: Annotated[str | None, Option(help="The node that links the GPUs; default: the usual one.")] = None,
    tp: Annotated[list[int] | None, Option(min=1, help="Tensor-parallel degree; repeatable. Default 1.")] = None,
    estimator: Annotated[str, Option(help="auto, all, physics, linear, monotone, tables or forest.")] = "auto",
    backend: Annotated[str, Option(metavar="NAME", help="Backend of the kernels, if several were measured.")] = "",
    max_num_seqs: Annotated[int, Option(min=1, help="Sequences of the largest step.")] = 256,
    max_num_batched_tokens: Annotated[int, Option(min=1, help="Tokens of the largest step.")] = 2048,
    max_model_len: Annotated[int, Option(min=2, help="Tokens of the longest request.")] = 8192,
    weight_dtype: Annotated[str | None, Option(help="Dtype of the layers; default: the model's.")] = None,
    out: Annotated[
        Path | None, Option(help="Write the tables to this .npz (several degrees: NAME-tpN.npz), for tables:FILE.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Fit cost tables to a profile: errors on held-out points by estimator, operator and region."""
    from lengthwise import catalog, cost
    from lengthwise.cost.estimators import Target, fit_profile
    from lengthwise.cost.profiles import read_profile
    from lengthwise.report.profile_fit import fits_json
    from lengthwise.schema.deployment import EngineLimits, Parallelism

    degrees = tp or [1]
    files: dict[int, Path] = {}
    if out is not None:
        names = {degree: f"{out.stem}-tp{degree}{out.suffix}" if len(degrees) > 1 else out.name for degree in degrees}
        files = {degree: out.with_name(name) for degree, name in names.items()}
    outputs.require_writable(files.values(), inputs=[profile_file])
    profile, spec, device = read_profile(profile_file), catalog.model(model), catalog.gpu(gpu)
    limits = EngineLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, weight_dtype=weight_dtype
    )
    fits = {}
    for degree in degrees:
        links = catalog.node(node) if node else catalog.default_node(device, degree)
        deployed = (spec, device, links, Parallelism(degree), limits)
        fits[degree] = fit_profile(profile, Target(*deployed, max_model_len), estimator=estimator, backend=backend)
        if files:
            cost.save(fits[degree][0], files[degree], cost.MadeFor.of(*deployed))
    if json:
        typer.echo(fits_json(fits, files), nl=False)
        return
    for degree, (tables, report) in fits.items():
        _show(degree, tables.evidence, report)
        if files:
            typer.echo(f'wrote {files[degree]}; use it as cost = "tables:{files[degree]}"')


def _show(degree: int, evidence: CostEvidence, report: FitReport) -> None:
    from lengthwise.cli.tables import console
    from lengthwise.report.profile_fit import fit_table

    if report.compared:
        machine = "" if evidence.fit else ", of the GPU they were measured on"
        title = f"TP {degree}: errors on held-out points, median (95th percentile){machine}"
        console().print(title, fit_table(report), sep="\n")
        typer.echo("* chosen: the smallest root-mean-square error inside, and beyond if steps reach there")
        typer.echo("inside: between the outermost points of every axis, without the edges")
    else:
        typer.echo(f"TP {degree}: too few points to hold any out")
    typer.echo(f"fitted to the profile: {', '.join(f'{name} ({by})' for name, by in report.picked)}")
    for operators in report.filled:
        typer.echo(f"from the roofline: {operators}")
    for note in report.notes:
        typer.echo(f"note: {note}")
    errors = ", ".join(f"{error.part} {error.log_sd:.1%}" for error in evidence.errors)
    typer.echo(f"error of each part of a step (one standard deviation): {errors}")
    reach = ", ".join(f"{largest:,} {name}" for name, largest in asdict(evidence.reach).items() if largest is not None)
    typer.echo(f"measured up to: {reach or 'unknown'}")
