"""What ``lengthwise calibrate`` prints and writes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from lengthwise.cli import _settings
from lengthwise.cli._show import console, print_table, two_digits
from lengthwise.measure.calibrate import Calibration, Parameter, Score
from lengthwise.report.calibrate import CalibrationPage, CdfPair, write_calibration_html
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_whole

FORMAT, VERSION = "lengthwise.calibration", 1
_ERRORS = ("run", "metric", "statistic", "measured", "before", "after", "95 % interval")
_PARAMETERS = ("parameter", "before", "after", "95 % interval", "told")
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "jct": "JCT"}


def deployment_of(
    path: Path,
    settings: list[str] | None,
    cost: str | None,
    variant: str | None = None,
    *,
    quiet: bool = False,
) -> Deployment:
    """The one deployment of a scenario, or that of its variant of this name.

    Raises:
        InputError: It has variants, of which each is another deployment, and none is named, or none of that name.
    """
    from lengthwise import scenario as scenarios

    asked = scenarios.load(path, _settings.overrides(settings, cost))
    _settings.tell(asked.notes, quiet=quiet)
    if variant is not None:
        return scenarios.deployment(asked.only(variant))
    if asked.variants:
        names = ", ".join(one.name for one in asked.variants)
        raise InputError(
            f"a calibration is of one deployment; {path} has variants ({names}). Name the one that was measured: "
            "--variant NAME"
        )
    return scenarios.deployment(asked)


def require_npz(out: Path) -> None:
    """Nothing, if a file of tables has the name of one.

    Raises:
        InputError: It ends otherwise.
    """
    if out.suffix.lower() != ".npz":
        raise InputError(
            f"--out must be a file named .npz, as cost tables are; it is {out}. Give {out.with_suffix('.npz')}"
        )


def require_help(found: Calibration, *, force: bool, shown: bool) -> None:
    """Nothing, if the calibrated tables are better than those given in something, or at least not worse.

    ``shown``: what is worse stands above already, and is not said again.

    Raises:
        InputError: They only made held-out requests worse, or nothing was moved although the runs surely disagree
            with the tables; and nobody insists.
    """
    if not found.moved and found.disagreement and not force:
        raise InputError(
            "runs and tables must agree, or the runs tell which part of a step is off; they disagree "
            f"({found.disagreement}), and their noise hides the part, so nothing was written. Measure at several loads "
            "with nothing else on the machine, give the engine's log of steps (--iterations), name what may move "
            "(--fit work), or write the tables all the same (--force)"
        )
    said = " (see above)" if shown else f": {'; '.join(found.warnings)}"
    if not found.helps and not force:
        raise InputError(
            f"calibrated tables must not only be worse than those given, so none were written{said}. Measure longer or "
            "at several loads, name what may move (--fit), or write them all the same (--force)"
        )


def show(found: Calibration) -> None:
    """Prints errors, parameters, and how far both may be trusted."""
    out = console()
    for warning in _first(found):
        out.print(warning, highlight=False)
    out.print(f"errors on {found.held_out} held-out requests ({found.split}):", highlight=False)
    print_table(_ERRORS, [_error(score) for score in found.scores], drops=["measured"])
    out.print()
    print_table(_PARAMETERS, [_parameter(p) for p in found.parameters])
    out.print()
    for line in trust(found):
        out.print(line, highlight=False)


def trust(found: Calibration) -> list[str]:
    """How far the tables may be trusted, a sentence each."""
    reach = found.tables.reach
    return [
        (
            f"requests' mean times between tokens are off by about {two_digits(100 * found.log_sd)} % (standard "
            "deviation over held-out requests; single steps may be off by more)"
        ),
        (
            f"measured up to {reach.tokens} tokens and {reach.seqs} sequences a step, {reach.context} tokens a "
            f"request, {reach.kv_tokens} tokens in the KV cache; beyond that the tables extrapolate"
        ),
        *(
            f"{load.name} requests over time ({load.run}): off by {load.before:.0%} of their mean before, "
            f"{load.after:.0%} after"
            for load in found.loads
        ),
        *(note for note in found.notes if note not in found.origin),
    ]


def _first(found: Calibration) -> tuple[str, ...]:
    """What is bad, to be read before all numbers: what became worse, doubts, and an origin that nobody tells."""
    return (*found.warnings, *found.origin)


def write(found: Calibration, json_file: Path | None, report: Path | None) -> None:
    """Writes the numbers and the page that were asked for; ``-`` is standard output."""
    text = json.dumps(numbers(found), indent=1, allow_nan=False) + "\n"
    if json_file is not None and str(json_file) == "-":
        typer.echo(text, nl=False)
    elif json_file is not None:
        write_whole(json_file, text.encode())
    if report is not None and is_html(report):
        write_calibration_html(report, _html_page(found))
    elif report is not None:
        write_whole(report, page(found).encode())


def is_html(path: Path) -> bool:
    """Whether a report goes there as a page of HTML; else it is Markdown."""
    return path.suffix.lower() in (".html", ".htm")


def _html_page(found: Calibration) -> CalibrationPage:
    moved = ", ".join(p.label for p in found.parameters if p.value != p.prior) or "nothing"
    return CalibrationPage(
        heading=found.tables.source,
        facts=[f"{found.fitted:,} requests fitted to", f"{found.held_out:,} held out", f"moved: {moved}"],
        warnings=_first(found),
        errors=[_ERRORS, *(_error(score) for score in found.scores)],
        factors=[_PARAMETERS, *(_parameter(p) for p in found.parameters)],
        trust=[*trust(found), f"Held out: {found.split}."],
        cdfs=[CdfPair(**dataclasses.asdict(curve)) for curve in found.curves],
    )


def numbers(found: Calibration) -> dict[str, Any]:
    """All that was found but the tables, as JSON takes it; keys are only ever added within a version."""
    lists = {
        name: [dataclasses.asdict(x) for x in getattr(found, name)]
        for name in ("parameters", "scores", "changes", "loads", "curves")
    }
    whole: dict[str, Any] = {"warnings": found.warnings} | {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(found)
        if field.name not in {"tables", *lists}
    }
    tables = found.tables
    whole["tables"] = {
        "source": tables.source,
        "errors": [dataclasses.asdict(e) for e in tables.errors],
        "reach": dataclasses.asdict(tables.reach),
    }
    head = {"format": FORMAT, "version": VERSION}
    return head | {name: _plain(value) for name, value in (whole | lists).items()}


def page(found: Calibration) -> str:
    """The same as is printed, in Markdown."""
    return "\n".join(
        [
            f"# {found.tables.source}",
            *(f"\n**{warning}**" for warning in _first(found)),
            f"\nErrors on {found.held_out} held-out requests ({found.split}):\n",
            _markdown(_ERRORS, [_error(score) for score in found.scores]),
            "",
            _markdown(_PARAMETERS, [_parameter(p) for p in found.parameters]),
            "",
            *(f"- {line}" for line in trust(found)),
            "",
        ]
    )


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def _error(score: Score) -> list[str]:
    each = score.statistic == "each"
    shown = "{:.1%}".format if each else "{:+.1%}".format
    return [
        score.run,
        _NAMES[score.metric],
        "mean of each" if each else score.statistic,
        "" if each else _seconds(score.measured),
        shown(score.before),
        shown(score.after),
        f"{shown(score.low)} to {shown(score.high)}",
    ]


def _parameter(p: Parameter) -> list[str]:
    shown = _seconds if p.unit == "s" else (lambda x: f"{x:.3g} x")
    interval = f"{shown(p.low)} to {shown(p.high)}" if p.told else "as before"
    told = "no" if not p.told else "yes" if p.value != p.prior else "agrees"
    before = "-" if p.name == "client" and not p.prior else shown(p.prior)
    return [p.label, before, "-" if p.name == "client" and not p.value else shown(p.value), interval, told]


def _seconds(value: float) -> str:
    if value == 0:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-12:.3g} ps"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
