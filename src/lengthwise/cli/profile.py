"""``lengthwise profile``: what was measured of operators on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli import profile_fit, profile_run

EXAMPLES = """\b
Examples:
  lengthwise profile import llmservingsim RTXPRO6000/meta-llama/Llama-3.1-8B/bf16 --out p.parquet
  lengthwise profile import aiconfigurator systems/data --system h200_sxm --out p.parquet
  lengthwise profile show p.parquet --report p.html
  lengthwise profile show cpu.parquet --gpu cpu.toml --model config.json
  lengthwise profile check new.parquet old.parquet
"""

IMPORT_EXAMPLES = """\b
Examples:
  lengthwise profile import vidur data/profiling --model llama-2-70b --device a100 --out p.parquet
  lengthwise profile import llmservingsim RTXPRO6000/meta-llama/Llama-3.1-8B/bf16 --out p.parquet
  lengthwise profile import aiconfigurator systems/data --system h200_sxm --out p.parquet
"""

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Measure, import, look at and compare the times of operators.",
    epilog=EXAMPLES,
)


@app.callback()
def _profile() -> None:
    """Keeps its commands beside each other, however many there are."""


app.command("fit", epilog=profile_fit.EXAMPLES)(profile_fit.run)
app.command("run", epilog=profile_run.EXAMPLES)(profile_run.run)

imports = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Read other people's measurements, once, into a profile.",
    epilog=IMPORT_EXAMPLES,
)
app.add_typer(imports, name="import")

_OUT = typer.Option(metavar="FILE", help="Where the profile goes, usually NAME.parquet.")
_FILE = typer.Argument(metavar="FILE", help="A profile, as `profile run` and `profile import` write it.")


@imports.command(epilog=IMPORT_EXAMPLES)
def vidur(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Vidur's data/profiling.")],
    *,
    model: Annotated[
        str, typer.Option(help="A model of the catalog; its name or an alias is a folder there.")
    ],
    device: Annotated[str, typer.Option(help="A folder under compute/, or a GPU whose name starts so.")],
    node: Annotated[
        str | None, typer.Option(help="Whose network to take; else pairwise NVLink, or the DGX.")
    ] = None,
    keep_surrogates: Annotated[
        bool, typer.Option("--keep-surrogates", help="Keep rows that were made up and not measured.")
    ] = False,
    out: Annotated[Path, _OUT],
) -> None:
    """Import a model's mlp.csv, attention.csv and the device's network from Vidur's profiles."""
    from lengthwise.cli import _profile_page as page

    page.from_vidur(folder, model, device, node, out, keep_surrogates=keep_surrogates)


@imports.command(epilog=IMPORT_EXAMPLES)
def llmservingsim(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Holds tp1/, tp2/ ...: of its profiler v0 or v1.")
    ],
    *,
    out: Annotated[Path, _OUT],
) -> None:
    """Import the profile of one model on one device from LLMServingSim's profiles."""
    from lengthwise.cli import _profile_page as page

    page.from_llmservingsim(folder, out)


@imports.command(epilog=IMPORT_EXAMPLES)
def aiconfigurator(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="Holds h200_sxm/ ...; without it, the data of the installed package aiconfigurator-core.",
        ),
    ] = None,
    *,
    system: Annotated[str, typer.Option(help="A folder there, such as h200_sxm.")],
    backend: Annotated[str, typer.Option(help="The engine: vllm, trtllm or sglang.")] = "vllm",
    version: Annotated[str, typer.Option(help="Of the engine.")] = "0.24.0",
    out: Annotated[Path, _OUT],
) -> None:
    """Import the kernels of a system and an engine from NVIDIA AIConfigurator's tables."""
    from lengthwise.cli import _profile_page as page

    page.from_aiconfigurator(folder, system, backend, version, out)


@app.command(epilog=EXAMPLES)
def show(
    file: Annotated[Path, _FILE],
    *,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The roofline's: a catalog name or a TOML file of one GPU; default: the profile's.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Whose operators these are: a catalog name or a Hugging Face config.json; default: the profile's.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML page: curves, attention, roofline, gaps."),
    ] = None,
    json_: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all numbers as JSON; - is standard output."),
    ] = None,
) -> None:
    """Show a profile's operators: sizes, times, noise, their share of the roofline, and where nothing was measured."""
    from lengthwise.cli import _profile_page as page

    page.show(file, gpu, model, report=report, json_file=json_)


@app.command(epilog=EXAMPLES)
def check(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The profile measured now.")],
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The profile that it should agree with.")],
    *,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", help="How much longer a time may be, or how much shorter.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of the intervals.")] = 0,
    json_: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all numbers as JSON; - is standard output."),
    ] = None,
) -> None:
    """Compare a new profile with an old one and name the operators that moved, beyond what their spread explains.

    Exits with 0 where none moved, with 1 where some did, with 2 where the profiles cannot be compared.
    """
    from lengthwise.cli import _profile_page as page

    if page.check(new, old, tolerance=tolerance, seed=seed, json_file=json_):
        raise typer.Exit(1)
