"""``lengthwise profile``: what was measured of operators on a device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lengthwise import catalog
from lengthwise.cli import profile_fit, profile_run
from lengthwise.cli.outputs import require_plotly, require_writable
from lengthwise.cli.tables import console, print_facts, print_table
from lengthwise.cost.profiles import (
    Moved,
    OperatorView,
    ProfileCheck,
    ProfileView,
    check_profiles,
    describe_profile,
    import_aiconfigurator,
    import_llmservingsim,
    import_vidur,
    read_profile,
    write_profile,
)
from lengthwise.report.profile import axes_text, check_json, profile_json, share_text, time_text, write_profile_html
from lengthwise.schema.files import write_whole
from lengthwise.schema.profile import Profile

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
    model: Annotated[str, typer.Option(help="A model of the catalog; its name or an alias is a folder there.")],
    device: Annotated[str, typer.Option(help="A folder under compute/, or a GPU whose name starts so.")],
    node: Annotated[str | None, typer.Option(help="Whose network to take; else pairwise NVLink, or the DGX.")] = None,
    keep_surrogates: Annotated[
        bool, typer.Option("--keep-surrogates", help="Keep rows that were made up and not measured.")
    ] = False,
    out: Annotated[Path, _OUT],
) -> None:
    """Import a model's mlp.csv, attention.csv and the device's network from Vidur's profiles."""
    from_vidur(folder, model, device, node, out, keep_surrogates=keep_surrogates)


@imports.command(epilog=IMPORT_EXAMPLES)
def llmservingsim(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Holds tp1/, tp2/ ...: of its profiler v0 or v1.")],
    *,
    out: Annotated[Path, _OUT],
) -> None:
    """Import the profile of one model on one device from LLMServingSim's profiles."""
    from_llmservingsim(folder, out)


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
    from_aiconfigurator(folder, system, backend, version, out)


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
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page: curves, attention, roofline, gaps.")
    ] = None,
    json_: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all numbers as JSON; - is standard output.")
    ] = None,
) -> None:
    """Show a profile's operators: sizes, times, noise, their share of the roofline, and where nothing was measured."""
    print_profile(file, gpu, model, report=report, json_file=json_)


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
        str | None, typer.Option("--json", metavar="FILE", help="Write all numbers as JSON; - is standard output.")
    ] = None,
) -> None:
    """Compare a new profile with an old one and name the operators that moved, beyond what their spread explains.

    Exits with 0 where none moved, with 1 where some did, with 2 where the profiles cannot be compared.
    """
    if compare_profiles(new, old, tolerance=tolerance, seed=seed, json_file=json_):
        raise typer.Exit(1)


_MOST_GAPS = 4
_COLUMNS = 100
"""Of text in a pipe: sizes are long, and would make lines that no screen shows whole."""


def from_vidur(
    folder: Path, model: str, device: str, node: str | None, out: Path, *, keep_surrogates: bool = False
) -> None:
    """Imports a folder of Vidur's."""
    spec, where = catalog.model(model), catalog.node(node) if node else None
    _imported(lambda: import_vidur(folder, spec, device, node=where, keep_surrogates=keep_surrogates), out)


def from_llmservingsim(folder: Path, out: Path) -> None:
    """Imports a folder of LLMServingSim's."""
    _imported(lambda: import_llmservingsim(folder), out)


def from_aiconfigurator(folder: Path | None, system: str, backend: str, version: str, out: Path) -> None:
    """Imports AIConfigurator's tables of a folder or of the installed package."""
    _imported(lambda: import_aiconfigurator(folder, system, backend, version), out)


def _imported(read: Callable[[], Profile], out: Path) -> None:
    require_writable([out])
    started = time.perf_counter()
    profile = read()
    write_profile(profile, out)
    duration_s = time.perf_counter() - started
    degrees = ", ".join(map(str, profile.tensor_parallel))
    what = f"{profile.metadata.model} at TP {degrees}" if degrees else "kernels of no model"
    typer.echo(
        f"{_counted(len(profile), 'point')} of {_counted(len(profile.operators), 'operator')}: {what} on "
        f"{profile.metadata.gpu}"
    )
    for note in profile.metadata.notes:
        typer.echo(f"  {note}")
    typer.echo(f"wrote {out} ({out.stat().st_size / 1000:,.0f} kB) in {duration_s:.1f} s")


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def print_profile(
    file: Path, gpu: str | None = None, model: str | None = None, *, report: Path | None, json_file: str | None
) -> None:
    """Prints what is in a profile; writes the page and the JSON that were asked for.

    ``gpu`` and ``model`` are what it was measured on and of, whatever it calls them; None: as it says.
    """
    to_stdout = json_file == "-"
    written = [f for f in (report, Path(json_file) if json_file and not to_stdout else None) if f]
    require_writable(written, [file])
    if report:
        require_plotly()
    view = describe_profile(
        read_profile(file), catalog.gpu(gpu) if gpu else None, catalog.model(model) if model else None
    )
    if json_file:
        _write_json(json_file, profile_json(view))
    if not to_stdout:
        _print_view(view)
    if report:
        write_profile_html(report, view)
        typer.echo(f"wrote {report}", err=to_stdout)


