"""Selects the deployment of a calibration, rejects tables that are no better than the old ones, and lists results."""

from __future__ import annotations

import dataclasses
from typing import Any

from lengthwise.config import Scenario
from lengthwise.measure.calibration import Calibration
from lengthwise.report.json_file import finite
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.usecases import variants

FORMAT, VERSION = "lengthwise.calibration", 1


def measured_deployment(scenario: Scenario, variant: str | None) -> Deployment:
    """Return the deployment of a scenario without variants, or of the named variant."""
    if variant is not None:
        return variants.deployment(scenario.only(variant))
    if scenario.variants:
        names = ", ".join(known.name for known in scenario.variants)
        raise InputError(
            f"a calibration is of one deployment; {scenario.source} has variants ({names}). Name the measured one: "
            "--variant NAME"
        )
    return variants.deployment(scenario)


def require_improvement(found: Calibration, *, printed: bool = False) -> None:
    """Raise InputError if the calibrated tables are not better than the given ones in any way.

    That is if they only make held-out requests worse, or if no parameter changed although runs and tables differ
    significantly. ``printed``: the warnings are on the screen already and are not repeated.
    """
    if not found.changed and found.disagreement:
        raise InputError(
            f"runs and tables disagree ({found.disagreement}), and the noise of the runs hides which part of a step is "
            "off, so nothing was written. Measure at several loads with nothing else on the machine, give the engine's "
            "log of steps (--iterations), name the parameter to fit (--fit work), or write the tables anyway (--force)"
        )
    if not found.helps:
        details = " (see above)" if printed else f": {'; '.join(found.warnings)}"
        raise InputError(
            f"the calibrated tables are only worse than the given ones, so none were written{details}. Measure longer "
            "or at several loads, name the parameters to fit (--fit), or write them anyway (--force)"
        )


def calibration_json(found: Calibration) -> dict[str, Any]:
    """Return all results but the tables, as JSON values; keys are only ever added within a version."""
    results = dataclasses.asdict(found)
    evidence = results.pop("tables")["evidence"]
    head = {"format": FORMAT, "version": VERSION, "warnings": found.warnings}
    complete: dict[str, Any] = finite(
        head | results | {"tables": {name: evidence[name] for name in ("source", "errors", "reach")}}
    )
    return complete
