"""Facts about an application, its cluster and its run, for the pages of ``app plan`` and ``app run``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lengthwise.report.apps_text import AppFacts
from lengthwise.report.formatting import counted

if TYPE_CHECKING:
    from lengthwise.usecases.app_plan import PlannedApp
    from lengthwise.usecases.app_run import AppRun
    from lengthwise.usecases.app_setup import AppRequest


def facts_of(requested: AppRequest, planned: PlannedApp, name: str) -> AppFacts:
    """Return the facts about a plan that its page shows. ``name`` is used if the application has no name."""
    machines = planned.space.cluster.machines if planned.space is not None else ()
    is_mixed = len({machine.gpu.name for machine in machines}) > 1
    details = [
        f"{len(requested.file.rows.rows):,} rows",
        f"{len(planned.expanded.tasks):,} tasks at most",
        counted(len(requested.app.models), "model"),
    ]
    gpus = []
    for number, machine in enumerate(machines):
        group = machine.node.link_group
        if machine.gpus == 1:
            links = ""
        elif group >= machine.gpus:
            links = ", fast links between all"
        else:
            small = {1: ", no fast links", 2: ", fast links in pairs"}
            links = small.get(group, f", fast links between {group} each")
        details.append(f"{machine.gpus} x {machine.gpu.name}{links}")
        node = f"node {number}, " if len(machines) > 1 else ""
        kind = f" ({machine.gpu.name})" if is_mixed else ""
        gpus += [f"{node}GPU {k}{kind}" for k in range(machine.gpus)]
    if planned.plan is not None:
        details.append(f"planned by {planned.plan.method.replace('_', ' ')}")
    return AppFacts(requested.app.name or name, tuple(details), tuple(gpus), is_mixed)


def facts_of_run(requested: AppRequest, planned: PlannedApp, name: str, done: AppRun) -> AppFacts:
    """Return the facts of a run, with its manifest and the recorded answers and tokens of each model."""
    from lengthwise.apps.run import recorded

    answers, tokens = recorded(done.folder)
    details = facts_of(requested, replace(planned, plan=done.plan), name)
    return replace(details, manifest=done.metadata, tokens=tokens, answers=answers)
