"""``lengthwise profile fit``: from measured operators to cost tables, and how good they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    tp: Annotated[
        list[int] | None, typer.Option(min=1, help="Tensor-parallel degree; repeatable. Default 1.")
    ] = None,
    estimator: Annotated[
        str, typer.Option(help="auto, all (the forest, too), physics, linear, monotone, tables or forest.")
    ] = "auto",
    backend: Annotated[
        str,
        typer.Option(metavar="NAME", help="Whose kernels, of several measured: a name or a part of it."),
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
    from lengthwise.cli import _outputs, _profile_fit_page
    from lengthwise.cost.estimators import fit_profile
    from lengthwise.cost.profiles import read_profile
    from lengthwise.schema.deployment import EngineLimits, Parallelism

    degrees = tp or [1]
    files = {degree: _file(out, degree, several=len(degrees) > 1) for degree in degrees}
    _outputs.require_writable([file for file in files.values() if file], inputs=[profile])
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
    _profile_fit_page.show(fitted, files, as_json=json)


def _file(out: Path | None, degree: int, *, several: bool) -> Path | None:
    if out is None or not several:
        return out
    return out.with_name(f"{out.stem}-tp{degree}{out.suffix}")
