"""What ``lengthwise profile import``, ``show`` and ``check`` do and print."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import typer

from lengthwise import catalog
from lengthwise.cli._outputs import require_plotly, require_writable
from lengthwise.cli._show import console, print_facts, print_table
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
from lengthwise.report.profile import (
    axes_text,
    check_json,
    profile_json,
    share_text,
    time_text,
    write_profile_html,
)
from lengthwise.schema.files import write_whole
from lengthwise.schema.profile import Profile

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
    took_s = time.perf_counter() - started
    degrees = ", ".join(map(str, profile.tensor_parallel))
    what = f"{profile.facts.model} at TP {degrees}" if degrees else "kernels of no model"
    typer.echo(
        f"{_counted(len(profile), 'point')} of {_counted(len(profile.operators), 'operator')}: {what} on "
        f"{profile.facts.gpu}"
    )
    for note in profile.facts.notes:
        typer.echo(f"  {note}")
    typer.echo(f"wrote {out} ({out.stat().st_size / 1000:,.0f} kB) in {took_s:.1f} s")


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def show(
    file: Path,
    gpu: str | None = None,
    model: str | None = None,
    *,
    report: Path | None,
    json_file: str | None,
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
    facts = view.profile.facts
    told = {
        "GPU": facts.gpu,
        "model": facts.model or "none: kernels described by their shapes",
        "engine": facts.engine,
        "source": facts.source,
        "measured": facts.measured,
        "licence": facts.licence,
    }
    print_facts(facts.name, [(key, text) for key, text in told.items() if text], piped=_COLUMNS)
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
    for note in (*facts.notes, *_no_roofline(view)):
        out.print(f"note: {note}")


def _no_roofline(view: ProfileView) -> list[str]:
    """Why no row has a share of a roofline, and what gives it one; nothing where some have."""
    facts = view.profile.facts
    if any(one.best for one in view.operators):
        return []
    if view.work is None:
        return [f"no roofline: the catalog has no GPU {facts.gpu!r}; give it (--gpu NAME or FILE.toml)"]
    if facts.model:
        return [
            f"no roofline: the catalog has no model {facts.model!r}; give it (--model NAME or config.json)"
        ]
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


def check(new: Path, old: Path, *, tolerance: float, seed: int, json_file: str | None) -> bool:
    """Prints what moved; whether anything did."""
    to_stdout = json_file == "-"
    if json_file and not to_stdout:
        require_writable([Path(json_file)], [new, old])
    found = check_profiles(read_profile(new), read_profile(old), tolerance=tolerance, seed=seed)
    if json_file:
        _write_json(json_file, check_json(found))
    if not to_stdout:
        _print_check(found, new, old)
    return bool(found.moved)


def _print_check(found: ProfileCheck, new: Path, old: Path) -> None:
    shown = found.moved or sorted(found.rows, key=lambda row: -abs(row.ratio - 1))[:5]
    heads = ("operator", "TP", "dtype", "sizes", "points", "new / old", "from", "to")
    print_table(heads, [_moved(row) for row in shown], wraps=(), drops=("dtype",))
    compared = sum(row.points for row in found.rows)
    if found.moved:
        names = ", ".join(dict.fromkeys(row.operator for row in found.moved))
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


def _moved(row: Moved) -> list[str]:
    low, high = row.sizes
    sizes = f"{row.region}: {low:,} to {high:,} {row.unit}" if low != high else f"{low:,} {row.unit}"
    numbers = (f"{value:.3f}" for value in (row.ratio, row.low, row.high))
    return [
        row.operator,
        str(row.tp) if row.tp else "-",
        row.dtype or "-",
        sizes,
        f"{row.points:,}",
        *numbers,
    ]
