"""What ``lengthwise simulate`` leaves behind: a table, and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from lengthwise import measure, report
from lengthwise.cli.outputs import STDOUT, beside, write_answers
from lengthwise.cli.tables import console, fit_note
from lengthwise.config import Scenario
from lengthwise.report import Result
from lengthwise.report.json_file import deployment_facts, plain
from lengthwise.schema.errors import OutputError
from lengthwise.schema.records import SIMULATED, Measured, shape_facts
from lengthwise.usecases.simulate import Outcome
from lengthwise.usecases.variants import Variant


def show(requested: Scenario, results: list[Result]) -> None:
    """Prints the question and the table of answers."""
    out = console()
    if requested.description:
        out.print(requested.description, style="dim")
    out.print(report.table(results))
    for costs in {id(r.deployment.cost): r.deployment.cost for r in results if r.deployment}.values():
        if costs.fit or costs.source.startswith("profile "):
            told = f", {fit_note(costs)}" if costs.fit else ""
            out.print(f"costs: {costs.source}{told}", style="dim", highlight=False)


def results_of(outcomes: list[Outcome]) -> list[Result]:
    """The outcomes as reports take them."""
    return [
        Result(
            name=o.variant.name,
            summary=o.summary,
            records=o.records,
            deployment=o.variant.deployment,
            scenario_text=o.variant.scenario.to_toml(),
            summaries=o.summaries,
            notes=o.notes,
            out_of_range=o.out_of_range,
            model_draws=o.model_draws,
        )
        for o in outcomes
    ]


def timelines(path: Path | None, names: list[str]) -> dict[str, Path]:
    """Where the timeline of each variant goes: the first to ``path``, the others beside it.

    A trace shows one run; ``out.json`` of variants "a" and "b" makes out.json and out-b.json.
    """
    if path is None:
        return {}
    first, *others = names
    return {first: path} | {n: beside(path, n) for n in others}


def write(results: list[Result], json: Path | None, html: Path | None, traces: dict[str, Path]) -> list[Path]:
    """Writes the files that were asked for, each whole or not at all, and returns them."""
    written = write_answers(
        json, html, lambda path: report.write_json(path, results), lambda path: report.write_html(path, results)
    )
    for result in results:
        if result.name in traces:
            report.write_timeline(traces[result.name], result.records)
            written.append(traces[result.name])
    return written


def tell_of_replays(variants: list[Variant], seeds: int) -> None:
    """Says where a replay gives less than was asked: fewer requests than that, one seed of several."""
    notes: dict[str, None] = {}  # in order, each once
    for variant in variants:
        asked = variant.scenario.workload.num_requests or 0
        if variant.scenario.workload.is_replay and (held := len(variant.workload(0))) < asked:
            notes[f"num_requests is {asked:,}, and the replayed trace has {held:,}; so many were run"] = None
    if seeds > 1 and not any(variant.is_random for variant in variants):
        notes["a replay has no chance in it; seeds change nothing, so one was run"] = None
    for note in notes:
        typer.echo(note, err=True)


def hint(variants: list[Variant]) -> None:
    """Says where a scheduler is given nothing to go by, and so is first come, first served."""
    for note in dict.fromkeys(note for variant in variants for note in _idle(variant)):
        typer.echo(note, err=True)


def _idle(variant: Variant) -> Iterator[str]:
    scheduler, named = variant.deployment.scheduler, variant.scenario.scheduler.policy
    if scheduler.binning == "one":
        yield f'{named} has one bin; give scheduler.binning = "learned(k=8)" and a [predictor] for more'
    if scheduler.rank == "vtc" and variant.workload(0).tenant is None:
        yield "vtc without tenants is first come, first served; give workload.tenants"


_GZIP = b"\x1f\x8b"


def places(path: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Where the records of each variant go: a lone one's to ``path``, else each with its name before the suffix."""
    if path is None:
        return {}
    if len(names) == 1 or path == STDOUT:  # which is then refused
        return {names[0]: path}
    return {name: beside(path, name) for name in names}


def write_simulated(outcomes: Sequence[Outcome], files: dict[str, Path]) -> list[Path]:
    """Writes the first seed's run of each variant that has a file; returns the files."""
    written = []
    for outcome in outcomes:
        if (path := files.get(outcome.variant.name)) is not None:
            measure.write_records(simulated(outcome), path)
            written.append(path)
    return written


def simulated(outcome: Outcome) -> Measured:
    """The first seed's run with its requests and the scenario that it came from."""
    variant = outcome.variant
    metadata = {
        "scenario": variant.scenario.to_toml(),
        "deployment": {
            **plain(deployment_facts(variant.deployment)),
            "model_shape": shape_facts(variant.deployment.model),
        },
        "warmup_s": variant.scenario.run.warmup_s,
    }
    return Measured(outcome.records, variant.workload(outcome.records.seed), SIMULATED, metadata)


def read_named(paths: Sequence[Path]) -> list[Measured]:
    """Runs that are called by their files: by name, or by path where two files have one name.

    Text (JSON, or lines of it, packed or not) is the result of another program, and read as such.

    Raises:
        InputError: One cannot be read.
    """
    names = [path.name for path in paths]
    if len(set(names)) < len(set(paths)):
        names = [str(path) for path in paths]
    runs = [_read(path) for path in paths]
    return [replace(run, records=replace(run.records, name=name)) for run, name in zip(runs, names, strict=True)]


def _read(path: Path) -> Measured:
    return measure.read_foreign(path) if _is_text(path) else measure.read_records(path)


def _is_text(path: Path) -> bool:
    """Whether a file begins as JSON or gzip do; what cannot be read is for ``read_records`` to tell."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:
        return False
    return start[:2] == _GZIP or start.lstrip()[:1] in (b"{", b"[")


def require_new(path: Path | None, *, force: bool) -> None:
    """Nothing, unless a measurement, which nobody can repeat, would be lost; a device or a pipe is none.

    Raises:
        OutputError: The file is there, and nobody insists.
    """
    if path is not None and path.is_file() and not force:
        raise OutputError(
            f"{path} is there already, and a measurement cannot be repeated: name another file, or give --force to "
            "replace it"
        )
