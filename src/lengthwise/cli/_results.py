"""What ``lengthwise simulate`` leaves behind: a table, and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

from lengthwise import report
from lengthwise.cli._fit import fit_note
from lengthwise.cli._outputs import beside, write_answers
from lengthwise.cli._show import console
from lengthwise.report import Result
from lengthwise.scenario import Outcome, Scenario, Variant


def show(asked: Scenario, results: list[Result]) -> None:
    """Prints the question and the table of answers."""
    out = console()
    if asked.description:
        out.print(asked.description, style="dim")
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
            beyond=o.beyond,
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
        json,
        html,
        lambda path: report.write_json(path, results),
        lambda path: report.write_html(path, results),
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
    if seeds > 1 and not any(variant.has_chance for variant in variants):
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
