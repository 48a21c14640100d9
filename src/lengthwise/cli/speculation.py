"""``lengthwise speculation``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from lengthwise.cli import options, outputs, progress
from lengthwise.cli.options import CostSource, HtmlReport, Jobs, JsonFile, Quiet, ScenarioFile
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.schema.speculation import SpeculationStudy

EXAMPLES = """\b
Examples:
  lengthwise speculation examples/speculation.toml --report speculation.html
  lengthwise speculation examples/speculation.toml --tokens 1,3,5 --loads 0.1,0.5,0.9
"""


def run(
    scenario_file: ScenarioFile,
    *,
    set_: Annotated[list[str] | None, options.setting("deployment.speculation.burstiness=0.5")] = None,
    variant: Annotated[str | None, Option(metavar="NAME", help="Variant of the scenario.")] = None,
    cost: CostSource = None,
    tokens: Annotated[
        str | None, Option(metavar="K,K,...", help="Numbers of proposed tokens; default: up to the scenario's.")
    ] = None,
    loads: Annotated[
        str | None, Option(metavar="SHARE,...", help="Shares of the capacity without speculation, such as 0.1,0.5,0.9.")
    ] = None,
    requests: Annotated[int | None, Option(min=100, help="Requests of a run; default: 2000.")] = None,
    seeds: Annotated[int | None, Option(min=2, help="Independent repetitions; default: 5.")] = None,
    jobs: Jobs = None,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Show whether speculative decoding helps at your load.

    The same requests are served with and without speculation, at several loads and for several numbers of proposed
    tokens. The capacity of each is searched, too.
    """
    from lengthwise import config

    repeated = [] if seeds is None else [("--seeds", f"search.seeds={seeds}")]
    scenario = config.load(scenario_file, [*options.overrides(set_, cost), *repeated])
    scenario = scenario.only(variant) if variant is not None else scenario
    outputs.require_outputs(json, report, scenario.files)
    options.print_notes(scenario.notes, quiet=quiet)
    from lengthwise.report.speculation import write_speculation_html, write_speculation_json
    from lengthwise.usecases import speculation

    numbers = None if tokens is None else [int(number) for number in _numbers("--tokens", tokens, integers=True)]
    shares = speculation.LOADS if loads is None else _numbers("--loads", loads)
    with progress.simulating(quiet=quiet) as advance:
        found = speculation.study(
            scenario,
            tokens=numbers,
            loads=shares,
            requests=requests or speculation.REQUESTS,
            jobs=jobs,
            progress=advance,
        )
    if not quiet and json != outputs.STDOUT:
        _show(found)
    outputs.write_outputs(json, report, found, write_speculation_json, write_speculation_html, quiet=quiet)


def _numbers(option: str, text: str, *, integers: bool = False) -> list[float]:
    try:
        return [int(part) if integers else float(part) for part in text.split(",")]
    except ValueError:
        kind = "whole numbers, such as 1,3,5" if integers else "numbers, such as 0.1,0.5,0.9"
        raise InputError(f"{option} takes {kind}; it is {text!r}") from None


def _show(study: SpeculationStudy) -> None:
    from lengthwise.cli.tables import console, print_table
    from lengthwise.report.speculation import answers, capacity_rows, speedup_rows

    out = console()
    out.print(", ".join((study.name, *study.metadata)), style="dim", highlight=False)
    for heads, rows in (speedup_rows(study), capacity_rows(study)):
        print_table(heads, rows, drops=("sequences", "tokens/step", "TPOT, ms", "JCT, s", "requests/s"))
    for line in (*answers(study), *(f"note: {note}" for note in study.notes)):
        out.print(line, highlight=False)
    out.print(
        "± half-width of a 95 % interval over the seeds, from the same requests with and without speculation. (...): "
        f"90 % interval of the cost model's error. Capacity within: {', '.join(study.limits)}. "
        f"{study.requests:,} requests x {study.seeds} seeds a row.",
        style="dim",
        highlight=False,
    )
