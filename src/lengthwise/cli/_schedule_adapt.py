"""What ``lengthwise schedule run`` plays, how ``--adapt`` follows lengths, and which options exclude each other."""

from __future__ import annotations

import typer

from lengthwise import scenario as scenarios
from lengthwise.cli import _schedule_watch_page, _workload_page
from lengthwise.scenario import Follow, PlannedRun, Scenario
from lengthwise.schedule import Watch
from lengthwise.schema.workload import Workload

MOST = 1000
"""Requests that are drawn from a preset, where nothing else is said."""
_OF_THE_PLAN = tuple(
    f"schedule.{key}" for key in ("latency_bound", "bound_for", "strategies", "worst_case", "threshold")
)


def require_no_rival(
    latency_bound: str | None, strategy: str | None, set_: list[str] | None, *, planned: bool
) -> None:
    """Nothing, unless a plan is read and told what only planning takes.

    Raises:
        BadParameter: It is; the message says which of both to leave out.
    """
    given = [name for name, value in (("--latency-bound", latency_bound), ("--strategy", strategy)) if value]
    given += [f"--set {text}" for text in set_ or () if text.split("=")[0].strip() in _OF_THE_PLAN]
    if planned and given:
        raise typer.BadParameter(
            f"excludes {' and '.join(given)}: a plan that was made has its own bound and strategy; leave --schedule "
            "out to have the scenario planned with these, or plan first: lengthwise schedule SCENARIO --json PLAN.json",
            param_hint="--schedule",
        )


def asked_for(
    *, adapt: bool, false_alarms: float | None, storage: str | None, horizon: str | None
) -> Follow | None:
    """How lengths are to be followed; None: they are not.

    Raises:
        InputError: An option is out of its range.
        BadParameter: One goes with --adapt, which is not there.
    """
    given = {"--false-alarms": false_alarms, "--storage": storage, "--horizon": horizon}
    for name, value in given.items():
        if value is not None and not adapt:
            raise typer.BadParameter("goes with --adapt", param_hint=name)
    if not adapt:
        return None
    watch = Watch() if false_alarms is None else Watch(false_alarms)
    return Follow(watch, _schedule_watch_page.terms(storage or "dram", horizon or "1h", None))


def requests_of(
    asked: Scenario, planned: PlannedRun, engines: int, workload: str | None, number: int | None, seed: int
) -> Workload:
    """The requests to play: the scenario's, or others; of a preset so many are drawn, a trace is played whole.

    Raises:
        InputError: They cannot be read.
    """
    if workload is None:
        return scenarios.schedule_requests(asked, planned, engines, seed)
    return _workload_page.opened(workload, None, number or MOST, seed)


__all__ = ["asked_for", "requests_of", "require_no_rival"]
