"""``lengthwise calibrate``: cost tables that agree with measured runs."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lengthwise.cli import options
from lengthwise.cli.tables import console, print_table, two_digits
from lengthwise.measure.calibration import Calibration, Parameter, Score
from lengthwise.report.calibrate import CalibrationPage, CdfPair, write_calibration_html
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_whole

EXAMPLES = """\b
Examples:
  lengthwise bench http://localhost:8000 mine.toml --request-rate 4 --records run.parquet
  lengthwise calibrate mine.toml run.parquet --out cost.npz
  lengthwise calibrate mine.toml low.parquet high.parquet --holdout mid.parquet --out cost.npz
  lengthwise simulate mine.toml --cost tables:cost.npz
"""


def run(
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO",
            help="A .toml or .yaml file that gives the deployment as it ran; its [workload] is not used.",
        ),
    ],
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Records of the engine, from bench --records.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE.npz", help="Where the cost tables go.")],
    holdout: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Report errors on this run, which is not fitted to; repeatable."),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.01, max=0.95, help="Without --holdout: how much of the runs is held out.")
    ] = 0.3,
    iterations: Annotated[
        Path | None,
        typer.Option(metavar="LOG", help="Also fit to vLLM's log of steps (--enable-logging-iteration-details)."),
    ] = None,
    fit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Move this alone: work, prefill, decode, comm, host_step, host_sequence, client, masked; repeatable. "
            "Dense masks are then not looked for, unless named.",
        ),
    ] = None,
    masks: Annotated[
        str,
        typer.Option(
            metavar="auto|no",
            help="Whether dense masks (attention over the whole batch) are looked for: without --fit, or never.",
        ),
    ] = "auto",
    scrape: Annotated[
        str,
        typer.Option(
            metavar="auto|no",
            help="Whether the counters that runs keep (bench --scrape, of a vLLM) are fitted to: without "
            "--iterations, or never.",
        ),
    ] = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: engine.max_num_seqs=64; repeatable."),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which variant of the scenario was measured.")
    ] = None,
    cost: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="The tables to start from, such as roofline.")
    ] = None,
    allow_doubts: Annotated[
        bool, typer.Option("--allow-doubts", help="Take runs that are partial, of another model or otherwise doubtful.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Take simulated runs, too, and write tables even if they are worse than those given."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the search's draws and of the intervals.")] = 0,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write a self-contained HTML page to this file, with distributions before and after; "
            "named .md: what is printed, as Markdown."
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all numbers to this file; -: to standard output, without the tables.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Calibrate a deployment's cost tables to measured runs, and report errors on what was held out.

    Tables that only make held-out requests worse are not written. What a server told of itself (bench --scrape) is
    used: the steps, tokens and seconds that a vLLM counted while it was busy are fitted to beside the requests; how
    many run and wait is checked against the simulation.
    """
    from lengthwise import cost as costs
    from lengthwise.cli import outputs, progress, results
    from lengthwise.measure.calibration import calibrate, read_iterations

    require_npz(out)
    files = [path for path in (out, json if json != outputs.STDOUT else None, report) if path is not None]
    outputs.require_writable(files, inputs=[scenario, *runs, *(holdout or [])])
    if report is not None and is_html(report):
        outputs.require_plotly()
    deployment = deployment_of(scenario, set_, cost, variant, quiet=quiet)
    allow = [name for name, on in (("warnings", allow_doubts), ("simulated", force)) if on]
    named = results.read_named([*runs, *(holdout or [])])
    with progress.shown(quiet=quiet):
        found = calibrate(
            named[: len(runs)],
            deployment,
            fit=fit,
            holdout=named[len(runs) :] if holdout else share,
            iterations=None if iterations is None else read_iterations(iterations),
            allow=allow,
            seed=seed,
            masks=masks,
            scrape=scrape,
        )
    if shown := not quiet and str(json) != "-":
        show(found)
    require_help(found, force=force, shown=shown)
    costs.save(found.tables, out, costs.MadeFor.of_deployment(deployment))
    write(found, json, report)
    if not quiet:
        for path in files:
            typer.echo(f"wrote {path}", err=True)
        again = "".join(f" --set {word}" for word in set_ or []) + (
            f" --variant {shlex.quote(variant)}" if variant else ""
        )
        typer.echo(f"simulate with it: lengthwise simulate {scenario}{again} --cost tables:{out}", err=True)


FORMAT, VERSION = "lengthwise.calibration", 1
_ERRORS = ("run", "metric", "statistic", "measured", "before", "after", "95 % interval")
_PARAMETERS = ("parameter", "before", "after", "95 % interval", "report")
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "jct": "JCT"}


def deployment_of(
    path: Path, settings: list[str] | None, cost: str | None, variant: str | None = None, *, quiet: bool = False
) -> Deployment:
    """The one deployment of a scenario, or that of its variant of this name.

    Raises:
        InputError: It has variants, of which each is another deployment, and none is named, or none of that name.
    """
    from lengthwise import config
    from lengthwise.usecases import variants

    asked = config.load(path, options.overrides(settings, cost))
    options.tell(asked.notes, quiet=quiet)
    if variant is not None:
        return variants.deployment(asked.only(variant))
    if asked.variants:
        names = ", ".join(one.name for one in asked.variants)
        raise InputError(
            f"a calibration is of one deployment; {path} has variants ({names}). Name the one that was measured: "
            "--variant NAME"
        )
    return variants.deployment(asked)


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
    if not found.changed and found.disagreement and not force:
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
        metadata=[f"{found.fit_result:,} requests fitted to", f"{found.held_out:,} held out", f"moved: {moved}"],
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
    interval = f"{shown(p.low)} to {shown(p.high)}" if p.report else "as before"
    told = "no" if not p.report else "yes" if p.value != p.prior else "agrees"
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