def _write_json(file: str, text: str) -> None:
    if file == "-":
        sys.stdout.write(text)
    else:
        write_whole(file, text.encode())


def _print_view(view: ProfileView) -> None:
    metadata = view.profile.metadata
    told = {
        "GPU": metadata.gpu,
        "model": metadata.model or "none: kernels described by their shapes",
        "engine": metadata.engine,
        "source": metadata.source,
        "measured": metadata.measured,
        "license": metadata.license,
    }
    print_facts(metadata.name, [(key, text) for key, text in told.items() if text], piped=_COLUMNS)
    heads = ("operator", "TP", "dtype", "points", "sizes", "time", "spread", "of roofline", "best")
    print_table(
        heads,
        [_row(one) for one in view.operators],
        wraps=("sizes",),
        drops=("spread", "best", "dtype"),
        piped=_COLUMNS,
    )
    out = console(_COLUMNS)
    for text, who in _gaps(view).items():
        out.print(f"no points at {text}: {', '.join(who)}")
    for note in (*metadata.notes, *_no_roofline(view)):
        out.print(f"note: {note}")


def _no_roofline(view: ProfileView) -> list[str]:
    """Why no row has a share of a roofline, and what gives it one; nothing where some have."""
    metadata = view.profile.metadata
    if any(one.best for one in view.operators):
        return []
    if view.work is None:
        return [f"no roofline: the catalog has no GPU {metadata.gpu!r}; give it (--gpu NAME or FILE.toml)"]
    if metadata.model:
        return [f"no roofline: the catalog has no model {metadata.model!r}; give it (--model NAME or config.json)"]
    return []


def _row(one: OperatorView) -> list[str]:
    low, high = one.seconds
    return [
        one.operator,
        str(one.tp) if one.tp else "-",
        one.dtype or "-",
        f"{len(one.rows):,}",
        axes_text(one),
        time_text(low) if low == high else f"{time_text(low)} to {time_text(high)}",
        share_text(one.spread),
        share_text(one.median.roofline if one.median else None),
        share_text(one.best.roofline if one.best else None),
    ]


def _gaps(view: ProfileView) -> dict[str, list[str]]:
    """Operators by what none of them has points of, each once."""
    found: dict[str, list[str]] = {}
    for one in view.operators:
        if one.gaps:
            more = len(one.gaps) - _MOST_GAPS
            text = "; ".join(map(str, one.gaps[:_MOST_GAPS])) + (f"; and {more} more" if more > 0 else "")
            names = found.setdefault(text, [])
            names += [one.operator] * (one.operator not in names)
    return found


def compare_profiles(new: Path, old: Path, *, tolerance: float, seed: int, json_file: str | None) -> bool:
    """Prints what moved; whether anything did."""
    to_stdout = json_file == "-"
    if json_file and not to_stdout:
        require_writable([Path(json_file)], [new, old])
    found = check_profiles(read_profile(new), read_profile(old), tolerance=tolerance, seed=seed)
    if json_file:
        _write_json(json_file, check_json(found))
    if not to_stdout:
        _print_check(found, new, old)
    return bool(found.changed)


def _print_check(found: ProfileCheck, new: Path, old: Path) -> None:
    shown = found.changed or sorted(found.rows, key=lambda row: -abs(row.ratio - 1))[:5]
    heads = ("operator", "TP", "dtype", "sizes", "points", "new / old", "from", "to")
    print_table(heads, [_changed(row) for row in shown], wraps=(), drops=("dtype",))
    compared = sum(row.points for row in found.rows)
    if found.changed:
        names = ", ".join(dict.fromkeys(row.operator for row in found.changed))
        typer.echo(f"moved by more than {100 * found.tolerance:g} %: {names}")
    else:
        typer.echo(f"nothing moved by more than {100 * found.tolerance:g} %; above are the farthest")
    typer.echo(f"{compared:,} points of {new} compared with {old}; {found.unmatched:,} have no counterpart")
    if found.only_new:
        typer.echo(f"only in the new: {', '.join(found.only_new)}")
    if found.only_old:
        typer.echo(f"only in the old: {', '.join(found.only_old)}")
    for note in found.notes:
        typer.echo(f"note: {note}")


def _changed(row: Moved) -> list[str]:
    low, high = row.sizes
    sizes = f"{row.region}: {low:,} to {high:,} {row.unit}" if low != high else f"{low:,} {row.unit}"
    numbers = (f"{value:.3f}" for value in (row.ratio, row.low, row.high))
    return [row.operator, str(row.tp) if row.tp else "-", row.dtype or "-", sizes, f"{row.points:,}", *numbers]
