"""What ``lengthwise schedule`` is asked, shows and leaves behind."""

from __future__ import annotations

import json as json_format
from pathlib import Path

from lengthwise.cli import results, workload_summary
from lengthwise.cli.outputs import write_answers
from lengthwise.cli.tables import console, print_table
from lengthwise.config import Scenario, seconds
from lengthwise.report.schedule import write_schedule_html, write_schedule_json, write_watched_json
from lengthwise.report.schedule_text import (
    DRIFT_HEADS,
    OTHER_HEADS,
    SIDE_HEADS,
    SURE_HEADS,
    drift_cells,
    other_cells,
    sentences,
    side_cells,
    sure_cells,
    watched_said,
)
from lengthwise.schedule import ReplanOptions
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import SchedulePlan, Watched
from lengthwise.usecases import schedule_launch
from lengthwise.usecases.schedule_adaptation import Live


def given(
    bound: str | None,
    bound_for: str | None,
    gpus: int | None,
    strategy: str | None,
    baselines: str | None = None,
    *,
    expected: bool,
    threshold: float | None = None,
) -> list[str]:
    """What the options change of [schedule]."""
    changes: list[str] = []
    if bound is not None:
        changes.append(f"schedule.latency_bound={_number_or_text(bound)}")
    if bound_for is not None:
        changes.append(f"schedule.bound_for={json_format.dumps(bound_for)}")
    if gpus is not None:
        changes.append(f"schedule.gpus={gpus}")
    if threshold is not None:
        changes.append(f"schedule.threshold={threshold}")
    for key, text in (("strategies", strategy), ("baselines", baselines)):
        if text is not None:
            names = [name.strip().lower() for name in text.split(",")]
            changes.append(f"schedule.{key}={json_format.dumps(names)}")
    return [*changes, "schedule.worst_case=false"] if expected else changes


def show_schedule(plan: SchedulePlan, requested: Scenario) -> None:
    """Prints the answer, the runner-ups, the frontier's kinks and what drift would do."""
    out = console()
    if requested.description:
        out.print(requested.description, style="dim")
    out.print("; ".join(plan.metadata.values()), style="dim")
    for line in sentences(plan):
        out.print(line)
    out.print()
    print_table(
        SIDE_HEADS, map(side_cells, plan.sides), wraps=("best seen", "why not"), drops=("at most", "worst case")
    )
    if plan.spreads:
        out.print("\nHow sure the chosen schedule is:")
        print_table(SURE_HEADS, map(sure_cells, plan.spreads), wraps=("if",), drops=("within",))
    if plan.others:
        out.print("\nOther systems on the same GPUs:")
        rows = (other_cells(other, plan.chosen) for other in plan.others)
        print_table(OTHER_HEADS, rows, wraps=("best that meets the bound",), drops=("95 %", "latency"))
    if plan.breakpoints:
        out.print("\nBest by bound:")
    for kink in plan.breakpoints:
        out.print(f"  from {kink.bound_s:.3g} s  {kink.words}")
    out.print("\nIf outputs drift and the schedule stays:")
    print_table(
        DRIFT_HEADS,
        (drift_cells(row, plan.bound_s) for row in plan.drift),
        wraps=("re-planned",),
        drops=("sd", "mean", "reload"),
    )
    loading = plan.redeploy
    out.print(
        f"Reload: re-planning moves weights, {loading.dram_s:.2g} s from host memory, {loading.ssd_s:.2g} s from "
        f"drives ({loading.source}). Margin: how much tighter the bound must have been. "
        f"Searched in {plan.seconds:.2g} s.",
        style="dim",
    )


def write_schedule(plan: SchedulePlan, json: Path | None, html: Path | None) -> list[Path]:
    """Writes the files that were asked for, each whole or not at all, and returns them."""
    return write_answers(
        json, html, lambda path: write_schedule_json(path, plan), lambda path: write_schedule_html(path, plan)
    )


def deploy(requested: Scenario, plan: SchedulePlan, folder: Path, *, silent: bool) -> list[Path]:
    """Writes what runs the plan, and says where that is another schedule; returns the folder."""
    made = schedule_launch.write_schedule_launch(requested, plan, folder)
    if not silent:
        console().print(f"\n{made.message}")
    return [folder]


def _number_or_text(text: str) -> str:
    try:
        float(text)
    except ValueError:
        return json_format.dumps(text)
    return text


DRAWN = 20_000
"""Requests that are drawn from a preset."""


def live_of(records: Path | None, workload: str | None, form: str | None, seed: int) -> Live:
    """The requests to replay: of a file of records, a trace or a preset.

    Raises:
        InputError: None or two were given, or one cannot be read.
    """
    if (records is None) == (workload is None):
        raise InputError("give the requests to replay, either --records FILE or --workload FILE|NAME")
    if workload is not None:
        return Live.of_workload(workload_summary.opened(workload, form, DRAWN, seed))
    assert records is not None
    (measured,) = results.read_named([records])
    return Live.of_records(measured)


def terms(storage: str, horizon: str, margin: float | None) -> ReplanOptions:
    """When a change is worth it, as the options say.

    Raises:
        InputError: One of them is out of its range.
    """
    try:
        horizon_s = float(horizon)
    except ValueError:
        try:
            horizon_s = seconds(horizon)
        except ValueError as error:
            raise InputError(f"--horizon {error}; it is {horizon!r}") from None
    return ReplanOptions(storage, horizon_s, margin)


def show_adaptation(report: Watched) -> None:
    """Prints what was watched and what came of it."""
    out = console()
    for line in watched_said(report):
        out.print(line)


def write_adaptation(report: Watched, json: Path | None) -> list[Path]:
    """Writes the file that was asked for, or prints it for "-"; returns it."""
    return write_answers(json, None, lambda path: write_watched_json(path, report), lambda _: None)
