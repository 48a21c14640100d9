"""``lengthwise profile import``: one command for each project."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from lengthwise.cli import outputs
from lengthwise.report.formatting import counted

if TYPE_CHECKING:
    from lengthwise.schema.profile import Profile

EXAMPLES = """\b
Examples:
  lengthwise profile import vidur data/profiling --model llama-2-70b --device a100 --out p.parquet
  lengthwise profile import llmservingsim RTXPRO6000/meta-llama/Llama-3.1-8B/bf16 --out p.parquet
  lengthwise profile import aiconfigurator systems/data --system h200_sxm --out p.parquet
"""

_Out = Annotated[Path, Option(metavar="FILE", help="File of the profile, usually NAME.parquet.")]


def vidur(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Vidur's data/profiling.")],
    *,
    model: Annotated[str, Option(help="A model of the catalog; its folder has its name or an alias.")],
    device: Annotated[str, Option(help="A folder under compute/, or a GPU whose name starts with it.")],
    node: Annotated[str | None, Option(help="Catalog node with the network; default: NVLink pairs or DGX.")] = None,
    keep_surrogates: Annotated[bool, Option("--keep-surrogates", help="Keep synthetic rows.")] = False,
    out: _Out,
) -> None:
    """Import a model's mlp.csv, attention.csv and the device's network from Vidur's profiles."""
    from lengthwise import catalog
    from lengthwise.cost.profiles import import_vidur

    spec, network = catalog.model(model), catalog.node(node) if node else None
    _write(lambda: import_vidur(folder, spec, device, node=network, keep_surrogates=keep_surrogates), out)


def llmservingsim(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder of tp1/, tp2/ ...: of profiler v0 or v1.")],
    *,
    out: _Out,
) -> None:
    """Import the profile of a model on a device from LLMServingSim's profiles."""
    from lengthwise.cost.profiles import import_llmservingsim

    _write(lambda: import_llmservingsim(folder), out)


def aiconfigurator(
    folder: Annotated[
        Path | None, Argument(metavar="[FOLDER]", help="Folder of h200_sxm/ ...; default: that of aiconfigurator-core.")
    ] = None,
    *,
    system: Annotated[str, Option(help="A folder in it, such as h200_sxm.")],
    backend: Annotated[str, Option(help="The engine: vllm, trtllm or sglang.")] = "vllm",
    version: Annotated[str, Option(help="Version of the engine.")] = "0.24.0",
    out: _Out,
) -> None:
    """Import the kernels of a system and an engine from AIConfigurator's tables."""
    from lengthwise.cost.profiles import import_aiconfigurator

    _write(lambda: import_aiconfigurator(folder, system, backend, version), out)


def _write(read: Callable[[], Profile], out: Path) -> None:
    from lengthwise.cost.profiles import write_profile

    outputs.require_writable([out])
    started = time.perf_counter()
    profile = read()
    write_profile(profile, out)
    duration_s = time.perf_counter() - started
    degrees, metadata = ", ".join(map(str, profile.tensor_parallel)), profile.metadata
    content = f"{metadata.model} at TP {degrees}" if degrees else "kernels of no model"
    operators = counted(len(profile.operators), "operator")
    typer.echo(f"{counted(len(profile), 'point')} of {operators}: {content} on {metadata.gpu}")
    for note in metadata.notes:
        typer.echo(f"  {note}")
    typer.echo(f"wrote {out} ({out.stat().st_size / 1000:,.0f} kB) in {duration_s:.1f} s")
