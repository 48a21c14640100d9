"""Calibration: selects the deployment, rejects tables that are no better than the old ones, and presents results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lengthwise.config import Scenario
from lengthwise.measure.calibration import Calibration, Parameter, Score
from lengthwise.report.calibrate import CalibrationPage, CdfPair, write_calibration_html
from lengthwise.report.formatting import two_digits
from lengthwise.report.json_file import json_text
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.usecases import variants


def measured_deployment(scenario: Scenario, variant: str | None) -> Deployment:
    """Return the deployment of the named variant, or of the scenario if it has no variants."""
    if scenario.variants and variant is None:
        names = ", ".join(known.name for known in scenario.variants)
        raise InputError(
            f"a calibration is of one deployment; {scenario.source} has variants ({names}). Name the measured one: "
            "--variant NAME"
        )
    deployed = variants.deployment(scenario if variant is None else scenario.only(variant))
    if deployed.groups:
        deployed.require_one_side("a calibration")
    return deployed


def require_improvement(found: Calibration, *, printed: bool = False) -> None:
    """Raise InputError if calibration only increased errors, or changed nothing although runs and tables disagree.

    If ``printed``, the message does not repeat the warnings, which are already on the screen.
    """
    if not found.has_changed and found.disagreement:
        raise InputError(
            f"runs and tables disagree ({found.disagreement}), and the noise of the runs hides which part of a step is "
            "off, so nothing was written. Measure at several loads with nothing else on the machine, give the engine's "
            "log of steps (--iterations), name the parameter to fit (--fit work), or write the tables anyway (--force)"
        )
    if not found.is_improvement:
        details = " (see above)" if printed else f": {'; '.join(found.warnings)}"
        raise InputError(
            f"the calibrated tables are only worse than the given ones, so none were written{details}. Measure longer "
            "or at several loads, name the parameters to fit (--fit), or write them anyway (--force)"
        )


def calibration_json(found: Calibration) -> str:
    """Return all results except the tables as the text of a JSON file."""
    results = dataclasses.asdict(found)
    evidence = results.pop("tables")["evidence"]
    tables = {name: evidence[name] for name in ("source", "errors", "reach")}
    return json_text("calibration", {"warnings": found.warnings, **results, "tables": tables})


def urgent(found: Calibration) -> tuple[str, ...]:
    """Return the sentences that precede the numbers: warnings, and notes on runs of unknown origin."""
    return (*found.warnings, *found.origin)


def reliability(found: Calibration) -> list[str]:
    """Return sentences about how reliable the tables are."""
    reach = found.tables.evidence.reach
    error = (
        f"requests' mean times between tokens are off by about {two_digits(100 * found.log_sd)} % (standard deviation "
        "over held-out requests; single steps may be off by more)"
    )
    measured = (
        f"measured up to {reach.tokens} tokens and {reach.seqs} sequences a step, {reach.context} tokens a request, "
        f"{reach.prefix} tokens before a chunk of a prompt, {reach.kv_tokens} tokens in the KV cache; beyond that the "
        "tables extrapolate"
    )
    loads = [
        f"{x.name} requests over time ({x.run}): off by {x.before:.0%} of their mean before, {x.after:.0%} after"
        for x in found.loads
    ]
    return [error, measured, *loads, *(note for note in found.notes if note not in found.origin)]


def write_html(path: Path, found: Calibration) -> None:
    """Write the HTML page of a calibration."""
    fitted = ", ".join(p.label for p in found.parameters if p.value != p.prior) or "nothing"
    page = CalibrationPage(
        heading=found.tables.evidence.source,
        metadata=[f"{found.fitted:,} requests fitted to", f"{found.held_out:,} held out", f"changed: {fitted}"],
        warnings=urgent(found),
        errors=error_table(found),
        factors=parameter_table(found),
        trust=[*reliability(found), f"Held out: {found.split}."],
        cdfs=[CdfPair(**dataclasses.asdict(curve)) for curve in found.curves],
    )
    write_calibration_html(path, page)


def markdown(found: Calibration) -> str:
    """Return the results of a calibration as Markdown, with the same contents as the command prints."""

    def table(*rows: Sequence[str]) -> str:
        heads, *cells = rows
        return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells))

    return "\n".join(
        [
            f"# {found.tables.evidence.source}",
            *(f"\n**{warning}**" for warning in urgent(found)),
            f"\nErrors on {found.held_out} held-out requests ({found.split}):\n",
            table(*error_table(found)),
            "",
            table(*parameter_table(found)),
            "",
            *(f"- {line}" for line in reliability(found)),
            "",
        ]
    )


def error_table(found: Calibration) -> list[Sequence[str]]:
    """Return the table of errors as rows of cells. The first row has the column heads."""
    heads = ("run", "metric", "statistic", "measured", "before", "after", "95 % interval")
    return [heads, *map(_error_row, found.scores)]


def _error_row(score: Score) -> list[str]:
    each = score.statistic == "each"
    percent = "{:.1%}".format if each else "{:+.1%}".format
    statistic, measured = ("mean of each", "") if each else (score.statistic, _seconds(score.measured))
    errors = (percent(score.before), percent(score.after), f"{percent(score.low)} to {percent(score.high)}")
    return [score.run, score.metric.upper(), statistic, measured, *errors]


def parameter_table(found: Calibration) -> list[Sequence[str]]:
    """Return the table of parameters as rows of cells. The first row has the column heads."""
    return [("parameter", "before", "after", "95 % interval", "identified"), *map(_parameter_row, found.parameters)]


def _parameter_row(p: Parameter) -> list[str]:
    number = _seconds if p.unit == "s" else (lambda x: f"{x:.3g} x")
    # 0 seconds mean that the client's time is unknown.
    before, after = ("-" if p.name == "client" and not value else number(value) for value in (p.prior, p.value))
    interval = f"{number(p.low)} to {number(p.high)}" if p.determined else "as before"
    return [p.label, before, after, interval, "no" if not p.determined else "yes" if p.value != p.prior else "agrees"]


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-12:.3g} ps" if value else "0"
